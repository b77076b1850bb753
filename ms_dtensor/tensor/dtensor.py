# SPDX-License-Identifier: Apache-2.0
"""DTensor: a `mindspore.Tensor` that knows its global shape and how it is laid out over a mesh.

The object *is* its local storage; the layout is an attribute. Under `NoFallbackGuard` MindSpore computes on the local
storage and records autograd on it, which is why the object itself is passed and never an inner tensor. Everything that
MindSpore does without asking `__fallback__` (indexing, item, bool, iteration, asnumpy ...) is overridden here, so that
no local number ever passes for the global one. Read next: `dispatch/dispatcher.py`.
"""
from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import Parameter, Tensor

from .. import comm
from ..comm.pretended import executing, pretended
from ..core.layout import Layout, in_dtype, known_layout, layout_for, layout_strides, said_of
from ..core.mesh import DeviceMesh, resolve_mesh
from ..dispatch import classes, inplace, modes, patches, policy, recorded, replicas, views
from ..dispatch.dispatcher import call, dispatch, plain_tree
from ..dispatch.held import Gate
from ..dispatch.memo import Memo, wrote
from ..dispatch.operands import as_local, dtype_name, local_alias, make, recording, redistribute, wrap
from ..dispatch.patches import hooks
from ..dispatch.views import Kin
from ..errors import LayoutError, MeshError, OpRuleError, RedistributeError
from ..internals.names import NoFallbackGuard
from ..redistribute.execute import run
from ..redistribute.plan import check_reachable, plan
from . import state
from .async_tensor import AsyncData
from .augmented import augmented_assignment
from .indexing import get_item, set_item
from .measures import Measures
from .numpy_calls import called_by_numpy


