# SPDX-License-Identifier: Apache-2.0
"""Ops written as several public ones: on plain tensors the op itself, on DTensors several dispatched ops.

Here is *what* is computed; `dispatch/composite.py` says when a DTensor call is made this way.
"""
from __future__ import annotations

import math

import mindspore as ms
from mindspore import mint, ops

from ..rules.loss import reduction_of
from ..rules.spec import Call
from . import cpu_math
from .dtypes import rounded, wider


def nll_loss(name, input, target, weight=None, reduction=1, ignore_index=-100, **_):
    """`NLLLoss`, `NLLLoss2d`: (loss, sum of weights); ignored targets have weight 0, and weights no gradient."""
    classes = 0 if len(input.shape) == 1 else 1
    ignored = target == ignore_index
    known = target * mint.logical_not(ignored).astype(target.dtype)
    loss = mint.squeeze(mint.gather(input, classes, mint.unsqueeze(known, classes).astype(ms.int64)), classes)
    w = ops.ones_like(loss) if weight is None else ops.gather(ops.stop_gradient(weight), known, 0)
    w = w.masked_fill(ignored, 0.0)
    loss = -loss.masked_fill(ignored, 0.0) * w
    kind = reduction_of(Call("nll_loss", {"reduction": reduction}, ()))
    if kind == "none":
        return loss, w.sum() * 0
    return (loss.sum() / w.sum() if kind == "mean" else loss.sum()), w.sum()


def batch_norm(name, input, weight=None, bias=None, running_mean=None, running_var=None, training=False,
               momentum=0.1, eps=1e-5, extents=None, **_):
    """Training `BatchNorm` and `BatchNormExt`: statistics of the whole batch; running ones are written in place.

    `extents`: the shape to go by, where that is a shard's and not the global one.
    """
    extents = input.shape if extents is None else extents
    dims = tuple(d for d in range(len(extents)) if d != 1)
    shape, flat = tuple(n if d == 1 else 1 for d, n in enumerate(extents)), (extents[1],)
    count = math.prod(extents[d] for d in dims)
    x = wider(input)
    middle = cpu_math.mean(x, dims, True)
    off = x - middle
    var = cpu_math.mean(off * off, dims, True)
    scale = mint.rsqrt(var + eps)
    out = off * scale
    if weight is not None:
        out = out * mint.reshape(weight, shape)
    if bias is not None:
        out = out + mint.reshape(bias, shape)
    for held, now in ((running_mean, middle), (running_var, var * (count / max(count - 1, 1)))):
        if held is not None:
            now = rounded(ops.stop_gradient(mint.reshape(now, flat)), held)
            held.copy_(held * (1 - momentum) + now * momentum)
    out, middle, var, scale = (rounded(y, input) for y in (out, middle, var, scale))
    if name == "BatchNormExt":
        return out, mint.reshape(middle, flat), mint.reshape(scale, flat)
    middle, var = mint.reshape(middle, flat), mint.reshape(var, flat)
    return out, middle * 0, middle * 0, middle, var
