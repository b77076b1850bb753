# SPDX-License-Identifier: Apache-2.0
"""How a style, which speaks of its own axes only, places tensors that live on a larger mesh.

A style given `mesh["tp"]` says nothing about "dp": the other axes of a DTensor's mesh stay as they are. A plain tensor
becomes a DTensor on the mesh of the cell's parameters; on axes the style does not name it is laid out as `replicate`
noted for that cell (the batch), else Replicate.
"""
from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

from mindspore import Tensor, nn

from .. import comm
from ..core.layout import Layout, layout_for, said_of
from ..core.mesh import DeviceMesh, common_root, coordinates
from ..core.placements import REPLICATE, Placement
from ..core.tree import leaves
from ..dispatch import modes
from ..dispatch.operands import LAID_OUT, dtype_name, wrap
from ..dispatch.patches.recomputed import standing_in
from ..dispatch.replaced import current
from ..errors import DTensorError, LayoutError, MixedOperandError
from ..tensor.distribute import distribute_parameter, set_parameter
from ..tensor.dtensor import DTensor

STYLES_MESH = "_ms_dtensor_styles_mesh"  # cell attribute: the mesh of styles which are all for cells of another stage
OUTER = "_ms_dtensor_outer"  # cell attribute: (whole mesh, {axis: placement of plain inputs}), set by replicate
_TOLD = "_ms_dtensor_extents"  # cell attribute: of plain inputs at the last call, this rank's and the whole ones
ROOT = "_ms_dtensor_replicated"  # cell attribute: replicate was applied to this very cell
HANDED_OUT: Counter[str] = Counter()  # by styles so far: plain "tensors", and outputs as tuples of "parts"
_FUSED = ("FusedColwiseParallel for a fused projection (q, k, v, or gate and up, in one weight): of a contiguous cut the "
          "first ranks hold q")
_KEEP = "use_local_output=False in the styles, which keeps DTensors of global shape"
_ABOUT_SIZES = re.compile("proposed_shape|shape|dimension|split")  # as MindSpore's own refusals speak
_ABOUT_PARTS = re.compile("'tuple' object|Tuple<Tensor")


def by_axis(placement, mesh: DeviceMesh, who: str) -> dict[str, Placement]:
    """A style's placement argument as {axis: placement}.

    Raises:
        LayoutError: a single placement on a mesh of several axes.
    """
    if isinstance(placement, Mapping):
        return {mesh.mesh_dim_names[mesh.axis_index(a)]: p for a, p in placement.items()}
    if isinstance(placement, tuple | list) and len(placement) == mesh.ndim:
        return dict(zip(mesh.mesh_dim_names, placement))
    if isinstance(placement, Placement) and mesh.ndim == 1:
        return {mesh.mesh_dim_names[0]: placement}
    raise LayoutError(f"For '{who}', the placement {placement!r} does not say which axis it is for.",
                      f"mesh({mesh.describe()})", "A style speaks of its own axes, one placement each.",
                      (f"apply the style on one axis: mesh[{mesh.mesh_dim_names[-1]!r}]",
                       f"name the axis: {{{mesh.mesh_dim_names[-1]!r}: {placement!r}}}"))


def check_one_axis(mesh: DeviceMesh, who: str) -> None:
    """Refuses a mesh of several axes, for a style that cuts a weight."""
    if mesh.ndim != 1:
        raise LayoutError(f"For '{who}', the mesh has {mesh.ndim} axes.", f"mesh({mesh.describe()})",
                          "The style cuts a weight over one axis.", f"apply it on mesh[{mesh.mesh_dim_names[-1]!r}]")


def place(x: DTensor, mesh: DeviceMesh, placement, who: str) -> DTensor:
    """`x` redistributed on the axes of `mesh`; the other axes of its own mesh stay."""
    find = _target if isinstance(placement, Placement) else _target.__wrapped__
    target = find(x.layout, mesh, placement, who)
    return x if target is None else x.redistribute(placements=target)


@functools.lru_cache(maxsize=4096)
def _target(layout: Layout, mesh: DeviceMesh, placement, who: str) -> list[Placement] | None:
    """Where `place` takes a tensor of this layout; None: it is there."""
    wanted = by_axis(placement, mesh, who)
    placed = list(layout.placements)
    missing = [a for a in wanted if a not in layout.mesh.mesh_dim_names]
    if missing:
        raise LayoutError(f"For '{who}', the input's mesh has no axis {missing[0]!r}.", layout.describe(), "",
                          f"lay the input out on a mesh that has the axes {mesh.mesh_dim_names}")
    for axis, p in wanted.items():
        placed[layout.mesh.axis_index(axis)] = p
    try:
        return None if layout.with_placements(placed, layout.order) is layout else placed
    except LayoutError as error:
        raise said_of(error, who) from None