@augmented_assignment
class DTensor(Measures, Tensor):
    """A distributed tensor; meanings follow `torch.distributed.tensor.DTensor`.

    Args:
        local: this rank's shard.
        device_mesh: mesh it is laid out on; default the current one.
        placements: how, in any form `Layout` accepts; default all Replicate.

    The plain constructor is `from_local` without checks: the global shape is the local one times the sizes of the axes
    that shard each dim.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.DTensor(ms.ops.ones((4, 2)), mesh, [md.Shard(0)])
        DTensor(f32[4@tp, 2], mesh=(tp=1), rank 0 holds [4, 2])
    """

    _layout: Layout = None  # type: ignore[assignment]  # until __new__ or `wrap` has set it
    _memo: Memo | None = None
    _kin: Kin | None = None  # where it stands among the views of one tensor
    __array_ufunc__ = called_by_numpy

    def __new__(cls, local, device_mesh=None, placements=None, *args, **kwargs):
        if isinstance(local, DTensor) and device_mesh is None:  # the path of Parameter(dtensor)
            out = make(cls, local)
            out._layout = local._layout
            return out
        mesh = resolve_mesh(device_mesh, "DTensor")
        patches.install()
        if isinstance(local, Parameter):
            with NoFallbackGuard():
                local = local.view(local._shape)
        out = make(cls, local)
        out._layout = layout_for("DTensor", mesh, placements, tuple(local._shape), dtype_name(local.dtype), even=True)
        return out

    def __init__(self, *args, **kwargs):
        pass

    __fallback__ = dispatch
    register_hook = hooks.register_hook
    set_ = inplace.set_
    grad = recorded.kept

    @staticmethod
    def _run_own_op(op, arguments):
        return call(op, **arguments)

    # -- what it is -----------------------------------------------------------------------------------------------
    @property
    def layout(self) -> Layout:
        """The layout: mesh, placements, global shape, dtype."""
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._shape if self._layout is None else self._layout.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(self._shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def data(self) -> DTensor:
        """Itself."""
        return self

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __repr__(self):
        layout = self._layout
        held = f"rank {layout.mesh.get_rank()} holds {list(self._shape)}"
        kind = f"Parameter {self.name!r}, " if isinstance(self, Parameter) else ""
        return f"DTensor({kind}{layout!r}, mesh=({layout.mesh.describe()}), {held})"

    __str__ = __repr__

    def __format__(self, spec):
        return format(self.item(), spec) if spec and self.numel() == 1 else repr(self)

    # -- between local and global ---------------------------------------------------------------------------------
    @staticmethod
    def from_local(local, device_mesh: DeviceMesh | None = None, placements=None, *, run_check: bool = False,
                   shape: Sequence[int] | None = None, stride: Sequence[int] | None = None) -> DTensor:
        """Local shards as one DTensor; differentiable, and without communication unless `run_check`.

        Args:
            local: this rank's shard (empty on ranks outside the mesh).
            device_mesh: default the current one.
            placements: default all Replicate.
            run_check: compare shapes and dtypes across ranks, and replicas take coordinate 0's values.
            shape: the global shape; needed for uneven shards.
            stride: for PyTorch's sake: that of a contiguous tensor of `shape`, or None.

        Raises:
            LayoutError: the local shape is not the shard of `shape`: on the rank that has it, while the others go on, and
                wait for it in their next communication until it ends (`PeerLost`). With `run_check`, or inside
                `debug.checks()`, where replicas are compared, too, all ranks raise the same.

        Example:
            >>> import mindspore as ms, ms_dtensor as md
            >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
            >>> md.DTensor.from_local(ms.ops.ones((4, 2)), mesh, [md.Partial()])
            DTensor(f32[4, 2]{sum: tp}, mesh=(tp=1), rank 0 holds [4, 2])
        """
        if local.__class__ is not Tensor:
            if isinstance(local, DTensor):
                raise LayoutError("For 'from_local', 'local' must be a plain tensor, but it is a DTensor already.",
                                  local._layout.describe(), "", "use .redistribute()")
            if not isinstance(local, Tensor):
                raise LayoutError(f"For 'from_local', 'local' must be a Tensor, but got {type(local).__name__}.")
        mesh = resolve_mesh(device_mesh, "from_local")
        checks = modes.mode.get().check_rules
        if shape is None:
            if run_check or checks:  # before this rank's own shape can be found to fit no placement
                replicas.compare_shards("from_local", ["the local tensor"], [local], mesh, None)
            try:  # `layout_for`, inlined: this is asked once a batch and call
                layout = known_layout(mesh, placements, tuple(local._shape), dtype_name(local.dtype), even=True)
            except (LayoutError, MeshError) as error:
                raise said_of(error, "from_local") from None
        else:
            layout = layout_for("from_local", mesh, placements, tuple(shape), dtype_name(local.dtype))
            if run_check or checks:
                replicas.compare_shards("from_local", ["the local tensor"], [local], mesh, [layout])
        if stride is not None and tuple(stride) != layout_strides(layout.shape):
            raise LayoutError(f"For 'from_local', 'stride' is {tuple(stride)}.", layout.describe(),
                              f"A contiguous tensor of it has {layout_strides(layout.shape)}; others do not exist here.",
                              "leave it out")
        if mesh.get_coordinate() is None:
            local = ms.ops.zeros((0,) * len(layout.shape), local.dtype)
        elif run_check:
            local = replicas.made_alike(local, layout)
        elif shape is not None and layout.local_shape() != tuple(local._shape):
            raise LayoutError(f"For 'from_local', a local tensor of shape {list(local._shape)} is not this rank's shard.",
                              layout.describe(), f"Its shard there is {list(layout.local_shape())}: chunks of "
                              "ceil(n / axis size) rows.", "pass the global shape that belongs to these shards")
        if checks and not run_check:
            replicas.compare_replicas("from_local", ["the local tensor"], [local], [layout])
        patches.install()
        if isinstance(local, Parameter):
            with NoFallbackGuard():
                local = local.view(local._shape)
        return wrap(local, layout)

    def to_local(self, *, grad_placements=None) -> Tensor:
        """This rank's shard as a plain tensor; shares storage, never communicates.

        Args:
            grad_placements: how the cotangent will be laid out; default: as the value, with Partial as Replicate.
        """
        local = as_local(self, None if grad_placements is None else self._layout_of_gradient(grad_placements, "to_local"))
        return local if pretended.get() is None or (dry := executing()) is None else dry.taken_out(local)

    def _layout_of_gradient(self, placements, who: str) -> Layout:
        try:
            return self._layout.with_placements(placements)
        except (LayoutError, MeshError) as error:
            raise said_of(error, who) from None

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements=None, *, async_op: bool = False) -> DTensor:
        """The same tensor in another layout, by the cheapest plan; differentiable.

        Args:
            device_mesh: another mesh, or None for this one.
            placements: any form `Layout` accepts; default all Replicate.
            async_op: return while the data moves, where the backend can (`shm` and `hccl`: the last collective of the
                plan); waits on first use. Do not write to this tensor before that.

        Raises:
            RedistributeError: the target is Partial where this tensor is not.
            LayoutError: placements that do not fit.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            if placements is not None:
                raise LayoutError("For 'redistribute', 'device_mesh' must be a DeviceMesh, but got "
                                  f"{type(device_mesh).__name__}.")
            device_mesh, placements = None, device_mesh
        src = self._layout
        dst = layout_for("redistribute", device_mesh or src.mesh, placements, src.shape, src.dtype)
        if dst is src:
            return self
        check_reachable(src, dst)
        return redistribute(self, dst, async_op=async_op)

    def full_tensor(self, *, grad_placements=None) -> Tensor:
        """The whole tensor on every rank, as a plain one."""
        whole = self._layout.replicated()
        if grad_placements is not None:
            self._layout_of_gradient(grad_placements, "full_tensor")  # before anything is communicated
        return redistribute(self, whole).to_local(grad_placements=grad_placements)

    def reduce_partial(self) -> DTensor:
        """Partial axes reduced to Replicate; the others stay."""
        return redistribute(self, self._layout.reduced())

    # -- values: the global one, or an error, on all ranks alike ---------------------------------------------------
    def item(self):
        """The one element, as a Python number: reduced or gathered as the layout needs, the same on all ranks.

        So do `float`, `int`, `bool`, `complex` and `format` with a format. It communicates unless the tensor is
        replicated, so the redistribution policy may refuse or warn of it; `x.full_tensor().item()` is always explicit.

        Raises:
            OpRuleError: more than one element, or a rank outside the mesh.
            ImplicitCommError: it would communicate, and the policy is "explicit".
        """
        if self.numel() != 1:
            raise OpRuleError(f"For 'item', a tensor of {self.numel()} elements is no scalar.", self._layout.describe(),
                              "A Python number is one element.", "reduce it first, e.g. x.sum().item()")
        return self._whole_array("item").reshape(()).item()

    def _whole_array(self, who: str, fixes: Sequence[str] = ()):
        """The global array, implicitly: a communication that the redistribution policy is asked for in `who`'s name."""
        layout = self._layout
        if layout.mesh.get_coordinate() is None:
            raise OpRuleError(f"For '{who}', this rank is not part of the mesh.", layout.describe(),
                              "Nothing is sent to ranks outside a mesh.", "ask on the mesh's ranks only")
        whole, dry = local_alias(self), executing()
        if not layout.is_replicated():
            policy.check_move(who, layout, layout.replicated(), "the value",
                              fixes or (f"x.full_tensor().{who}()", f"x.reduce_partial().{who}(), of a Partial"))
            with comm.annotate(implicit=True, src=repr(layout), dst=repr(layout.replicated())):
                whole = run(plan(layout, layout.replicated()), whole)
        return whole.asnumpy() if dry is None else dry.value(self, who)

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())

    def __index__(self):
        return self.item().__index__()

    def __complex__(self):
        return complex(self.item())

    def asnumpy(self):
        """The global array of a replicated tensor (a view of its storage), or of a 0-d one, whose value is `item()`.

        Raises:
            OpRuleError: neither; nothing is gathered behind the caller's back.
        """
        if not self._layout.is_replicated():
            if not self.shape:
                return self._whole_array("asnumpy")
            raise OpRuleError("For 'asnumpy', this rank does not hold the whole tensor.", self._layout.describe(),
                              "Only a replicated tensor is an array already.",
                              ("x.full_tensor().asnumpy() for the global array", "x.to_local().asnumpy() for the shard"))
        return local_alias(self).asnumpy() if (dry := executing()) is None else dry.value(self, "asnumpy")

    def numpy(self):
        """As `asnumpy`."""
        return self.asnumpy()

    def get_bytes(self) -> bytes:
        """The bytes of a replicated tensor."""
        return self.asnumpy().tobytes()

    def tolist(self):
        """The global values as nested lists; of a replicated tensor."""
        return self.asnumpy().tolist()

    def __array__(self, dtype=None, copy=None):
        out = self.asnumpy()
        return out if dtype is None else out.astype(dtype)

    # -- Python's own protocols ------------------------------------------------------------------------------------
    def __getitem__(self, index):
        if modes.mode.get().skip:
            return as_local(self)[plain_tree(index)]
        return get_item(self, index)

    def __setitem__(self, index, value):
        if modes.mode.get().skip:
            local_alias(self)[plain_tree(index)] = plain_tree(value)
            return
        set_item(self, index, value)

    def __iter__(self):
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return (self[i] for i in range(self.shape[0]))

    def __hash__(self):
        return id(self)

    # -- what a checkpoint planner asks; names as in PyTorch's protocol ----------------------------------------------
    def __create_chunk_list__(self):
        return state.chunk_list(self._layout)

    def __create_write_items__(self, fqn: str, object=None):
        return state.write_items(self._layout, fqn)

    def __get_tensor_shard__(self, index) -> Tensor:
        return state.shard_at(self, index)

    def detach(self) -> DTensor:
        """The same values, outside autograd; shares storage."""
        return ms.ops.stop_gradient(self)

    def clone(self) -> DTensor:
        """A copy with the same layout; differentiable."""
        return as_local(self).copy() if modes.mode.get().skip else call("clone", input=self)

    def fill(self, value) -> DTensor:
        """A tensor like this one with every element `value`."""
        return ms.mint.full_like(self, value)

    def contiguous(self) -> DTensor:
        """Itself, or a copy of a view that is not in its family's order; see `views.contiguous`."""
        return views.contiguous(self)

    def __copy__(self):
        return wrap(local_alias(self), self._layout)

    def __deepcopy__(self, memo):
        dry = executing()
        return _unpickle(local_alias(self).asnumpy().copy(), *self._facts()) if dry is None else dry.copied(self)

    def __reduce_ex__(self, protocol):
        return _unpickle, (local_alias(self).asnumpy(), *self._facts())

    def _facts(self):
        if isinstance(self, Parameter):
            return self._layout, self.name, self.requires_grad
        return self._layout, None, None


