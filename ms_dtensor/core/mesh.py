# SPDX-License-Identifier: Apache-2.0
"""DeviceMesh: ranks arranged in a grid whose axes have names. Arithmetic only; nothing here communicates.

A mesh is a value: two meshes with the same device type, ranks and names are equal and hash alike, however they were
made. Which rank *this* process is comes from the process's world, which `comm` binds here (`bind_world`), so that
the arithmetic stays usable for 65,536 ranks in one process. Read next: `core/layout.py`.
"""
from __future__ import annotations

import contextvars
import difflib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..errors import MeshError

_DEVICE_TYPES = {"npu": "npu", "ascend": "npu", "gpu": "gpu", "cuda": "gpu", "cpu": "cpu"}
_default_mesh: contextvars.ContextVar = contextvars.ContextVar("ms_dtensor_default_mesh", default=())

def _no_world() -> None:
    return None


# both are replaced once, when comm is imported: mesh must not import upwards
_world_source: Callable = _no_world
_group_source: Callable = _no_world


def bind_world(world: Callable, group: Callable) -> None:
    """Tells the mesh module where to ask for the current world (`.rank`, `.size`) and for groups (ranks, axes)."""
    global _world_source, _group_source
    _world_source, _group_source = world, group


class DeviceMesh:
    """A named grid of ranks; meanings follow `torch.distributed.device_mesh.DeviceMesh`.

    Args:
        device_type: "npu", "gpu" or "cpu" (also "Ascend", "GPU", "CPU").
        mesh: nested list or ndarray of global ranks, in any order, each rank once.
        mesh_dim_names: one name per axis; default `("axis0", "axis1", ...)`.

    Attributes:
        varies: another set of ranks on other ranks, as a sub-mesh is that does not span its root: each rank has its block.

    Raises:
        MeshError: unknown device type, repeated rank, names that do not fit, or, where a process group of several ranks
            runs, a rank it does not have.

    Example:
        >>> from ms_dtensor import DeviceMesh
        >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
        >>> mesh, mesh.size("tp"), mesh["tp"] == mesh["tp"]
        (DeviceMesh(cpu, dp=2, tp=3), 3, True)
    """

    __slots__ = ("device_type", "mesh", "mesh_dim_names", "shape", "_key", "_hash", "_root", "_flat", "_coordinates",
                 "_groups", "varies", "__weakref__")

    def __init__(self, device_type: str, mesh, *, mesh_dim_names: Sequence[str] | None = None, _root=None):
        kind = _DEVICE_TYPES.get(str(device_type).lower())
        if kind is None:
            raise MeshError(f"For 'DeviceMesh', 'device_type' must be npu, gpu or cpu, but got {device_type!r}.")
        ranks = np.array(mesh, dtype=np.int64)
        if ranks.ndim == 0:
            ranks = ranks.reshape(1)
        flat = ranks.ravel().tolist()
        if len(set(flat)) != len(flat) or (flat and min(flat) < 0):
            raise MeshError(f"For 'DeviceMesh', 'mesh' must hold each rank once, but got {ranks.tolist()}.")
        world = _world_source()
        if world is not None and world.size > 1 and flat and max(flat) >= world.size:  # a world of one may plan for any
            raise MeshError(f"For 'DeviceMesh', 'mesh' has ranks {sorted(r for r in flat if r >= world.size)[:8]}, but the "
                            f"world has {world.size}.", "", f"Its ranks are 0 to {world.size - 1}.",
                            (f"launch with msrun --worker_num={max(flat) + 1}", "use ranks of the world"))
        if mesh_dim_names is None:
            names = tuple(f"axis{i}" for i in range(ranks.ndim))
        else:
            names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if len(names) != ranks.ndim or len(set(names)) != len(names):
            raise MeshError(f"For 'DeviceMesh', 'mesh_dim_names' must be {ranks.ndim} different names for the mesh of "
                            f"shape {ranks.shape}, but got {names}.")
        ranks.setflags(write=False)
        self.device_type, self.mesh, self.mesh_dim_names, self.shape = kind, ranks, names, ranks.shape
        self._key = (kind, ranks.shape, names, ranks.tobytes())
        self._hash = hash(self._key)
        self._root = _root
        self.varies = _root is not None and (_root.varies or ranks.size < _root.mesh.size)
        self._flat: dict[str, tuple[str, ...]] = {}
        self._coordinates: dict[int, tuple[int, ...] | None] = {}
        self._groups: dict = {}

    # -- a value --------------------------------------------------------------------------------------------------
    def __eq__(self, other):
        return self is other or (isinstance(other, DeviceMesh) and self._key == other._key)

    def __hash__(self):
        return self._hash

    def __reduce__(self):
        return _rebuild, (type(self), self.device_type, self.mesh.tolist(), self.mesh_dim_names)

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"DeviceMesh({self.device_type}, {self.describe()})"

    def describe(self) -> str:
        """`dp=2, tp=4`: the axes by name, as messages print them."""
        return ", ".join(f"{n}={s}" for n, s in zip(self.mesh_dim_names, self.shape))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.mesh.ndim

    @property
    def rank_list(self) -> tuple[int, ...]:
        """All ranks, row-major."""
        return tuple(self.mesh.ravel().tolist())

    def size(self, axis: int | str | None = None) -> int:
        """Number of ranks, of the mesh or along one axis."""
        return self.mesh.size if axis is None else self.shape[self.axis_index(axis)]

    def axis_index(self, axis: int | str) -> int:
        """Index of an axis given by name or (possibly negative) index."""
        if isinstance(axis, str):
            if axis in self.mesh_dim_names:
                return self.mesh_dim_names.index(axis)
            near = difflib.get_close_matches(axis, (*self.mesh_dim_names, *self._flat), 1, 0.5)
            raise MeshError(f"For 'DeviceMesh', there is no axis {axis!r}.", f"mesh({self.describe()})",
                            "Axes go by the names given at creation.",
                            f"did you mean {near[0]!r}?" if near else f"use one of {self.mesh_dim_names}")
        if not -self.ndim <= axis < self.ndim:
            raise MeshError(f"For 'DeviceMesh', axis {axis} is out of range.", f"mesh({self.describe()})")
        return axis % self.ndim

    # -- where this process is ------------------------------------------------------------------------------------
    def get_rank(self) -> int:
        """Global rank of this process (0 where no process group runs)."""
        world = _world_source()
        return 0 if world is None else world.rank

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Position of a global rank on the mesh, or None."""
        try:
            return self._coordinates[rank]
        except KeyError:
            found = np.argwhere(self.mesh == rank)
            at = self._coordinates[rank] = tuple(found[0].tolist()) if len(found) else None
            return at

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This process's position on the mesh, or None if it is not part of it."""
        return self.coordinate_of(self.get_rank())

    def get_local_rank(self, axis: int | str | None = None) -> int:
        """This process's position along one axis (may be left out on a mesh of one axis)."""
        if axis is None:
            if self.ndim != 1:
                raise MeshError("For 'get_local_rank', 'axis' must be given on a mesh of several axes.",
                                f"mesh({self.describe()})")
            axis = 0
        here = self.get_coordinate()
        if here is None:
            raise MeshError("For 'get_local_rank', this process is not part of the mesh.", f"mesh({self.describe()})")
        return here[self.axis_index(axis)]

    def ranks_along(self, axes: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Ranks that share `coordinate` on all other axes, row-major over `axes` in the order given."""
        at = list(coordinate)
        out = []
        for sub in itertools.product(*(range(self.shape[a]) for a in axes)):
            for a, i in zip(axes, sub):
                at[a] = i
            out.append(int(self.mesh[tuple(at)]))
        return tuple(out)

    def get_group(self, axis: int | str | Sequence[int | str] | None = None):
        """The communication `Group` of this process along one axis, or along several taken as one.

        It is made once. On `shm` that is free; on MindSpore's own backends (`hccl`, `nccl`, `mccl`) the members make a
        communicator together, and the group is a str, too, its name: `ops.AllReduce(group=mesh.get_group("tp"))`. In it
        they stand in order of rank.

        Raises:
            MeshError: no process group runs, or this process is not part of the mesh.
        """
        if axis is None:
            axis = tuple(range(self.ndim))
        axes = (axis,) if isinstance(axis, int | str) else tuple(axis)
        if len(axes) == 1 and axes[0] in self._flat:
            axes = self._flat[axes[0]]
        indices = tuple(self.axis_index(a) for a in axes)
        world = _world_source()
        here = None if world is None else self.coordinate_of(world.rank)
        if here is None:
            raise MeshError("For 'get_group', this process is not part of the mesh, or no process group runs.",
                            f"mesh({self.describe()})", "", "call init_device_mesh first, on every rank")
        key = (indices, world.rank, world.backend)
        group = self._groups.get(key)
        if group is None:
            group = _group_source(self.ranks_along(indices, here), tuple(self.mesh_dim_names[a] for a in indices))
            self._groups[key] = group
        return group

    # -- meshes out of meshes -------------------------------------------------------------------------------------
    @property
    def root(self) -> DeviceMesh:
        """The mesh this one was sliced from, or itself."""
        return self if self._root is None else self._root

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Sub-mesh of the named axes that contains this process (the first one for a process outside)."""
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if len(wanted) == 1 and wanted[0] in self._flat:
            return self._line(self._flat[wanted[0]], wanted[0])
        axes = tuple(self.axis_index(n) for n in wanted)
        if len(set(axes)) != len(axes):
            raise MeshError(f"For 'DeviceMesh', an axis is named twice in {wanted}.", f"mesh({self.describe()})")
        if axes == tuple(range(self.ndim)):
            return self
        return type(self)(self.device_type, self._block(axes), mesh_dim_names=[self.mesh_dim_names[a] for a in axes],
                          _root=self.root)

    def _block(self, axes: tuple[int, ...]) -> np.ndarray:
        here = self.get_coordinate() or (0,) * self.ndim
        ranks = self.ranks_along(axes, here)
        return np.array(ranks).reshape([self.shape[a] for a in axes])

    def _line(self, axes: tuple[str, ...], name: str) -> DeviceMesh:
        block = self._block(tuple(self.axis_index(a) for a in axes))
        return type(self)(self.device_type, block.ravel(), mesh_dim_names=(name,), _root=self.root)

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """This mesh as one axis called `name`; the root mesh knows it by that name afterwards.

        Example:
            >>> from ms_dtensor import DeviceMesh
            >>> mesh = DeviceMesh("cpu", [[[0], [1]], [[2], [3]]], mesh_dim_names=("dp", "cp", "tp"))
            >>> mesh["dp", "cp"].flatten("dp_cp"), mesh["dp_cp"].rank_list
            (DeviceMesh(cpu, dp_cp=4), (0, 1, 2, 3))
        """
        name = name or "_".join(self.mesh_dim_names)
        known = self.root._flat.get(name, self.mesh_dim_names)
        if not isinstance(name, str) or name in self.root.mesh_dim_names or known != self.mesh_dim_names:
            raise MeshError(f"For 'flatten', {name!r} is no new name of an axis, or is already an axis.",
                            f"mesh({self.root.describe()}), {name!r} of {known}",
                            "The root mesh knows one axis by a name, which is a text.", "choose another name")
        self.root._flat[name] = self.mesh_dim_names
        return self.root._line(self.mesh_dim_names, name)

    def unflatten(self, axis: int | str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """This mesh with one axis in several parts, the last of which runs fastest.

        One mesh may be split in several ways, for instance into `dp, tp` for most of a model and into `edp, ep` for its
        experts. The axes of such siblings may meet in one parameter where some grid of the ranks has all of them.

        Args:
            axis: the axis that is split.
            sizes: ranks of each part; their product is the axis's.
            names: of the parts, other than the names of the axes that stay.

        Raises:
            MeshError: no such axis, sizes that do not make it, names that are taken, or an axis that is itself made of
                several by `flatten`.

        Example:
            >>> from ms_dtensor import DeviceMesh
            >>> line = DeviceMesh("cpu", list(range(8)), mesh_dim_names=("world",))
            >>> line.unflatten("world", (2, 4), ("dp", "tp")), line.unflatten(0, (4, 2), ("edp", "ep"))["ep"].rank_list
            (DeviceMesh(cpu, dp=2, tp=4), (0, 1))
        """
        at, names = self.axis_index(axis), (names,) if isinstance(names, str) else tuple(names)
        old = self.mesh_dim_names[at]
        try:
            sizes = tuple(map(operator.index, sizes))
        except TypeError:
            raise MeshError(f"For 'unflatten', 'sizes' must be a tuple of integers, but got {sizes!r}.",
                            f"mesh({self.describe()}), axis {old!r}", "A part of an axis has a whole number of ranks.",
                            "dp // 2 in place of dp / 2") from None
        what = f"For 'unflatten', axis {old!r} cannot become {dict(zip(names, sizes, strict=False))}."
        if len(sizes) != len(names) or min(sizes, default=0) < 1 or math.prod(sizes) != self.shape[at]:
            raise MeshError(what, f"mesh({self.describe()}), sizes {sizes}, names {names}",
                            f"There is one name for each size, and the sizes' product is {self.shape[at]}.",
                            "choose sizes whose product is the axis's")
        if self._root is not None:
            if old not in self._root.mesh_dim_names:
                raise MeshError(what, f"mesh({self.describe()}) of mesh({self._root.describe()})",
                                "An axis that 'flatten' made has other axes behind it.",
                                "split the axes of the mesh it is of")
            whole = self._root.unflatten(old, sizes, names)
            return whole[self.mesh_dim_names[:at] + tuple(names) + self.mesh_dim_names[at + 1:]]
        made = type(self)(self.device_type, self.mesh.reshape(*self.shape[:at], *sizes, *self.shape[at + 1:]),
                          mesh_dim_names=(*self.mesh_dim_names[:at], *names, *self.mesh_dim_names[at + 1:]))
        made.varies = self.varies
        return made

    # -- by the names that PyTorch's callers know; both are private there
    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        return self.flatten(mesh_dim_name)

    def _unflatten(self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str],
                   backend_override=None) -> DeviceMesh:
        other = {str(k): v for k, v in (backend_override or {}).items() if v != "fake"}  # "fake": make no group; ours wait
        if other:
            raise MeshError("For '_unflatten', 'backend_override' cannot be kept.", f"mesh({self.describe()}), {other}",
                            "All groups of a world run on one backend.", "leave it out")
        return self.unflatten(dim, mesh_sizes, mesh_dim_names)

    def strides(self) -> dict[str, tuple[int, int]]:
        """Of each axis its size and its step among the ranks of the root, by which siblings know each other's axes."""
        steps = [math.prod(self.root.shape[i + 1:]) for i in range(self.root.ndim)]
        return {name: (self.shape[i], steps[self.root.axis_index(name)]) for i, name in enumerate(self.mesh_dim_names)}

    def expand_axes(self, name: str) -> tuple[str, ...]:
        """The axes behind a flattened name, or the name itself."""
        return self._flat.get(name, (name,))

    @classmethod
    def from_group(cls, group, device_type: str, mesh=None, mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
        """A mesh over the ranks of an existing group, or of one group per axis.

        Args:
            group: a `Group` (anything with `.ranks`), a sequence of ranks, or this process's groups, one per axis.
            device_type: as for `DeviceMesh`.
            mesh: the grid of ranks; default: the group's ranks in order. Of several groups the members tell each other
                what they see, one gather of a few numbers per further axis.
            mesh_dim_names: names of the axes.
        """
        if mesh is not None:
            return cls(device_type, mesh, mesh_dim_names=mesh_dim_names)
        groups = group if isinstance(group, list | tuple) and hasattr(next(iter(group), None), "ranks") else ()
        grid = np.array(getattr(groups[0] if groups else group, "ranks", group))
        for g in groups[1:]:  # each member has the grid of the axes before this one
            parts = g.all_gather_object(grid.tolist())
            if len(set(map(np.shape, parts))) > 1:
                raise MeshError("For 'from_group', the groups make no grid.", f"across ranks {g.ranks}: {parts}",
                                "Groups of one axis have one size.", "pass mesh=")
            grid = np.stack(parts, -1)
        made = cls(device_type, grid, mesh_dim_names=mesh_dim_names)
        world = _world_source()
        made.varies = world is not None and made.size() < world.size
        return made

    # -- the default mesh -----------------------------------------------------------------------------------------
    def __enter__(self) -> DeviceMesh:
        _default_mesh.set((*_default_mesh.get(), self))
        return self

    def __exit__(self, *exc) -> None:
        _default_mesh.set(_default_mesh.get()[:-1])


def _rebuild(kind, device_type, ranks, names):
    return kind(device_type, ranks, mesh_dim_names=names)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` block, or None."""
    stack = _default_mesh.get()
    return stack[-1] if stack else None


def resolve_mesh(mesh: DeviceMesh | None, who: str) -> DeviceMesh:
    """`mesh`, or the default one; an error that names the caller otherwise."""
    mesh = mesh if mesh is not None else current_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"For '{who}', 'device_mesh' must be a DeviceMesh, but got {mesh!r} and there is no default mesh.",
                        "", "", ("pass device_mesh=", "run inside `with mesh:`"))
    return mesh


def coordinates(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    """All coordinates of a mesh, row-major."""
    return itertools.product(*(range(s) for s in mesh.shape))


def common_root(a: DeviceMesh, b: DeviceMesh) -> DeviceMesh | None:
    """The coarsest grid of the same ranks that has the axes of both, or None: they run across each other.

    Axes of no name here are `_0`, `_1`, ...
    """
    if a.device_type != b.device_type or a.root.rank_list != b.root.rank_list:
        return None
    if any(name not in m.root.mesh_dim_names for m in (a, b) for name in m.mesh_dim_names):
        return None  # an axis made by 'flatten'
    axes = {**a.strides(), **b.strides()}
    if any(axes[name] != at and {axes[name][0], at[0]} != {1} for name, at in a.strides().items()):
        return None  # one name for two axes
    single = [name for name, (size, _) in axes.items() if size == 1]  # has room anywhere
    shape: list[int] = []
    names: list[str] = []
    left = a.root.mesh.size
    for name, (size, step) in sorted(axes.items(), key=lambda item: -item[1][1]):
        if size == 1:
            continue
        gap, rest = divmod(left, size * step)
        if rest or not gap:
            return None
        if gap > 1:
            shape.append(gap)
            names.append(f"_{len(names)}")
        shape.append(size)
        names.append(name)
        left = step
    if left > 1:
        shape.append(left)
        names.append(f"_{len(names)}")
    grid = a.root.mesh.reshape((*shape, *(1 for _ in single)))
    return DeviceMesh(a.device_type, grid, mesh_dim_names=(*names, *single))
