# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's mesh and layout: its spellings on top of our values.

Its layout knows a mesh and how many dims a tensor has, not how long they are; ours knows the shape, too. What is equal
here is equal there: a mesh or a layout compares with ours by what it says.
"""
from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod

import numpy as np

from ... import comm
from ...core.layout import Layout as CoreLayout
from ...core.mesh import DeviceMesh as CoreMesh
from ...core.placements import Partial, Placement
from ...errors import LayoutError, MeshError
from ...internals.target import on_cpu
from ...tensor import distribute
from ...tensor.dtensor import DTensor


class DeviceMesh(CoreMesh):
    """`ms_dtensor.DeviceMesh` with hyper_parallel's names beside its own.

    A DTensor's `device_mesh` is the first of all equal meshes, and has these names if that one has.

    Args:
        device_type, mesh, mesh_dim_names: as there.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import DeviceMesh
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh.mesh_shape, mesh.get_device_num_along_axis("tp"), mesh.get_rank_list_along_axis("dp")
        ((2, 2), 2, [0, 2])
        >>> mesh["tp"].root_mesh is mesh
        True
    """

    __slots__ = ()

    def __init__(self, device_type: str, mesh, *, mesh_dim_names: Sequence[str] | None = None, _init_backend: bool = True,
                 _root=None):
        super().__init__(device_type, mesh, mesh_dim_names=mesh_dim_names, _root=_root)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return self.shape

    @property
    def root_mesh(self) -> DeviceMesh | None:
        """The mesh this one was sliced from, if any."""
        return self._root

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.get_rank()

    def get_device_num_along_axis(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.size(axis)

    def get_rank_list_along_axis(self, axis: str) -> list[int]:
        """The ranks that differ from this process on one axis only, and itself."""
        here = self.get_coordinate()
        if here is None:
            raise MeshError("For 'get_rank_list_along_axis', this process is not part of the mesh.",
                            f"mesh({self.describe()})")
        return list(self.ranks_along((self.axis_index(axis),), here))


def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None,
                     rank_list: Sequence[int] | None = None, init_backend: bool = True) -> DeviceMesh:
    """`ms_dtensor.init_device_mesh`. Groups cost nothing until they are used, so `init_backend` has nothing to decide.

    Programs for hyper_parallel have "npu" written into them; where MindSpore computes on CPU that is read as "cpu", with a
    line in the log.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import init_device_mesh
        >>> init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"), init_backend=False).mesh_shape
        (1, 1)
    """
    if device_type.lower() in ("npu", "ascend") and on_cpu() and comm.world.pretended.get() is None:
        logging.getLogger("ms_dtensor").warning("init_device_mesh: %r is read as 'cpu', where MindSpore computes",
                                                device_type)
        device_type = "cpu"
    return _with_names(distribute.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names,
                                                   rank_list=rank_list))


def _with_names(mesh: CoreMesh) -> DeviceMesh:
    """An equal mesh that has the names of this module."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    out = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    out.varies = mesh.varies
    return out


def for_mesh(mesh: CoreMesh, placements):
    """Placements without those beyond the mesh's axes, which hyper_parallel does not read; only `Replicate` may be there."""
    if not isinstance(placements, tuple | list):
        return placements
    extra = placements[mesh.ndim:]
    return placements[:mesh.ndim] if all(isinstance(p, Placement) and p.is_replicate() for p in extra) else placements


def distribute_tensor(tensor, device_mesh: CoreMesh | None = None, placements=None, *,
                      src_data_rank: int | None = 0) -> DTensor:
    """`ms_dtensor.distribute_tensor`; `Replicate` may be given for more axes than there are.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.compat.hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> distribute_tensor(ms.ops.ones((4, 2)), mesh, (Shard(0), Replicate()))
        DTensor(f32[4@tp, 2], mesh=(tp=1), rank 0 holds [4, 2])
    """
    mesh = distribute.resolve_mesh(device_mesh, "distribute_tensor")
    return distribute.distribute_tensor(tensor, mesh, for_mesh(mesh, placements), src_data_rank=src_data_rank)