class DTensorParameter(Parameter, DTensor):
    """What `Parameter(dtensor)` makes: Parameter first in the MRO, or MindSpore's checkpointing would not know it."""

    def __init__(self, default_input, *args, **kwargs):
        Parameter.__init__(self, default_input, *args, **kwargs)

    def clone(self, init="same") -> Parameter:
        """A new Parameter in the same layout; how MindSpore's optimizers make their moments.

        Args:
            init: "same" for the same values, "zeros", "ones" or a number for constant ones.

        While gradients are recorded, "same" is `DTensor.clone`: a differentiable copy, not a new leaf.

        Raises:
            LayoutError: another initialiser; each shard would draw the same numbers.
        """
        if init == "same" and recording():
            return DTensor.clone(self)
        value = {"zeros": 0, "ones": 1}.get(init, init) if isinstance(init, str) else init
        if value != "same" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise LayoutError(f"For 'clone', 'init' must be 'same', 'zeros', 'ones' or a number, but got {init!r}.",
                              self._layout.describe(), "Every shard would draw the same numbers.", "use ms_dtensor.init")
        array = local_alias(self).asnumpy().copy()
        if value != "same":
            array.fill(value)
        return _unpickle(array, *self._facts())

    def set_data(self, data, slice_shape=False) -> Parameter:
        """Takes over values, and keeps the layout.

        Args:
            data: a DTensor of the same global shape (one that lies otherwise is moved), or this rank's shard.
            slice_shape: as MindSpore's.

        Raises:
            LayoutError: another shape; a plain global tensor would replace the shard by the whole.
        """
        own = self._own_shard("set_data", data)
        if executing() is None:
            Parameter.set_data(self, own, slice_shape)
        wrote(self)
        return self

    def assign_value(self, value) -> Parameter:
        """As `set_data`, without its conversions."""
        own = self._own_shard("assign_value", value)
        if executing() is None:
            Tensor.assign_value(self, local_alias(own))
        wrote(self)
        return self

    @property
    def data(self) -> DTensorParameter:
        """Itself."""
        return self

    @data.setter
    def data(self, value) -> None:  # as `Cell.to_empty` gives storage to what has none
        Tensor.data.__set__(self, local_alias(self._own_shard("data", value)))  # type: ignore[attr-defined]
        wrote(self)

    def _own_shard(self, who: str, data):
        own = self._layout
        if isinstance(data, DTensor) and data.shape == own.shape:
            return redistribute(data, in_dtype(own, data._layout.dtype), implicit=who)
        if isinstance(data, DTensor) or tuple(data.shape) != own.local_shape():
            raise LayoutError(f"For '{who}', the data has shape {list(data.shape)}.", own.describe(),
                              "It must be a DTensor of the global shape, or this rank's shard.",
                              "distribute_tensor(data, p.device_mesh, p.placements)")
        return data

    register_hook = DTensor.register_hook
    __repr__ = DTensor.__repr__
    __str__ = DTensor.__repr__
    __copy__ = DTensor.__copy__
    __deepcopy__ = DTensor.__deepcopy__
    __reduce_ex__ = DTensor.__reduce_ex__
    asnumpy = DTensor.asnumpy


class AsyncDTensor(AsyncData, DTensor):  # type: ignore[override]  # `_layout` is set again only when this is a DTensor
    """What `redistribute(async_op=True)` returns where the backend can: waits on first use, then is a DTensor."""


class GatedDTensor(Gate, DTensor):
    """Stands for a parameter; of another class than results, so that dispatch looks closer."""


classes.bind(DTensor, DTensorParameter, AsyncDTensor, GatedDTensor)
# The class MindSpore builds for Parameter(DTensor(...)) would have Tensor before Parameter in its MRO.
Parameter._base_type["Parameter" + DTensor.__name__] = DTensorParameter


def _unpickle(array, layout, name, requires_grad):
    patches.install()
    out = wrap(Tensor(array), layout)
    if name is not None:
        out = Parameter(out, name=name, requires_grad=requires_grad)
    return out


__all__ = ["DTensor", "DTensorParameter", "RedistributeError"]
