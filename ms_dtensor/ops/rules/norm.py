# SPDX-License-Identifier: Apache-2.0
"""Normalisations: the dims whose statistics are taken are whole, all others stay sharded.

Group norm may shard its channels where whole groups stay together. Batch norm in training also *writes* its running
statistics: the primitive runs only where they need no move, so that it writes the tensors the user holds; every other
layout goes through `dispatch/composite.py`, which makes the batch's statistics from sums.
"""
from __future__ import annotations

from .spec import Call, Case, Local, LocalCall, OpSpec, R, S

NAMES = """
layer_norm:LayerNormExt:input normalized_shape weight bias eps
layer_norm_classic:LayerNorm,LayerNormV3:input weight bias begin_norm_axis begin_params_axis eps
rms_norm:RmsNorm:input weight eps
add_rms_norm:AddRmsNorm:input other weight eps
add_layer_norm:AddLayerNormV2:input other weight bias eps additional
group_norm:GroupNorm:input num_groups weight bias eps
batch_norm:BatchNorm:input weight bias running_mean running_var training eps momentum data_format
batch_norm_ext:BatchNormExt:input weight bias running_mean running_var training momentum eps
lrn:LRN:input
"""


def _leading(call: Call, lead: int, stats: int) -> OpSpec:
    """Cases of a norm over the dims from `lead` on, with `stats` statistics of extent 1 there."""
    x = call.args["input"]
    small = (*x.shape[:lead], *(1,) * (x.ndim - lead))
    wide = "float32" if x.dtype in ("float16", "bfloat16") else x.dtype
    cases = call.like_first(range(lead), results=1 + stats)
    return OpSpec((x.shape, *(small,) * stats), tuple(cases), dtypes=(x.dtype, *(wide,) * stats))


def added(call: Call) -> OpSpec:
    """The norm of a sum, its statistics, and the sum: both summands are cut alike. (y, 1/rms, x), (y, mean, 1/std, x)."""
    x, y, weight = (call.args[k] for k in ("input", "other", "weight"))
    one = _leading(Call(call.op, {"input": x}, call.operands), x.ndim - weight.ndim, 1 + (call.op == "add_layer_norm"))
    cases = tuple(call.case({x.index: c.ins[0], y.index: c.ins[0]}, *c.outs, c.outs[0]) for c in one.cases)
    return OpSpec((*one.shapes, x.shape), cases, dtypes=(*(one.dtypes or ()), x.dtype))


def group_norm(call: Call) -> OpSpec:
    """(y, mean, 1/std) per sample and group of channels."""
    x, groups = call.args["input"], int(call.args["num_groups"])
    rest = call.operands[1:]
    cases = (Case((S(0), *(R for _ in rest)), (S(0),) * 3),
             Case((S(1), *(S(0) for _ in rest)), (S(1),) * 3, ((0, 1, groups), (0, 1, x.shape[1]))))

    def local(at: Local) -> LocalCall | None:
        if not at.ins[0].dim_axes[1]:
            return None
        return LocalCall("group_norm", (x, groups * at.in_shape(0)[1] // x.shape[1], *rest, call.get("eps", 1e-5)))
    return OpSpec((x.shape, (x.shape[0], groups), (x.shape[0], groups)), cases, local)


def batch_norm(call: Call) -> OpSpec:
    """(y, statistics: four, or the two of `mint`): per channel, so channels may be sharded alike; in evaluation any dim of
    the input."""
    x, training, ext = call.args["input"], bool(call.get("training")), call.op == "batch_norm_ext"
    stats, rest = 2 if ext else 4, len(call.operands) - 1
    if str(call.get("data_format", 0)).upper() not in ("0", "NCHW"):
        return OpSpec((x.shape, *((x.shape[-1],),) * stats), ())
    cases = [Case((S(1), *(S(0),) * rest), (S(1), *(S(0),) * stats))]
    if not training:
        cases += [Case((S(d), *(R,) * rest), (S(d), *(R,) * stats)) for d in range(x.ndim) if d != 1]
    held = (call.args.get(k) for k in ("running_mean", "running_var")) if training else ()
    wide = call.args["weight"].dtype if call.get("weight") is not None else x.dtype
    return OpSpec((x.shape, *((x.shape[1],),) * stats), tuple(cases), dtypes=(x.dtype, *(wide,) * stats),
                  writes=tuple(v.index for v in held if v is not None))


def lrn(call: Call) -> OpSpec:
    """Local response normalisation: across channels, which must be whole."""
    x = call.operands[0]
    return OpSpec((x.shape,), tuple(call.like_first(d for d in range(x.ndim) if d != 1)))


def _dims(shape) -> int:
    """How many dims a `normalized_shape` names."""
    return 1 if isinstance(shape, int) else len(shape)


RULES = {
    # (y, mean, 1/std), (y, mean, variance), (y, 1/rms)
    "layer_norm": lambda call: _leading(call, call.args["input"].ndim - _dims(call.args["normalized_shape"]), 2),
    "layer_norm_classic": lambda call: _leading(call, int(call.get("begin_norm_axis", 1)) % call.args["input"].ndim, 2),
    "rms_norm": lambda call: _leading(call, call.args["input"].ndim - call.args["weight"].ndim, 1),
    "add_rms_norm": added, "add_layer_norm": added,
    "group_norm": group_norm, "batch_norm": batch_norm, "batch_norm_ext": batch_norm, "lrn": lrn,
}
