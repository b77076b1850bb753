# SPDX-License-Identifier: Apache-2.0
"""Layout: mesh + one placement per axis + global shape + dtype, as one interned value.

The global shape is stored, never inferred from a local one; the local shape and offset of any rank are pure functions
of the layout. Equal layouts are the same object, so a cache may key on identity. Several axes may shard one dim; the
order in which they split it (outermost first) is part of the layout, and is the mesh's axis order unless given.

Not here: how to get from one layout to another (`redistribute/plan.py`), and any tensor.
"""
from __future__ import annotations

import itertools
import math
import re
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np

from ..errors import DTensorError, LayoutError, MeshError
from .mesh import DeviceMesh
from .placements import PARTIAL, REPLICATE, FusedShard, Placement, Replicate, Shard

E = TypeVar("E", bound=DTensorError)

_SHORT = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}
_interned: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_KNOWN_LIMIT = 4096
_known: dict = {}  # see `known_layout`
_lock = threading.Lock()


class Layout:
    """Where the pieces of a tensor are.

    Args:
        mesh: the device mesh.
        placements: one `Placement` per mesh axis; or the alias form, one entry per tensor dim (`("dp", "None")`,
            `(("dp", "tp"), "None")`, first axis outermost); or `{"tp": Shard(0)}`, other axes Replicate. In both a flattened
            axis stands for those it was made of.
        shape: the global shape.
        dtype: name of the dtype ("float32").
        order: axes (names or indices), outermost split first; matters only for axes that shard one dim.

    Raises:
        LayoutError: wrong number of placements, a Shard dim out of range, an axis used twice.

    Example:
        >>> from ms_dtensor import DeviceMesh, Layout, Shard, Partial
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> layout = Layout(mesh, [Shard(0), Partial()], (5, 4), "float32")
        >>> layout, layout.local_shape((1, 0)), layout.local_offset((1, 0))
        (f32[5@dp, 4]{sum: tp}, (2, 4), (3, 0))
        >>> layout is Layout(mesh, {"dp": Shard(-2), "tp": Partial()}, (5, 4), "float32")
        True
    """

    __slots__ = ("mesh", "placements", "shape", "dtype", "dim_axes", "partial_axes", "has_nonlinear_partial",
                 "_local", "_gradient", "_order", "_others", "__weakref__")

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: str
    dim_axes: tuple[tuple[int, ...], ...]
    partial_axes: tuple[int, ...]
    has_nonlinear_partial: bool  # partial in another way than a sum, which no gradient fits
    _local: dict[tuple[int, ...], tuple[tuple[int, int], ...]]
    _gradient: Layout | Literal[False] | None  # False: this very layout
    _order: tuple[int, ...] | None
    _others: dict[tuple, Layout]

    def __new__(cls, mesh, placements, shape, dtype="float32", order=None):
        shape = tuple(int(s) for s in shape)
        placed, order = normalize(mesh, placements, len(shape), order)
        for p in placed:
            if isinstance(p, FusedShard):
                _check_fused(p, placed, mesh, shape)
        return _intern(mesh, placed, shape, str(dtype), _dim_axes(placed, len(shape), order))

    def __setattr__(self, name, value):
        raise AttributeError(f"Layout is frozen; cannot set {name!r}")

    def __reduce__(self):
        return Layout, (self.mesh, self.placements, self.shape, self.dtype, self.order)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    # -- the same tensor, placed differently ----------------------------------------------------------------------
    @property
    def order(self) -> tuple[int, ...]:
        """An axis order that reproduces this layout: sharding axes dim by dim, outermost first, then the rest.

        The outermost (major) axis splits a dim first, into few large blocks; the next one splits each block. With 8 rows
        sharded by dp=2 and tp=2, ranks (0, 0), (0, 1), (1, 0), (1, 1) begin at rows 0, 2, 4, 6 if dp is the outermost, and
        at rows 0, 4, 2, 6 if tp is:
            >>> from ms_dtensor import DeviceMesh, Layout, Shard
            >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
            >>> x = Layout(mesh, [Shard(0), Shard(0)], (8,), order=("tp", "dp"))
            >>> x, x.order, x.local_offset((0, 1))
            (f32[8@tp@dp], (1, 0), (4,))
        """
        order = self._order
        if order is None:
            sharding = [a for axes in self.dim_axes for a in axes]
            order = (*sharding, *(a for a in range(self.mesh.ndim) if a not in sharding))
            object.__setattr__(self, "_order", order)
        return order

    def with_placements(self, placements, order=None) -> Layout:
        """This tensor with other placements (any form)."""
        if placements.__class__ is not list or order.__class__ is list or not isinstance(placements[0], Placement):
            return Layout(self.mesh, placements, self.shape, self.dtype, order)
        if tuple(placements) == self.placements and all(len(axes) < 2 for axes in self.dim_axes):  # no order to change
            return self
        key = (*placements, order)
        known = self._others.get(key)
        if known is None:
            known = self._others[key] = Layout(self.mesh, placements, self.shape, self.dtype, order)
        return known

    def without_small_axes(self) -> Layout:
        """This tensor with Replicate on axes of one rank, where all placements mean the same."""
        sizes = self.mesh.shape
        if all(n > 1 or p.is_replicate() for n, p in zip(sizes, self.placements)):
            return self
        return self.with_placements([p if n > 1 else REPLICATE for n, p in zip(sizes, self.placements)], self.order)

    def replicated(self) -> Layout:
        """This tensor whole on every rank."""
        return Layout(self.mesh, [REPLICATE] * self.mesh.ndim, self.shape, self.dtype)

    def reduced(self, to: Placement = REPLICATE) -> Layout:
        """This tensor with its partial axes reduced to Replicate (or another placement); the others stay."""
        return self.with_placements([to if p.is_partial() else p for p in self.placements], self.order)

    def of_dims(self, dims: Sequence[int], dtype: str | None = None) -> Layout:
        """The layout of what is kept of a tensor's dims, all alike along the others: sums of its rows, say.

        Args:
            dims: those that are left, in order.
            dtype: of it; default this one's.

        Example:
            >>> from ms_dtensor import DeviceMesh, Layout, Shard
            >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
            >>> Layout(mesh, [Shard(1), Shard(0)], (5, 4)).of_dims([1])
            f32[4@dp]
        """
        new = {d: i for i, d in enumerate(dims)}
        placed = [p if not p.is_shard() else p.with_dim(new[p.dim]) if p.dim in new else REPLICATE for p in self.placements]
        return Layout(self.mesh, placed, [self.shape[d] for d in dims], dtype or self.dtype, self.order)

    def gradient(self, partial_on: Sequence[int] = ()) -> Layout:
        """The layout of this value's cotangent: Shard stays, Partial and Replicate become Replicate.

        Args:
            partial_on: axes on which the ranks do work of their own with a value that is Replicate there: each has a
                summand of the cotangent.
        """
        if self._gradient is None:
            placed = [p if p.is_shard() else REPLICATE for p in self.placements]
            grad = _intern(self.mesh, tuple(placed), self.shape, self.dtype, self.dim_axes)
            object.__setattr__(self, "_gradient", grad is not self and grad)  # no reference to itself: a cycle
        if not partial_on:
            return self._gradient or self
        placed = list(self.gradient().placements)
        for a in partial_on:  # a comprehension would make a cell of `partial_on`, which slows every call
            if self.placements[a].is_replicate():
                placed[a] = PARTIAL
        return self.with_placements(placed, self.order)

    # -- arithmetic -----------------------------------------------------------------------------------------------
    def local_box(self, coordinate: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
        """(start, stop) per dim of the shard at a coordinate (default: this process's).

        Of a `FusedShard` they count rows in the order in which ranks hold them; see `pieces`.
        """
        if coordinate is None:
            coordinate = self.mesh.get_coordinate()
        if coordinate is None:  # a process outside the mesh holds an empty shard
            return tuple((0, 0) for _ in self.shape)
        key = tuple(coordinate)
        box = self._local.get(key)
        if box is None:
            extents = []
            for size, axes in zip(self.shape, self.dim_axes):
                start, stop = 0, size
                for a in axes:
                    lo, hi = self.placements[a].bounds(stop - start, self.mesh.shape[a])[key[a]]
                    start, stop = start + lo, start + hi
                extents.append((start, stop))
            box = self._local[key] = tuple(extents)
        return box

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape of the shard at a coordinate (default: this process's)."""
        return tuple(hi - lo for lo, hi in self.local_box(coordinate))

    @property
    def fused(self) -> tuple[tuple[tuple[int, ...], FusedShard], ...]:
        """(axes, placement) of each `FusedShard` over several ranks; the outermost axis first."""
        found = dict[FusedShard, list[int]]()
        for a in itertools.chain(*self.dim_axes):
            p = self.placements[a]
            if isinstance(p, FusedShard) and self.mesh.shape[a] > 1:
                found.setdefault(p, []).append(a)
        return tuple((tuple(axes), p) for p, axes in found.items())

    def pieces(self, coordinate: Sequence[int] | None = None) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dim, (start, stop) of the runs of rows that the shard is made of: one, but for a `FusedShard`."""
        here = self.mesh.get_coordinate() if coordinate is None else coordinate
        runs: list[tuple[tuple[int, int], ...]] = [(extent,) for extent in self.local_box(here)]
        if here is not None:
            for axes, p in self.fused:
                sizes = [self.mesh.shape[a] for a in axes]  # equal chunks of equal chunks are those of all ranks
                runs[p.dim] = p.pieces(math.prod(sizes))[int(np.ravel_multi_index([here[a] for a in axes], sizes))]
        return tuple(runs)

    def assemble(self, of_box, coordinate: Sequence[int] | None = None) -> np.ndarray:
        """The array of a shard, from what `of_box` gives of each box of the tensor that it is made of."""
        return _assembled(of_box, self.pieces(coordinate), ())

    def local_offset(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Global index of the first element of the shard at a coordinate (default: this process's)."""
        if self.fused:
            raise LayoutError("For 'local_offset', the shard is no single box of the tensor.", self.describe(),
                              "A FusedShard holds a chunk of every part.", ("layout.pieces()", "redistribute to Shard(dim)"))
        return tuple(lo for lo, _ in self.local_box(coordinate))

    def is_replicated(self) -> bool:
        """True if every rank holds the whole value."""
        return all(p.is_replicate() for p in self.placements)

    def is_whole(self) -> bool:
        """True if every rank holds the whole value, whatever its placement on an axis of one rank."""
        return all(p.is_replicate() or n == 1 for p, n in zip(self.placements, self.mesh.shape))

    def has_partial(self) -> bool:
        """True if some axis is Partial."""
        return bool(self.partial_axes)

    def divisor(self, dim: int) -> int:
        """Into how many shards `dim` is split."""
        n = 1
        for a in self.dim_axes[dim]:
            n *= self.mesh.shape[a]
        return n

    # -- printing -------------------------------------------------------------------------------------------------
    def __repr__(self):
        names = self.mesh.mesh_dim_names
        parts = {p.dim: p.parts for p in self.placements if p.parts}
        dims = ["+".join(map(str, parts.get(d, (s,)))) + "".join("@" + names[a] for a in axes)
                for d, (s, axes) in enumerate(zip(self.shape, self.dim_axes))]
        partial = [f"{self.placements[a].reduce_op}: {names[a]}" for a in self.partial_axes]
        return f"{short_dtype(self.dtype)}[{', '.join(dims)}]" + (f"{{{', '.join(partial)}}}" if partial else "")

    def describe(self) -> str:
        """The layout and its mesh, as error messages print them."""
        return f"{self!r} on mesh({self.mesh.describe()})"


def known_layout(mesh, placements, shape, dtype: str, even: bool = False) -> Layout:
    """`Layout(mesh, placements, shape, dtype)`, remembered for placements that are a list or tuple of values.

    Args:
        mesh, placements, shape, dtype: as for `Layout`.
        even: `shape` is a shard's; the layout is that of the tensor all of whose shards are like it.
    """
    key: tuple | None
    try:
        key = (mesh, mesh.varies, placements if placements is None else tuple(placements), shape, dtype, even)
        layout = _known.get(key)
    except TypeError:  # one placement alone, or lists of names
        key = layout = None
    if layout is None:
        if even:
            placed, order = normalize(mesh, placements, len(shape))
            whole = [n * math.prod(mesh.shape[a] for a in axes)
                     for n, axes in zip(shape, _dim_axes(placed, len(shape), order))]
            layout = Layout(mesh, placed, whole, dtype, order)
        else:
            layout = Layout(mesh, placements, shape, dtype)
        if key is not None and all(isinstance(p, Placement) for p in placements or ()):
            if len(_known) >= _KNOWN_LIMIT:
                _known.clear()
            _known[key] = layout
    return layout


def layout_for(who: str, mesh, placements, shape, dtype: str, even: bool = False) -> Layout:
    """`known_layout`; what it refuses is said of the call that the user made."""
    try:
        return known_layout(mesh, placements, shape, dtype, even)
    except (LayoutError, MeshError) as error:
        raise said_of(error, who) from None


def in_dtype(layout: Layout, dtype: str) -> Layout:
    """The same tensor in another dtype."""
    return layout if dtype == layout.dtype else Layout(layout.mesh, layout.placements, layout.shape, dtype, layout.order)


def said_of(error: E, who: str) -> E:
    """The same refusal, of a call instead of its argument `placements`, or the mesh that was asked for an axis."""
    attempt = re.sub("^For '(placements|order|DeviceMesh)'", f"For '{who}'", error.attempt)
    return type(error)(attempt, error.operands, error.rule, error.fix)


def remembered() -> tuple[int, int]:
    """How many layouts `known_layout` holds, and may hold."""
    return len(_known), _KNOWN_LIMIT


def _check_fused(p: FusedShard, placed, mesh: DeviceMesh, shape) -> None:
    where = f"{list(shape)} on mesh({mesh.describe()})"
    if sum(p.parts) != shape[p.dim]:
        raise LayoutError(f"For 'FusedShard', the parts {p.parts} have {sum(p.parts)} rows, dim {p.dim} has "
                          f"{shape[p.dim]}.", where, "The parts are all of the dim.", "correct 'parts'")
    along = [(q, n) for q, n in zip(placed, mesh.shape) if q.is_shard(p.dim) and n > 1]
    if len(along) < 2:
        return
    ranks = math.prod(n for _, n in along)
    if any(q != p for q, _ in along):
        raise LayoutError(f"For 'FusedShard', two axes would shard dim {p.dim}: {placed}.", where,
                          "A dim that is cut part by part is so by every axis.", f"use {p!r}, or Shard({p.dim}), on both")
    if any(n % ranks for n in p.parts):
        raise LayoutError(f"For 'FusedShard', {len(along)} axes of {ranks} ranks would shard dim {p.dim}: {placed}.", where,
                          "Where several axes cut a dim part by part, all ranks have as much of each part.",
                          (f"parts that {ranks} divides", f"use Shard({p.dim}) on both"))


def _intern(mesh, placements, shape, dtype, dim_axes) -> Layout:
    key = (mesh, mesh.varies, placements, shape, dtype, dim_axes)  # equal meshes may be of one rank's view only
    layout = _interned.get(key)
    if layout is None:
        with _lock:
            layout = _interned.get(key)
            if layout is None:
                layout = object.__new__(Layout)
                partial = tuple(i for i, p in enumerate(placements) if p.is_partial())
                nonlinear = any(not placements[a].is_partial("sum") for a in partial)
                held: tuple = (mesh, placements, shape, dtype, dim_axes, partial, nonlinear, {}, None, None, {})
                for name, value in zip(Layout.__slots__, held):
                    object.__setattr__(layout, name, value)
                _interned[key] = layout
    return layout


def _dim_axes(placements, ndim, order) -> tuple[tuple[int, ...], ...]:
    out: list[list[int]] = [[] for _ in range(ndim)]
    for a in order:
        if placements[a].is_shard():
            out[placements[a].dim].append(a)
    return tuple(map(tuple, out))


def normalize(mesh: DeviceMesh, placements, ndim: int, order=None):
    """Any accepted form of placements -> (one Placement per axis, axis order). Raises LayoutError."""
    if placements is None:
        placed: list = [REPLICATE] * mesh.ndim
    elif isinstance(placements, Placement):
        placed = [placements]
    elif isinstance(placements, Mapping):
        placed, order = _by_name(mesh, placements, order)
    elif isinstance(placements, str) or not isinstance(placements, Collection):
        raise LayoutError(f"For 'placements', the placements must be a sequence of them, but got {placements!r}.",
                          f"tensor of {ndim} dims on mesh({mesh.describe()})", "There is one placement per mesh axis.",
                          "write [Shard(0)] for a mesh of one axis")
    elif len(placements) and all(_is_alias(p) for p in placements):
        placed, order = _from_alias(mesh, placements, ndim)
    else:
        placed = list(placements)
    where = f"tensor of {ndim} dims on mesh({mesh.describe()})"
    if len(placed) != mesh.ndim:
        raise LayoutError(f"For 'placements', {len(placed)} placements were given: {placed}.", where,
                          f"There is one placement per mesh axis, so {mesh.ndim} here.",
                          (f"pass {mesh.ndim} placements", f"name the axis: {{{mesh.mesh_dim_names[-1]!r}: Shard(0)}}"))
    for i, p in enumerate(placed):
        if not isinstance(p, Placement):
            raise LayoutError(f"For 'placements', 'placements[{i}]' must be Shard, Replicate or Partial, but got {p!r}.",
                              where, "", "write Shard(dim), Replicate() or Partial()")
        if p.is_shard():
            if not -ndim <= p.dim < ndim:
                raise LayoutError(f"For 'placements', 'placements[{i}]' is {p!r}.", where,
                                  f"A tensor of {ndim} dims has dims {-ndim} to {ndim - 1}." if ndim else
                                  "A tensor of 0 dims cannot be sharded.",
                                  f"use Shard({ndim - 1})" if ndim else "use Replicate()")
            placed[i] = p if p.dim >= 0 else p.with_dim(p.dim + ndim)
        elif p.is_replicate():
            placed[i] = REPLICATE
    if order is None:
        return tuple(placed), tuple(range(mesh.ndim))
    order = tuple(mesh.axis_index(a) for a in order)
    if len(set(order)) != len(order):
        raise LayoutError(f"For 'order', an axis is named twice in {order}.", where)
    return tuple(placed), (*order, *(a for a in range(mesh.ndim) if a not in order))


def _by_name(mesh: DeviceMesh, placements: Mapping, order):
    named = [(mesh.axis_index(a), p) for axis, p in placements.items()
             for a in (mesh.expand_axes(axis) if isinstance(axis, str) else (axis,))]
    axes = [a for a, _ in named]
    placed = [REPLICATE] * mesh.ndim
    for a, p in named:
        if axes.count(a) > 1:
            raise LayoutError(f"For 'placements', axis {mesh.mesh_dim_names[a]!r} is named twice in {dict(placements)}.",
                              f"mesh({mesh.describe()})", "A flattened axis stands for the axes it was made of.",
                              "name each axis once")
        placed[a] = p
    return placed, axes if order is None and len(axes) > len(placements) else order  # a flattened axis has an order


def _is_alias(entry) -> bool:
    return isinstance(entry, str) or (isinstance(entry, list | tuple) and all(isinstance(e, str) for e in entry))


def _from_alias(mesh: DeviceMesh, entries, ndim: int):
    where = f"tensor of {ndim} dims on mesh({mesh.describe()})"
    if len(entries) != ndim:
        raise LayoutError(f"For 'placements', the placements {tuple(entries)}, in alias form, are {len(entries)}.", where,
                          f"The alias form has one entry per tensor dim, so {ndim} here.",
                          "write 'None' for dims that are not sharded")
    placed: list[Placement] = [Replicate()] * mesh.ndim
    order = []
    for dim, entry in enumerate(entries):
        for name in (entry,) if isinstance(entry, str) else entry:
            if name == "None":
                continue
            for axis in map(mesh.axis_index, mesh.expand_axes(name)):
                if axis in order:
                    raise LayoutError(f"For 'placements', axis {name!r} is used twice in {tuple(entries)}.", where,
                                      "An axis shards at most one dim.", "name each axis once")
                placed[axis] = Shard(dim)
                order.append(axis)
    return placed, order


def short_dtype(dtype: str) -> str:
    """`float32` -> `f32`."""
    for long, short in _SHORT.items():
        if dtype.startswith(long) and dtype[len(long):].isdigit():
            return short + dtype[len(long):]
    return dtype


def layout_strides(shape) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1:]) for d in range(len(shape)))


def _assembled(of_box, runs, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """No closure: one that calls itself is a circle, and what `of_box` reads would wait for the collector of garbage."""
    if not runs:
        return of_box(box)
    arrays = [_assembled(of_box, runs[1:], (*box, extent)) for extent in runs[0]]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, len(box))
