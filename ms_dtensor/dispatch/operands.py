# SPDX-License-Identifier: Apache-2.0
"""Local tensors as DTensors and back, and DTensors in another layout, connected where gradients are recorded.

A redistribution is a node whose backward is the transposed plan; results of moves of activations are kept on the
activation, so that all its readers share them. In which layout a cotangent arrives is `cotangent.py`'s.
"""
from __future__ import annotations

from functools import partial

from mindspore import Tensor, ops

from .. import comm
from ..comm.packing import cast
from ..comm.record import active
from ..core.layout import Layout, in_dtype
from ..core.placements import REPLICATE
from ..internals.names import NoFallbackGuard, detach, enabled, recording, set_requires_grad
from ..redistribute.execute import redistribute_local, run
from ..redistribute.plan import plan as plan_moves
from ..redistribute.plan import relabels
from . import classes, modes, policy
from .cotangent import as_copy, grad_layout, with_cotangent
from .memo import memo_of

make = Tensor._make_subclass
LAID_OUT = "_ms_dtensor_laid_out"  # attribute of a plain tensor that entered or left a DTensor program: its layout there
SHARDED_BY = "_ms_dtensor_sharded_by"  # parameter attribute: the name of the `fully_shard` unit that has it; "": ignored
DIFFERENTIABLE = ("float", "bfloat", "complex")  # how their dtypes begin; others have no cotangent


def wrap(local, layout: Layout):
    """A local tensor as a DTensor of this layout; shares storage and autograd identity (never for a Parameter)."""
    out = make(classes.DTENSOR, local)
    out._layout = layout
    return out


def is_number(x) -> bool:
    """Whether a plain operand counts as a number: it is 0-d, and no Parameter whose gradient is being recorded."""
    return x._shape == () and (x.__class__ is Tensor or not (recording() and x.requires_grad))


def differentiated(x) -> bool:
    """Whether a cotangent of a plain operand is being recorded; its ranks' parts are summed as those of any replica."""
    return recording() and x._requires_grad


def replicate_constant(tensor, mesh):
    """A constant that every rank computed alike (an index list, a mask) as a replicated DTensor."""
    return wrap(tensor, Layout(mesh, None, tuple(tensor._shape), dtype_name(tensor.dtype)))


def retag(local, layout: Layout):
    """A local tensor that nobody else holds, made a DTensor by a change of its class; unlike `wrap` it waits for nothing."""
    local.__class__ = classes.DTENSOR
    local._layout = layout
    return local


def local_alias(x):
    """A plain tensor on the same storage. Shares autograd identity unless `x` is a leaf Parameter."""
    if x.__class__ is not Tensor:
        getattr(x, "_layout", None)  # of a DTensor whose data are under way: waits
    return make(Tensor, x)


def detached(x):
    """The same values, connected to nothing."""
    with NoFallbackGuard():
        out = detach(local_alias(x))
    return out if getattr(x, "_layout", None) is None else wrap(out, x._layout)


def leaf_of(x, recorded: bool):
    """A leaf with the values of a tensor, whose gradient is recorded or not."""
    out = detached(x)
    set_requires_grad(out, recorded)
    return out


def redistribute(x, dst: Layout, implicit: str = "", async_op: bool = False, winners=None):
    """`x` in another layout, differentiably; the same object if it is there already.

    Args:
        x: a DTensor.
        dst: its new layout.
        implicit: who moves it without having been told to, for the redistribution policy and the recorder.
        async_op: its data may still be under way, see `async_tensor.py`.
        winners: see `redistribute_local`.
    """
    src = x._layout
    if src is dst:
        return x
    watch = modes.mode.get().watch
    if watch is not None and (kept := watch("redistribute", (x,))) is not None:
        return kept(partial(redistribute, x, dst, implicit, async_op, winners))
    if implicit:
        policy.check_move(implicit, src, dst, back=grad_layout(x) if recording() and x._requires_grad else None)
    if active():  # the texts are for who listens
        with comm.annotate(implicit=bool(implicit), src=repr(src), dst=repr(dst)):
            return _redistributed(x, src, dst, async_op, winners)
    return _redistributed(x, src, dst, async_op, winners)


