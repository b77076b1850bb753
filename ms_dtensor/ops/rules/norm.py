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


def layer_norm(call: Call) -> OpSpec:
    """(y, mean, 1/std) over the trailing dims that `normalized_shape` names."""
    shape = call.args["normalized_shape"]
    return _leading(call, call.args["input"].ndim - (1 if isinstance(shape, int) else len(shape)), 2)


def layer_norm_classic(call: Call) -> OpSpec:
    """(y, mean, variance) over the dims from `begin_norm_axis` on."""
    x = call.args["input"]
    return _leading(call, int(call.get("begin_norm_axis", 1)) % x.ndim, 2)


def rms_norm(call: Call) -> OpSpec:
    """(y, 1/rms) over the trailing dims that the weight has."""
    return _leading(call, call.args["input"].ndim - call.args["weight"].ndim, 1)


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
    """(y, four statistics): per channel, so channels may be sharded alike; in evaluation any dim of the input."""
    x, training = call.args["input"], bool(call.get("training"))
    if str(call.get("data_format", 0)).upper() not in ("0", "NCHW"):
        return OpSpec((x.shape, *((x.shape[-1],),) * 4), ())
    n, rest = x.shape[1], len(call.operands) - 1
    cases = [Case((S(1), *(S(0),) * rest), (S(1), *(S(0),) * 4))]
    if not training:
        cases += [Case((S(d), *(R,) * rest), (S(d), *(R,) * 4)) for d in range(x.ndim) if d != 1]
    return OpSpec((x.shape, *((n,),) * 4), tuple(cases), writes=_written(call))


def batch_norm_ext(call: Call) -> OpSpec:
    """(y, mean, 1/std) of `mint`; the statistics are empty in evaluation."""
    x, training = call.args["input"], bool(call.get("training"))
    rest = len(call.operands) - 1
    stats = ((x.shape[1],),) * 2 if training else ((0,),) * 2
    cases = [Case((S(1), *(S(0),) * rest), (S(1), *(S(0),) * 2))]
    if not training:
        cases += [Case((S(d), *(R,) * rest), (S(d), R, R)) for d in range(x.ndim) if d != 1]
    return OpSpec((x.shape, *stats), tuple(cases), writes=_written(call))


def lrn(call: Call) -> OpSpec:
    """Local response normalisation: across channels, which must be whole."""
    x = call.operands[0]
    return OpSpec((x.shape,), tuple(call.like_first(d for d in range(x.ndim) if d != 1)))


def _written(call: Call) -> tuple[int, ...]:
    """The running statistics, in training."""
    held = (call.args.get(k) for k in ("running_mean", "running_var"))
    return tuple(x.index for x in held if x is not None) if call.get("training") else ()


RULES = {"layer_norm": layer_norm, "layer_norm_classic": layer_norm_classic, "rms_norm": rms_norm,
         "group_norm": group_norm, "batch_norm": batch_norm, "batch_norm_ext": batch_norm_ext, "lrn": lrn}
