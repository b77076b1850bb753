# SPDX-License-Identifier: Apache-2.0
"""Losses: per element they are pointwise; a sum over shards is Partial; a mean is a sum over the *global* count.

`reduction` arrives as MindSpore's number: 0 sum, 1 mean, 2 none. A mean whose divisor is itself summed over the batch
(`nll_loss` with weights or ignored targets) is no single Partial: `dispatch/composite.py` divides the sum of the losses by
the sum of the weights, so that shards with unlike totals count as they should. A mean of means never occurs.
"""
from __future__ import annotations

from math import prod

from ...core.placements import Partial
from ...errors import OpRuleError
from .pointwise import shard_cases
from .spec import SUMS, Call, Case, Local, LocalCall, OpSpec, P, R, S, broadcast_shapes

NAMES = """
mse_loss:MSELossExt:input target reduction
l1_loss:L1LossExt:input target reduction
smooth_l1_loss:SmoothL1Loss:input target beta reduction
soft_margin_loss:SoftMarginLoss:input target reduction
binary_cross_entropy:BinaryCrossEntropy:input target weight reduction
bce_with_logits:BCEWithLogitsLoss:input target weight pos_weight reduction
sigmoid_cross_entropy:SigmoidCrossEntropyWithLogits:input target
kl_div:KLDiv:input target reduction log_target
kl_div_classic:KLDivLoss:input target
softmax_cross_entropy:SoftmaxCrossEntropyWithLogits:input target
sparse_softmax_cross_entropy:SparseSoftmaxCrossEntropyWithLogits:input target
nll_loss:NLLLoss,NLLLoss2d:input target weight reduction ignore_index
fused_cross_entropy:CrossEntropyLoss:input target weight reduction ignore_index smoothing zloss_scale return_zloss
"""

_PAIR = (("input", None), ("target", None))
_ARGUMENTS = {  # what decides the sum, with defaults: the arguments of `loss_share` after its name and count
    "mse_loss": _PAIR, "l1_loss": _PAIR, "soft_margin_loss": _PAIR, "smooth_l1_loss": (*_PAIR, ("beta", 1.0)),
    "binary_cross_entropy": (*_PAIR, ("weight", None)), "kl_div": (*_PAIR, ("log_target", False)),
    "bce_with_logits": (*_PAIR, ("weight", None), ("pos_weight", None)),
}
_REDUCTION = {0: "sum", 1: "mean", 2: "none"}


def reduction_of(call: Call, default: str = "mean") -> str:
    """"sum", "mean" or "none"."""
    value = call.args.get("reduction", default)
    return _REDUCTION.get(value, str(value))


def elementwise(call: Call) -> OpSpec:
    """A loss of each element, then the reduction; operands broadcast."""
    shapes = [o.shape for o in call.operands]
    out = broadcast_shapes(*shapes)
    cases, kind = shard_cases(shapes, out), reduction_of(call)
    if kind == "none":
        return OpSpec((out,), tuple(cases))
    cases = [Case(c.ins, (P,)) for c in cases]
    arguments = tuple(call.args.get(k, default) for k, default in _ARGUMENTS[call.op])

    def local(at: Local) -> LocalCall | None:
        if kind == "sum" or all(p.is_replicate() for x in at.ins for p in x.placements):
            return None
        return LocalCall("loss_share", (call.op, prod(out), *arguments))
    return OpSpec(((),), tuple(cases), local)


def kl_div_classic(call: Call) -> OpSpec:
    """The classic `KLDivLoss`, which is told its reduction when it is made."""
    kind = call.args["attrs"].get("reduction", "mean")
    return elementwise(Call("kl_div", {**call.args, "reduction": kind}, call.operands)) if kind != "batchmean" else \
        OpSpec(((),), ())


def softmax_cross_entropy(call: Call) -> OpSpec:
    """(loss per row, gradient): classes whole."""
    x = call.operands[0]
    return OpSpec((x.shape[:1], x.shape), (Case((S(0), S(0)), (S(0), S(0))),))