def _redistributed(x, src: Layout, dst: Layout, async_op: bool, winners):
    works: list | None = [] if async_op else None
    if not recording() or not x._requires_grad or not src.dtype.startswith(DIFFERENTIABLE):
        out = wrap(run(plan_moves(src, dst), local_alias(x), works), dst)
        return pending_result(out, works[0]) if works else out
    if x.__class__ is classes.DTENSOR and relabels(src, dst):  # an alias has the autograd identity of all but a Parameter
        return wrap(local_alias(x), dst)
    wanted = grad_layout(x)
    out = wrap(redistribute_local(x, src, dst, dst.gradient(), wanted, works=works, winners=winners), dst)
    if all(src.placements[a].is_partial("sum") for a in src.partial_axes):  # others have weights of their own
        memo_of(out).source = (x if x._is_leaf else local_alias(x), src, wanted)
    return pending_result(out, works[0]) if works else out


def pending_result(out, work):
    """`out`, to be waited for on its first use."""
    memo_of(out).work = work
    out.__class__ = classes.ASYNC
    return out


def reduce_nonlinear(x, grad, who: str, winners=None):
    """Under autograd only sums may stay partial: the seed of a cotangent fits no other reduction.

    `winners`: who attains an extreme, see `redistribute_local`.
    """
    layout = x._layout
    if grad and layout.has_nonlinear_partial:
        placements = [REPLICATE if p.is_partial() and not p.is_partial("sum") else p for p in layout.placements]
        return redistribute(x, layout.with_placements(placements, layout.order), implicit=who, winners=winners)
    return x


def as_replicated(x, layout: Layout, grad):
    """A plain tensor under implicit_replication; a node of its own keeps a Parameter's gradient connected."""
    cotangent = layout.gradient()
    return wrap(redistribute_local(x, layout, layout, cotangent, cotangent, data=x) if grad else local_alias(x), layout)


def redistribute_operand(x, target: Layout, grad, who: str):
    if not grad or x._is_leaf:
        return redistribute(x, target, implicit=who)
    memo = memo_of(x)
    if memo.moved is None:
        memo.moved = {}
    out = memo.moved.get(target)
    if out is None:
        out = redistribute(x, target, implicit=who)
        if enabled():  # what is made unrecorded would cut the gradient of who reads `x` later
            memo.moved[target] = out
        return out
    # whether it was moved before depends on who else has read it
    watch = modes.mode.get().watch
    kept = None if watch is None else watch("redistribute", (x,))
    return out if kept is None else kept(lambda: out)


def frozen_alias(param):
    """The local tensor of a parameter whose gradient is not asked for, which MindSpore takes for a parameter, too: any other
    it keeps by its values, and gives this memory, whatever is written there by then, to all of the same values."""
    out = local_alias(param)
    out.param_info = param.param_info
    return out


def as_local(x, cotangent: Layout | None = None):
    """A DTensor as a plain local tensor, still connected; its cotangent arrives in `cotangent` (default: as `x` lies)."""
    if not recording():
        return local_alias(x)
    if not x._requires_grad:
        if x._memo is not None and x._memo.lent is not None:
            return classes.constant(x)
        return frozen_alias(x) if x.__class__ is classes.PARAMETER else local_alias(x)
    layout = x._layout
    cotangent = cotangent or layout.gradient()
    out = with_cotangent(x, cotangent)
    if out is not x:
        return out
    # an alias of a leaf would cut its gradient
    return redistribute_local(x, layout, layout, cotangent, cotangent, data=x) if x._is_leaf else local_alias(x)


def compute_copy(param, dtype, reduce_dtype):
    """A DTensor Parameter's values in the dtype of a computation.

    The copy belongs to one recorded forward. Its gradients are reduced in `reduce_dtype` and arrive in the parameter's own;
    a plain cast's would be reduced as they come out of the computation, in 16 bits.
    """
    layout = in_dtype(param._layout, dtype_name(dtype))
    with NoFallbackGuard():
        local = cast(ops.stop_gradient(param), dtype)
    if not recording() or not param._requires_grad:
        return wrap(local, layout)
    out = wrap(as_copy(local, param, reduce_dtype, layout.gradient()), layout)
    memo_of(out).copy_of = param, reduce_dtype
    memo_of(out).reads = None if param._memo is None else param._memo.reads
    return out


_names: dict[int, tuple[str, object]] = {}  # by the id of MindSpore's dtype, which is kept


def dtype_name(dtype) -> str:
    """`mindspore.float32` -> "float32"."""
    known = _names.get(id(dtype))  # its hash and its text take microseconds
    if known is None:
        name = str(dtype).lower()
        known = _names[id(dtype)] = name[name.rfind(".") + 1:], dtype
    return known[0]