def enter(x, cell: nn.Cell, mesh: DeviceMesh, placement, who: str, shape=None, beside: Iterable = ()) -> DTensor:
    """A DTensor as it is; a plain tensor, said to be laid out by `placement`, as a DTensor on the cell's mesh.

    `shape`: its global shape, where it is known that shards differ in size; else the ranks are asked. `beside`: the
    call's arguments; the mesh of a DTensor among them may have more axes than the cell knows. What a cell with
    `constants="replicate"` made is the whole on each rank, whatever a style says of plain inputs.
    """
    if isinstance(x, DTensor):
        return x
    if any(call.unit.local for call in standing_in.get()):
        raise LayoutError(f"For '{who}', a plain input came inside of a cell that computes on local tensors.",
                          f"plain Tensor{list(x._shape)}", "There gradients are added up over ranks; a style takes "
                          "them to be those of one device.", ("fully_shard without local_inputs=True",
                                                              "collectives in the cell, and weight.to_local()"))
    whole, outer = getattr(cell, OUTER, (mesh, {}))
    for other in leaves(beside, DTensor):
        whole = union_mesh(whole, other.device_mesh, who)
    if modes.mode.get().constants:
        return DTensor.from_local(x, whole, [REPLICATE] * whole.ndim)
    placed = {**(outer if x.ndim else {}), **by_axis(placement, mesh, who)}  # a number has no rows
    if shape is None:
        placements = tuple(placed.get(a, REPLICATE) for a in whole.mesh_dim_names)
        shape = _asked(x, cell, layout_for(who, whole, placements, x.shape, dtype_name(x.dtype)), who)
    out = DTensor.from_local(x, whole, placed, shape=shape)
    x.__dict__[LAID_OUT] = out.layout
    return out


def _asked(x: Tensor, cell: nn.Cell, layout: Layout, who: str) -> tuple[int, ...] | None:
    """The global shape of a plain input that ranks hold unlike shards of; None where the shards are alike.

    They tell each other what they hold when the extents of the cut dims are not those of the last call (one small message).
    """
    mesh = layout.mesh
    cut = [d for d, axes in enumerate(layout.dim_axes) if any(mesh.shape[a] > 1 for a in axes)]
    known = x.__dict__.get(LAID_OUT)
    if known is not None and (known.mesh, known.placements, known.local_shape()) == (mesh, layout.placements, x.shape):
        return known.shape
    if not cut:
        return None
    mine, told = tuple(x.shape[d] for d in cut), cell.__dict__.setdefault(_TOLD, {})
    key = who, x.ndim, layout.placements
    if key not in told or told[key][0] != mine:
        same = None if x.is_floating_point() else zlib.crc32(x.asnumpy().tobytes())
        with comm.annotate(src=f"{who}: extents of a plain input", dst=str(mine)):
            got = mesh.get_group().all_gather_object([same, *x.shape])
        if same is not None and len({tuple(piece) for piece in got}) == 1 and x.size > 1:
            raise LayoutError(f"For '{who}', a plain input of integers is the same on all ranks.",
                              f"{x.dtype}{list(x.shape)}, mesh({mesh.describe()})",
                              f"It was said to be laid out as {layout.placements}: each rank passes its own piece.",
                              ("input_layouts=Replicate(), if every rank passes the whole",
                               "distribute_tensor(whole, mesh, placements), if it is cut"))
        pieces = [tuple(piece[1:]) for piece in got]
        whole = global_shape(pieces, mesh, layout.placements)
        if whole is None:
            raise LayoutError(f"For '{who}', the ranks' plain inputs are not the shards of one tensor.",
                              "\n".join(f"rank {r} holds {list(p)}" for r, p in zip(mesh.rank_list, pieces)),
                              f"They were said to be laid out as {layout.placements}: chunks, the first ones larger.",
                              "lay the whole input out with distribute_tensor")
        told[key] = mine, None if len({*pieces}) == 1 else {d: whole[d] for d in cut}
    extents = told[key][1]
    return extents and tuple(extents.get(d, n) for d, n in enumerate(x.shape))


