# SPDX-License-Identifier: Apache-2.0
"""Convolutions on local tensors, from the classic primitives, which have kernels on every device.

The `mint` ones (`Conv2DExt` ...) exist on Ascend only; `CPU` maps them here. Padding is resolved to numbers, so that a
shard with fewer channels convolves exactly as its part of the whole does.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import mint, ops

from ..rules.conv import geometry

_PRIMITIVES: dict = {}


def _primitive(kind, *args, **kwargs):
    key = kind, args, tuple(kwargs.items())
    if key not in _PRIMITIVES:
        _PRIMITIVES[key] = kind(*args, **kwargs)
    return _PRIMITIVES[key]


def conv(x, w, b, stride, pads, dilation, groups, transposed, out, share=None):
    """Any convolution of any number of spatial dims; `b` counts `share` times (None: once)."""
    dtype = x.dtype
    if dtype == ms.float16:  # rounded once, as the device kernels do
        x, w = x.astype(ms.float32), w.astype(ms.float32)
    batched = len(x._shape) == len(w._shape)
    x = x if batched else mint.unsqueeze(x, 0)
    flat = len(stride) == 1
    if flat:
        x, w = mint.unsqueeze(x, 2), mint.unsqueeze(w, 2)
        stride, pads, dilation, out = (1, *stride), ((0, 0), *pads), (1, *dilation), (1, *out)
    y = (_transposed if transposed else _direct)(x, w, stride, pads, dilation, groups, out)
    y = mint.reshape(y, (*y._shape[:2], y._shape[3])) if flat else y
    y = y.astype(dtype) if y.dtype != dtype else y
    if b is not None:
        b = mint.reshape(b, (1, -1, *(1,) * (len(y._shape) - 2)))
        y = y + (b if share is None else b * share)
    return y if batched else mint.reshape(y, y._shape[1:])


def _direct(x, w, stride, pads, dilation, groups, out):
    kind = ops.Conv2D if len(stride) == 2 else ops.Conv3D
    if groups > 1 and kind is ops.Conv3D:  # the CPU kernel knows one group only
        return _by_groups(_direct, x, w, stride, pads, dilation, groups, out, 0)
    pad = tuple(p for pair in pads for p in pair)
    return _primitive(kind, w._shape[0], tuple(w._shape[2:]), pad_mode="pad", pad=pad, stride=tuple(stride),
                      dilation=tuple(dilation), group=groups)(x, w)


def _transposed(x, w, stride, pads, dilation, groups, out):
    if groups > 1:
        return _by_groups(_transposed, x, w, stride, pads, dilation, groups, out, 0)
    # The result is the input whose convolution would have x's extent; what the stride left over is trimmed or added.
    pad, kernel = tuple(p for pair in pads for p in pair), tuple(w._shape[2:])
    if len(stride) == 2:
        made = _primitive(ops.Conv2DTranspose, w._shape[0], kernel, pad_mode="pad", pad=pad, stride=tuple(stride),
                          dilation=tuple(dilation), group=1)
        return made(x, w, (x._shape[0], w._shape[1], *out))
    natural = [(i - 1) * s - sum(p) + d * (k - 1) + 1
               for i, s, p, d, k in zip(x._shape[2:], stride, pads, dilation, kernel)]
    made = _primitive(ops.Conv3DTranspose, w._shape[0], w._shape[1], kernel, pad_mode="pad", pad=pad,
                      stride=tuple(stride), dilation=tuple(dilation), group=1,
                      output_padding=tuple(o - n for o, n in zip(out, natural)))
    return made(x, w)


def _by_groups(fn, x, w, stride, pads, dilation, groups, out, dim):
    xs, ws = mint.chunk(x, groups, 1), mint.chunk(w, groups, dim)
    return mint.cat([fn(a, b, stride, pads, dilation, 1, out) for a, b in zip(xs, ws)], 1)


def resolved(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, transposed=False, output_padding=0):
    """`Conv1DExt` ..., and `Conv1DPadding` ..., whose padding may be a name."""
    n = len(weight._shape) - 2
    g = geometry(tuple(input._shape[-n:]), tuple(weight._shape[2:]), stride, padding, dilation, groups, transposed,
                 output_padding)
    return conv(input, weight, bias, g.stride, g.pads, g.dilation, groups, transposed, g.out)


def convolution(input, weight, bias=None, stride=1, padding=0, dilation=1, transposed=False, output_padding=0, groups=1):
    """`Convolution`, `ConvolutionStr`."""
    return resolved(input, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


def conv_transpose(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """`ConvTranspose2D`."""
    return resolved(input, weight, bias, stride, padding, dilation, groups, True, output_padding)


TABLE = {"conv": conv}
CPU = {
    **dict.fromkeys((f"Conv{n}D{kind}" for n in (1, 2, 3) for kind in ("Ext", "Padding")), resolved),
    **dict.fromkeys(("Convolution", "ConvolutionStr"), convolution), "ConvTranspose2D": conv_transpose,
}
