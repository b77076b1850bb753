# SPDX-License-Identifier: Apache-2.0
"""The gradient table as autograd nodes: a tensor whose cotangent arrives in another layout than its producer expects.

On an axis where all ranks do the same work with a replicated value it is invariant, and its cotangent is whole; where
they do different work it is varying, and its cotangent is a summand, which a node reduces. `ops/rules/select.py` decides
which; here it is applied. Nodes of activations are kept on the activation, so that q, k and v reading one share one
reduction. Leaves outlive a recorded forward and are converted at each use: a stale node would cut their gradient.
"""
from __future__ import annotations

from ..core.layout import Layout, in_dtype
from ..core.placements import PARTIAL
from ..internals.names import NoFallbackGuard, enabled
from ..redistribute.execute import redistribute_local
from ..redistribute.plan import relabels
from .memo import memo_of
from .op_call import OpCall


def partial_grad_axes(x) -> tuple[int, ...]:
    """Mesh axes on which a tensor's gradient stays partial, for its bucket to reduce."""
    memo = getattr(x, "_memo", None)
    return () if memo is None else memo.partial_grad_axes


def grad_layout(x) -> Layout:
    """The layout in which `x`'s producer expects the cotangent."""
    return x._layout.gradient(partial_grad_axes(x))


def summed_gradient(layout: Layout) -> Layout:
    """The layout of all ranks' gradients of one value: of an extreme, each has what its own candidate won."""
    extremes = [a for a in layout.partial_axes if layout.placements[a].reduce_op in ("max", "min")]
    out = layout.gradient()
    return out if not extremes else out.with_placements(
        [PARTIAL if a in extremes else p for a, p in enumerate(out.placements)], out.order)


def with_cotangent(x, cotangent: Layout):
    """`x`, as it is or as a plain local tensor, such that its cotangent may arrive in the layout `cotangent`."""
    known = None if x._memo is None else x._memo.with_cotangent
    out = None if known is None else known.get(cotangent)
    if out is not None:
        return out
    layout, wanted = x._layout, grad_layout(x)
    if cotangent is wanted or relabels(cotangent, wanted):
        return x
    if x._is_leaf:
        return redistribute_local(x, layout, layout, cotangent, wanted, data=x)
    memo = memo_of(x)
    out = _through_viewed(x, memo, cotangent)
    if memo.copy_of is not None:
        out = as_copy(x, memo.copy_of[0], memo.copy_of[1], cotangent)
    elif out is None:
        moved, frm, gradient = memo.source or (x, layout, wanted)
        out = redistribute_local(moved, frm, layout, cotangent, gradient, data=x)
    if enabled():  # what is made unrecorded would cut the gradient of who reads `x` later
        memo.with_cotangent = {**(memo.with_cotangent or {}), cotangent: out}
    return out


def _through_viewed(x, memo, cotangent: Layout):
    """A view of a replicated activation as the same view of the varying activation, which other views may share.

    Without this, three cells that each reshape one input (`nn.Dense` does) would reduce three cotangents, and a bucketed
    parameter that is reshaped would be reduced by itself.
    """
    if memo.view_of is None:
        return None
    source, plan, called = memo.view_of
    varying = [a for a in cotangent.partial_axes if x._layout.placements[a].is_replicate()]
    if not varying or any(not source._layout.placements[a].is_replicate() for a in varying):
        return None
    taken = with_cotangent(source, source._layout.gradient(varying))
    with NoFallbackGuard():
        return plan.local.run(OpCall(*called), [taken])


def as_copy(data, param, reduce_dtype, cotangent: Layout):
    """`data`, a parameter's values in another dtype, connected to it: the gradient is reduced in `reduce_dtype`."""
    layout, cotangent, wanted = (
        in_dtype(at, str(reduce_dtype).lower()) for at in (param._layout, cotangent, grad_layout(param)))
    return redistribute_local(param, layout, layout, cotangent, wanted, data=data, through=reduce_dtype,
                              takes=None if param._memo is None else param._memo.takes)