def global_shape(pieces: list[tuple[int, ...]], mesh: DeviceMesh, placements) -> tuple[int, ...] | None:
    """The shape whose shards, over the mesh in row-major order, have these shapes; None if there is none."""
    if len({len(piece) for piece in pieces}) > 1:
        return None
    held = dict(zip(coordinates(mesh), pieces))
    axes_of = Layout(mesh, placements, pieces[0]).dim_axes
    whole = tuple(sum(shape[d] for at, shape in held.items() if not any(n for a, n in enumerate(at) if a not in axes))
                  for d, axes in enumerate(axes_of))
    layout = Layout(mesh, placements, whole)
    return whole if all(shape == layout.local_shape(at) for at, shape in held.items()) else None


def hand_out(x: DTensor, cell: nn.Cell | None = None) -> Tensor:
    """A style's output as a plain local tensor; a cell that `replicate` was applied to keeps DTensors."""
    if cell is not None and ROOT in cell.__dict__:
        return x
    if modes.mode.get().constants:
        raise LayoutError("For 'constants=\"replicate\"', a style inside the cell hands out a plain tensor.",
                          x.layout.describe(), "It is one rank's own; what is computed of it would pass for a constant.",
                          _KEEP)
    HANDED_OUT["tensors"] += 1
    out = x.to_local()
    out.__dict__[LAID_OUT] = x.layout
    return out


def around_construct(cell: nn.Cell, wrap: Callable[[Callable], Callable]) -> None:
    """A cell runs `wrap` of its `construct`, as that is now; a method, so that a copy of the cell runs its own."""
    given: Any = cell.__dict__["construct"].__func__ if "construct" in cell.__dict__ else type(cell).construct
    run = wrap(given)
    run.__name__ = "construct"  # recompute finds a cell's method by its name, whatever stands around it
    cell.__dict__["construct"] = MethodType(run, cell)


def explained(given: Callable) -> Callable:
    """A `construct` of a cell whose styles hand out plain tensors: it says why code that reads global sizes fails."""
    @functools.wraps(given)
    def run(self, *args, **kwargs):
        before = HANDED_OUT.copy()
        try:
            return given(self, *args, **kwargs)
        except MixedOperandError as e:
            if HANDED_OUT["tensors"] == before["tensors"] or _KEEP in e.fix:
                raise
            raise MixedOperandError(e.attempt, e.operands, e.rule, (_KEEP, *e.fix)) from e
        except (AttributeError, TypeError, ValueError, RuntimeError) as e:
            first = str(e).split("\n")[0].rstrip(".")
            if HANDED_OUT["parts"] != before["parts"] and not isinstance(e, DTensorError) and _ABOUT_PARTS.search(first):
                raise LayoutError(f"For '{type(self).__name__}', an op on the output of a fused projection failed: {first}.",
                                  "a tuple of DTensors, one per part", "FusedColwiseParallel(use_local_output=False) hands "
                                  "out the parts, where the plain cell gives one tensor to split.",
                                  ("split_output=False, too, and the model stays as it is",
                                   "q, k, v = self.qkv(x), without the split or reshape that follows it")) from e
            about_sizes = isinstance(e, ValueError | RuntimeError) and _ABOUT_SIZES.search(first)
            if HANDED_OUT["tensors"] == before["tensors"] or isinstance(e, DTensorError) or not about_sizes:
                raise
            raise LayoutError(f"For '{type(self).__name__}', an op on a plain tensor failed: {first}.",
                              "plain outputs of styles", "They are this rank's shards: of the heads, say, its own number.",
                              (_KEEP, _FUSED)) from e
    return run


def taken_back(x: Tensor, cell: nn.Cell, before: int, who: str) -> Tensor:
    """An output of a data-parallel cell: the DTensor again that a style handed out as a plain tensor.

    Raises:
        LayoutError: a plain tensor that was computed from such outputs; nobody knows how it is laid out.
    """
    if isinstance(x, DTensor) or not x.is_floating_point():
        return x
    layout = x.__dict__.get(LAID_OUT)
    if layout is not None:
        return wrap(x, layout)
    if HANDED_OUT["tensors"] != before:
        raise LayoutError(f"For '{who}', {type(cell).__name__} computed a plain tensor from plain outputs of styles.",
                          f"plain Tensor{list(x._shape)}", "It is one rank's own, so would be the loss, and gradients, "
                          "summed over the ranks, would come out too large.",
                          ("use_local_output=False in the styles, which keeps DTensors",
                           "end with PrepareModuleOutput on the last cell"))
    return x