def sparse_softmax_cross_entropy(call: Call) -> OpSpec:
    """The mean over all rows, or, made with `is_grad`, the gradient."""
    x, t = call.operands
    if call.args["attrs"].get("is_grad"):
        return OpSpec((x.shape,), ())

    def local(at: Local) -> LocalCall | None:
        if not at.ins[0].dim_axes[0]:
            return None
        return LocalCall("sparse_cross_entropy_share", (x, t, x.shape[0]))
    return OpSpec(((),), (Case((S(0), S(0)), (P,)),), local)


def nll_loss(call: Call) -> OpSpec:
    """(loss, sum of weights) over log-probabilities [N, C] or [N, C, H, W]: classes whole."""
    x, t = call.args["input"], call.args["target"]
    rest, kind = len(call.operands) - 2, reduction_of(call)
    where = [(0, 0), *((d, d - 1) for d in range(2, x.ndim))] if x.ndim > 1 else []
    shape = t.shape if kind == "none" else ()
    cases = [Case((p, R, *(R,) * rest), (p, R)) for p in SUMS]
    if kind != "mean":
        cases += [Case((S(a), S(b), *(R,) * rest), (S(b), R) if kind == "none" else (P, P)) for a, b in where]
    return OpSpec((shape, ()), tuple(cases))


def fused_cross_entropy(call: Call) -> OpSpec:
    """(loss, log-probabilities, z-loss, its logarithms) of rows [N, C]; a mean divides by a count over all rows.

    Raises:
        OpRuleError: the z-loss is asked for.
    """
    x, kind = call.args["input"], reduction_of(call)
    if call.get("return_zloss") or call.get("zloss_scale"):
        raise OpRuleError("For 'cross_entropy_loss', the z-loss is not supported on DTensors.", "",
                          "Its kernel's results are not documented.", "(mint.logsumexp(x, -1) ** 2).mean() * scale, besides")
    loss = P if kind == "sum" else S(0)
    cases = [call.case({x.index: S(0), call.args["target"].index: S(0)}, loss, S(0), R, R)] if kind != "mean" else []
    return OpSpec((x.shape[:1] if kind == "none" else (), x.shape, (), ()), tuple(cases))


def row_max(call: Call) -> OpSpec:
    """Of our own: the greatest class of each row, [..., 1]; it carries no gradient."""
    x = call.operands[0]
    last = x.ndim - 1
    return OpSpec(((*x.shape[:last], 1),), (Case((S(last),), (Partial("max"),)), *call.like_first(range(last))))


def class_sums(call: Call) -> OpSpec:
    """Of our own, over logits [..., C], labels [..., 1] and `row_max`: see `ops/local/loss.py`."""
    x, t, top = call.operands
    last = x.ndim - 1
    smooth = call.args["smooth"]

    def local(at: Local) -> LocalCall:
        return LocalCall("class_sums", (x, t, top, at.in_offset(0)[last], x.shape[last], smooth))
    return OpSpec(((*x.shape[:last], 2 + smooth),), (Case((S(last), R, R), (P,)),
                                                     *(Case((S(d),) * 3, (S(d),)) for d in range(last))), local,
                  ("float64" if x.dtype == "float64" else "float32",))


RULES = {
    "row_max": row_max, "class_sums": class_sums,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy",
                     "bce_with_logits", "kl_div"), elementwise),
    "sigmoid_cross_entropy": lambda call: elementwise(Call(call.op, {**call.args, "reduction": "none"}, call.operands)),
    "fused_cross_entropy": fused_cross_entropy, "kl_div_classic": kl_div_classic,
    "softmax_cross_entropy": softmax_cross_entropy,
    "sparse_softmax_cross_entropy": sparse_softmax_cross_entropy, "nll_loss": nll_loss,
}