class Layout:
    """How a tensor lies on a mesh, its shape left out.

    Calling a layout gives another on its mesh: one entry per dim of the tensor (a name, "None", or a tuple of names,
    outermost first), or one placement per axis, of which `placement_to_tensor_map(ndim)` tells for how many dims.

    Args:
        mesh_shape: ranks along each axis.
        alias_name: the axes' names.
        rank_list: the ranks, row-major; default 0, 1, ...
        init_backend: has nothing to decide.

    Attributes:
        mesh: the device mesh.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import Layout
        >>> layout = Layout((2, 2), ("dp", "tp"))("dp", "None")
        >>> layout.set_partial_by_dev_axis("tp", "sum")
        >>> layout.placements, layout.tensor_map, layout.alias_tensor_map, layout.is_partial()
        ((Shard(0), Partial('sum')), (1, -1), ('dp', 'None'), True)
    """

    def __init__(self, mesh_shape: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None,
                 init_backend: bool = True):
        if isinstance(mesh_shape, CoreMesh):
            raise LayoutError("For 'Layout', a mesh was given where hyper_parallel's takes the mesh's shape.",
                              mesh_shape.describe(), "", ("Layout.from_device_mesh(mesh)", "ms_dtensor.Layout(mesh, ...)"))
        ranks = list(range(prod(mesh_shape)) if rank_list is None else rank_list)
        if len(ranks) != prod(mesh_shape):
            raise MeshError(f"For 'Layout', 'rank_list' has {len(ranks)} ranks for a mesh of shape {tuple(mesh_shape)}.")
        world = comm.current_world()
        self.mesh = DeviceMesh("npu" if world is None else world.device_type, np.reshape(ranks, mesh_shape),
                               mesh_dim_names=alias_name)
        self._given: tuple[Placement, ...] | None = None
        self._core: CoreLayout | None = None
        self._shape: tuple[int, ...] | None = None

    @classmethod
    def from_device_mesh(cls, device_mesh: CoreMesh) -> Layout:
        """A layout on an existing mesh, of nothing yet."""
        out = cls.__new__(cls)
        out.mesh, out._given, out._core, out._shape = _with_names(device_mesh), None, None, None
        return out

    @classmethod
    def of(cls, layout: CoreLayout) -> Layout:
        """One of ours, with its shape."""
        out = cls.from_device_mesh(layout.mesh)
        out._core, out._shape = layout, layout.shape
        return out

    def __call__(self, *entries) -> Layout:
        if len(entries) == 1 and not isinstance(entries[0], str) and all(isinstance(e, Placement) for e in entries[0]):
            entries = tuple(entries[0])
        out = Layout.from_device_mesh(self.mesh)
        if any(isinstance(e, Placement) for e in entries):
            out._given = entries
        else:
            out._core = CoreLayout(self.mesh, entries, (1,) * len(entries))
        return out

    # -- what it says -------------------------------------------------------------------------------------------------
    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per axis."""
        return self._given if self._given is not None else self.core.placements

    @property
    def core(self) -> CoreLayout:
        """Ours; of dims of length 1 where the shape is not known."""
        if self._core is None:
            raise LayoutError("For 'Layout', it does not say yet how many dims the tensor has.", f"{self.mesh!r}", "",
                              ('layout("dp", "None")', "layout([Shard(0), Replicate()]).placement_to_tensor_map(ndim)"))
        return self._core

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The tensor's global shape, where it is the layout of a tensor."""
        return self._shape

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return self.mesh.shape

    @property
    def alias_name(self) -> tuple[str, ...]:
        """The axes' names."""
        return self.mesh.mesh_dim_names

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The ranks, row-major."""
        return self.mesh.rank_list

    @property
    def alias_tensor_map(self) -> tuple:
        """Per dim the axis that shards it, "None", or a tuple of several, outermost first."""
        names = self.alias_name
        return tuple("None" if not axes else names[axes[0]] if len(axes) == 1 else tuple(names[a] for a in axes)
                     for axes in self.core.dim_axes)

    @property
    def tensor_map(self) -> tuple:
        """As `alias_tensor_map`, axes counted from the last, -1 for none."""
        last = self.mesh.ndim - 1
        return tuple(-1 if not axes else last - axes[0] if len(axes) == 1 else tuple(last - a for a in axes)
                     for axes in self.core.dim_axes)

    def placement_to_tensor_map(self, dim: int) -> tuple:
        """Says that the tensor has `dim` dims; the tensor map then."""
        if self._core is None or self._core.shape != (1,) * dim:
            self._core, self._given = CoreLayout(self.mesh, self.placements, (1,) * dim), None
        return self.tensor_map

    def is_partial(self) -> bool:
        """Whether some axis holds summands."""
        return any(p.is_partial() for p in self.placements)

    def set_partial_by_dev_axis(self, axis: str, op: str = "sum") -> None:
        """Says that the ranks of an axis hold summands (or what else `op` reduces)."""
        at, layout = self.mesh.axis_index(axis), self.core
        if layout.placements[at].is_shard():
            raise LayoutError(f"For 'set_partial_by_dev_axis', axis {axis!r} shards the tensor.", layout.describe(),
                              "An axis has one placement.", "gather it first")
        placed = list(layout.placements)
        placed[at] = Partial(op)
        self._core = layout.with_placements(placed, layout.order)

    def set_placements(self, placements: Sequence[Placement]) -> None:
        """Says where the tensor lies, one placement per axis; `placement_to_tensor_map` then says of how many dims."""
        self._given, self._core = tuple(placements), None

    def reset_partial(self) -> None:
        """Says that no axis holds summands."""
        if self._core is not None and self.is_partial():
            self._core = self.core.reduced()

    def __eq__(self, other):
        theirs = other if isinstance(other, CoreLayout) else other._core if isinstance(other, Layout) else None
        if theirs is None or self._core is None:
            return isinstance(other, Layout) and other._core is self._core and (
                self.mesh, self._given) == (other.mesh, other._given)
        return (self.mesh, self._core.placements, self._core.dim_axes) == (theirs.mesh, theirs.placements, theirs.dim_axes)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self):
        if self._core is None:
            return f"Layout({self.mesh.describe()})" if self._given is None else f"Layout({list(self._given)})"
        partial = {self.alias_name[a]: self._core.placements[a].reduce_op for a in self._core.partial_axes}
        return f"Layout{self.alias_tensor_map}" + (f"{partial}" if partial else "")
