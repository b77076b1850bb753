# SPDX-License-Identifier: Apache-2.0
"""Convolutions: an einsum over batch and channels; space is whole on every rank.

Batch may be sharded on the input, output channels on the weight, input channels on both (a Partial result; with groups,
whole groups stay together instead). A kernel reaches over a shard's border, so a sharded spatial dim is gathered first,
never convolved locally. A bias joins a Partial result on the first rank only. The local form is spelled out with the
shard's own number of channels and groups; geometry that depends on the input's size is resolved here.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...errors import OpRuleError
from .spec import SUMS, Call, Local, LocalCall, OpSpec, P, R, S

NAMES = """
conv:Conv1DExt,Conv2DExt,Conv3DExt,Conv1DPadding,Conv2DPadding,Conv3DPadding:input weight bias stride padding dilation groups
convolution:Convolution,ConvolutionStr:input weight bias stride padding dilation transposed output_padding groups
conv_transpose:ConvTranspose2D:input weight bias stride padding output_padding groups dilation
conv_classic:Conv2D,Conv3D:input weight
conv_transpose_classic:Conv2DTranspose,Conv2DBackpropInput,Conv3DTranspose:input weight size
"""


@dataclass(frozen=True, slots=True)
class Geometry:
    """All a convolution needs besides its operands; tuples have one entry per spatial dim."""

    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    out: tuple[int, ...]


def per_dim(value, n: int, default: int = 0) -> tuple[int, ...]:
    """An int, a sequence, or a classic (1, 1, h, w) sequence, as one int per spatial dim."""
    if value is None:
        return (default,) * n
    if isinstance(value, int):
        return (value,) * n
    value = tuple(value)
    return value * n if len(value) == 1 else value[-n:]


def geometry(space, kernel, stride=1, padding=0, dilation=1, groups=1, transposed=False, output_padding=0,
             out=None) -> Geometry:
    """Resolves padding ("same", "valid", ints, or (before, after) pairs) and the result's extent.

    Args:
        space: the input's spatial extents.
        kernel: the kernel's.
        out: the result's extents, where a transposed convolution is told.
    """
    n = len(space)
    stride, dilation, extra = per_dim(stride, n, 1), per_dim(dilation, n, 1), per_dim(output_padding, n)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    mode = padding.lower() if isinstance(padding, str) else None
    if mode == "same" and not transposed:
        totals = [max((ceil(i / s) - 1) * s + r - i, 0) for i, s, r in zip(space, stride, reach)]
    elif mode == "same":
        out = out or tuple(i * s for i, s in zip(space, stride))
        totals = [max((i - 1) * s + r - o, 0) for i, s, r, o in zip(space, stride, reach, out)]
    elif mode == "valid":
        totals = [0] * n
    else:
        totals = None
        pads = tuple(p if isinstance(p, tuple) else (p, p) for p in (padding if _paired(padding) else per_dim(padding, n)))
    if totals is not None:
        pads = tuple((t // 2, t - t // 2) for t in totals)
    if out is None and transposed:
        out = tuple((i - 1) * s - sum(p) + r + e for i, s, p, r, e in zip(space, stride, pads, reach, extra))
    elif out is None:
        out = tuple((i + sum(p) - r) // s + 1 for i, p, r, s in zip(space, pads, reach, stride))
    return Geometry(stride, pads, dilation, groups, transposed, tuple(out))


def _paired(padding) -> bool:
    return isinstance(padding, tuple | list) and any(isinstance(p, tuple) for p in padding)


def _of_call(call: Call) -> tuple[Geometry, bool]:
    """The call's geometry, and whether its own local call works on batch shards as it stands."""
    x, w = call.args["input"], call.args["weight"]
    n = w.ndim - 2
    space, kernel = x.shape[x.ndim - n:], w.shape[2:]
    if "attrs" in call.args:
        attrs = call.args["attrs"]
        if attrs.get("data_format", "NCHW") not in ("NCHW", "NCDHW"):
            raise OpRuleError(f"For '{call.op}', the format {attrs['data_format']} is not supported.", "", "", "use NCHW")
        flat, mode = per_dim(attrs["pad"], 2 * n), str(attrs["pad_mode"]).lower()
        padding = mode if mode in ("same", "valid") else tuple((flat[2 * d], flat[2 * d + 1]) for d in range(n))
        transposed = call.op == "conv_transpose_classic"
        size = call.args.get("size")
        return geometry(space, kernel, attrs["stride"], padding, attrs["dilation"], attrs.get("group", 1), transposed,
                        attrs.get("output_padding", 0), None if size is None else tuple(size[2:])), size is None
    transposed = call.op == "conv_transpose" or bool(call.args.get("transposed"))
    return geometry(space, kernel, call.get("stride", 1), call.get("padding", 0),
                    call.get("dilation", 1), call.get("groups", 1), transposed, call.get("output_padding", 0)), True


def conv(call: Call) -> OpSpec:
    """Every convolution, transposed or not, batched or not."""
    x, w, b = call.args["input"], call.args["weight"], call.get("bias")
    g, as_it_stands = _of_call(call)
    channel = x.ndim - len(g.out) - 1
    made = w.shape[1] * g.groups if g.transposed else w.shape[0]
    shape = (*x.shape[:channel], made, *g.out)
    w_out, w_in = (1, 0) if g.transposed else (0, 1)

    def case(px, pw, pb, out, even=()):
        return call.case({x.index: px, w.index: pw, **({} if b is None else {b.index: pb})}, out, even=even)
    cases = [case(S(d), R, R, S(d)) for d in range(channel)]
    if g.groups == 1:
        cases += [case(R, S(w_out), S(0), S(channel)), case(S(channel), S(w_in), R, P)]
    else:
        cases.append(case(S(channel), S(0), S(0), S(channel), ((x.index, channel, g.groups),)))
    for p in SUMS:
        cases += [case(p, R, R, p), case(R, p, R, p)]

    def local(at: Local) -> LocalCall | None:
        once = [a for a in at.outs[0].partial_axes if at.outs[0].placements[a].is_partial("sum")]
        parts = at.ins[x.index].divisor(channel) if g.groups > 1 else 1
        whole = not at.ins[w.index].dim_axes[0] and not at.ins[w.index].dim_axes[1]
        if whole and as_it_stands and (b is None or not once):
            return None
        share = None if b is None or not once else float(at.is_first(once))
        return LocalCall("conv", (x, w, b, g.stride, g.pads, g.dilation, g.groups // parts, g.transposed, g.out, share))
    return OpSpec((shape,), tuple(cases), local)


RULES = dict.fromkeys(("conv", "convolution", "conv_transpose", "conv_classic", "conv_transpose_classic"), conv)
