# SPDX-License-Identifier: Apache-2.0
"""Faces and moves: a DTensor as the plain local tensor an op works on, with its gradient's layout decided.

This is where the gradient table becomes autograd nodes. A value shows the same face (the object itself) or its own
face (a node that reduces the cotangent); a redistribution is a node whose backward is the transposed plan. Nodes of
activations are kept on the activation, so that all its readers share them; leaves are converted at each use.
"""
from __future__ import annotations

from mindspore import Tensor
from mindspore._c_expression import NoFallbackGuard
from mindspore.common.api import _pynative_executor

from .. import comm
from ..comm.record import active
from ..core.layout import Layout
from ..core.placements import REPLICATE
from ..redistribute.execute import redistribute_local, run
from ..redistribute.plan import plan as plan_moves
from ..redistribute.plan import relabels
from . import classes

recording = _pynative_executor._executor.grad_flag  # the C++ method: the one around it costs as much again
make = Tensor._make_subclass
VIEWED = "_viewed"  # attribute of a recorded view: (what it is a view of, its plan, the call that made it)
PARTIAL_GRAD_AXES = "partial_grad_axes"  # attribute of a Parameter: axes on which its gradient stays partial (buckets.py)


def wrap(local, layout: Layout):
    """A local tensor as a DTensor of this layout; shares storage and autograd identity (never for a Parameter)."""
    out = make(classes.DTENSOR, local)
    out._layout = layout
    return out


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


def grad_layout(x) -> Layout:
    """The layout in which `x`'s producer expects the cotangent; a bucketed parameter's stays partial on some axes."""
    return x._layout.gradient(x.__dict__.get(PARTIAL_GRAD_AXES, ()))


def face(x, cotangent: Layout):
    """`x` as a plain local tensor whose cotangent arrives in the layout `cotangent`.

    One node per (recorded tensor, cotangent), so that q, k and v reading one activation share one reduction. Leaves
    outlive a recorded forward and are converted at each use: a stale node would cut their gradient.
    """
    layout = x._layout
    wanted = grad_layout(x)
    if cotangent is wanted or relabels(cotangent, wanted):
        return x
    if x._is_leaf:
        return redistribute_local(x, layout, layout, cotangent, wanted, data=x)
    faces = x.__dict__.setdefault("_with_cotangent", {})
    out = faces.get(cotangent)
    if out is None:
        out = _face_of_viewed(x, cotangent)
    if out is None:
        source = x.__dict__.get("_source")
        if source is None:
            out = redistribute_local(x, layout, layout, cotangent, wanted, data=x)
        else:
            out = redistribute_local(source[0], source[1], layout, cotangent, source[2], data=x)
        faces[cotangent] = out
    return out


def _face_of_viewed(x, cotangent: Layout):
    """A view of a replicated activation shows its varying face through the activation's, which other views may share.

    Without this, three cells that each reshape one input (`nn.Dense` does) would reduce three cotangents, and a bucketed
    parameter that is reshaped would be reduced by itself.
    """
    viewed = x.__dict__.get(VIEWED)
    if viewed is None:
        return None
    source, made, call = viewed
    own = [a for a in cotangent.partial_axes if x._layout.placements[a].is_replicate()]
    if not own or any(not source._layout.placements[a].is_replicate() for a in own):
        return None
    shown = face(source, source._layout.gradient(own))
    with NoFallbackGuard():
        out = made.local(*call, [shown])
    x.__dict__["_with_cotangent"][cotangent] = out
    return out


def redistribute(x, dst: Layout, implicit: bool = False, async_op: bool = False):
    """`x` in another layout, differentiably; the same object if it is there already.

    With `async_op` its data may still be under way, see `async_tensor.py`.
    """
    src = x._layout
    if src is dst:
        return x
    if active():  # the texts are for who listens
        with comm.annotate(implicit=implicit, src=repr(src), dst=repr(dst)):
            return _redistributed(x, src, dst, async_op)
    return _redistributed(x, src, dst, async_op)


def _redistributed(x, src: Layout, dst: Layout, async_op: bool):
    works: list | None = [] if async_op else None
    if not recording() or not x._requires_grad:
        out = wrap(run(plan_moves(src, dst), local_alias(x), works), dst)
        return pend(out, works[0]) if works else out
    if x.__class__ is classes.DTENSOR and relabels(src, dst):  # an alias has the autograd identity of all but a Parameter
        return wrap(local_alias(x), dst)
    wanted = grad_layout(x)
    out = wrap(redistribute_local(x, src, dst, dst.gradient(), wanted, works=works), dst)
    if all(src.placements[a].is_partial("sum") for a in src.partial_axes):  # others have weights of their own
        out.__dict__["_source"] = (x if x._is_leaf else local_alias(x), src, wanted)
    return pend(out, works[0]) if works else out


def pend(out, work):
    """`out`, to be waited for on its first use."""
    out.__dict__["_work"] = work
    out.__class__ = classes.ASYNC
    return out


def reduce_nonlinear(x, grad):
    """Under autograd only sums may stay partial: the seed of a cotangent fits no other reduction."""
    layout = x._layout
    if grad and layout.has_nonlinear_partial:
        placements = [REPLICATE if p.is_partial() and not p.is_partial("sum") else p for p in layout.placements]
        return redistribute(x, layout.with_placements(placements, layout.order), implicit=True)
    return x


def as_replicated(x, layout: Layout, grad):
    """A plain tensor under implicit_replication; a node of its own keeps a Parameter's gradient connected."""
    cotangent = layout.gradient()
    return wrap(redistribute_local(x, layout, layout, cotangent, cotangent, data=x) if grad else local_alias(x), layout)


def redistribute_operand(x, target: Layout, grad):
    if not grad or x._is_leaf:
        return redistribute(x, target, implicit=True)
    memo = x.__dict__.setdefault("_moves", {})
    out = memo.get(target)
    if out is None:
        out = memo[target] = redistribute(x, target, implicit=True)
    return out


def as_local(x, cotangent: Layout | None = None):
    """A DTensor as a plain local tensor, still connected; its cotangent arrives in `cotangent` (default: as `x` lies)."""
    if not recording() or not x._requires_grad:
        return local_alias(x)
    layout = x._layout
    cotangent = cotangent or layout.gradient()
    out = face(x, cotangent)
    if out is not x:
        return out
    # an alias of a leaf would cut its gradient
    return redistribute_local(x, layout, layout, cotangent, cotangent, data=x) if x._is_leaf else local_alias(x)


_names: dict[int, tuple[str, object]] = {}  # by the id of MindSpore's dtype, which is kept


def dtype_name(dtype) -> str:
    """`mindspore.float32` -> "float32"."""
    known = _names.get(id(dtype))  # its hash and its text take microseconds
    if known is None:
        name = str(dtype).lower()
        known = _names[id(dtype)] = name[name.rfind(".") + 1:], dtype
    return known[0]