def place_first_input(module: nn.Cell, mesh: DeviceMesh, given, wanted, who: str) -> None:
    """Lets a cell of one data input, positional or by keyword, find it as `wanted`; `given` says how a plain one lies."""
    def convert(cell, x):
        if not isinstance(x, Tensor):
            raise LayoutError(f"For '{who}', the input of {type(cell).__name__} must be a tensor, but got "
                              f"{type(x).__name__}.")
        return place(enter(x, cell, mesh, given, who), mesh, wanted, who)

    def before(cell, inputs, kwargs):
        if inputs:
            return (convert(cell, inputs[0]), *inputs[1:]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return inputs, {**kwargs, key: convert(cell, value)}
        raise LayoutError(f"For '{who}', {type(cell).__name__} was called without an input.", "", "It takes one tensor.",
                          "pass it")
    module.register_forward_pre_hook(before, with_kwargs=True)


def check_agrees(param: DTensor, mesh: DeviceMesh, placement) -> None:
    """Refuses to lay a parameter out again, in another way."""
    wanted = Layout(mesh, placement, param.shape, param.layout.dtype)
    names = mesh.mesh_dim_names
    have = {a: p for a, p in zip(param.device_mesh.mesh_dim_names, param.placements) if a in names}
    if not have:
        raise LayoutError(f"For 'parallelize_module', parameter '{param.name}' is laid out on other axes already.",
                          f"{param.layout.describe()}, style on mesh({mesh.describe()})",
                          "Styles cut plain parameters; data parallelism takes up what they made.",
                          "parallelize_module(...) first, then replicate(module, mesh=...)")
    if have != dict(zip(names, wanted.placements)):
        raise LayoutError(f"For 'parallelize_module', parameter '{param.name}' is laid out already, differently.",
                          f"{param.layout.describe()} -> {wanted}", "A parameter has one layout.",
                          "give cells that share a parameter styles that agree on it")


def check_ties(work, mesh: DeviceMesh) -> None:
    """Refuses styles that would lay one parameter out in two ways.

    Args:
        work: (cell, {key: placement}) of every cell that a style is about to be applied to.
        mesh: the styles' mesh.
    """
    first: dict[int, Layout] = {}
    for cell, placements in work:
        for key, placement in placements.items():
            param = current(cell._params[key])
            if isinstance(param, DTensor):
                check_agrees(param, mesh, [placement] * mesh.ndim)
                continue
            wanted = Layout(mesh, [placement] * mesh.ndim, tuple(param.shape))
            if first.setdefault(id(param), wanted) is not wanted:
                raise LayoutError(f"For 'parallelize_module', parameter '{param.name}' is shared by cells whose styles cut "
                                  "it in different ways.", f"{first[id(param)].describe()}, {wanted}",
                                  "A parameter has one layout.", "give both cells styles that agree on it")


def shard_parameter(cell: nn.Cell, key: str, mesh: DeviceMesh, placement, src_data_rank: int | None) -> None:
    """Makes one parameter of a cell a DTensor on `mesh`, keeping ties: a parameter that is one already stays."""
    param = current(cell._params[key])  # it may be tied to a cell that was dealt with
    if isinstance(param, DTensor):
        check_agrees(param, mesh, placement)
    else:
        param = distribute_parameter(param, mesh, placement, src_data_rank=src_data_rank)
    set_parameter(cell, key, param)


def union_mesh(a: DeviceMesh, b: DeviceMesh, who: str) -> DeviceMesh:
    """The smallest sub-mesh of a common root, or of a grid of siblings (`unflatten`), that has the axes of both.

    Raises:
        LayoutError: there is none.
    """
    if set(a.mesh_dim_names) <= set(b.mesh_dim_names) and b[a.mesh_dim_names] == a:
        return b
    for root in filter(None, (b.root, a.root, common_root(a, b))):
        names = set(a.mesh_dim_names) | set(b.mesh_dim_names)
        if names <= set(root.mesh_dim_names) and root[a.mesh_dim_names] == a and root[b.mesh_dim_names] == b:
            return root[tuple(n for n in root.mesh_dim_names if n in names)]
    raise LayoutError(f"For '{who}', the meshes have no common root.", f"mesh({a.describe()}), mesh({b.describe()})",
                      "Both must be sub-meshes of one mesh, or of meshes split from one by 'unflatten' whose axes do not "
                      "run across each other.", 'slice them from one: mesh["dp"], mesh["tp"]')
