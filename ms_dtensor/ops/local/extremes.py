# SPDX-License-Identifier: Apache-2.0
"""Who attains an extreme: what a maximum or minimum over shards needs to know before it can share out its cotangent.

One device gives each of n equal winners 1/n of the cotangent, or all of it to the first. A rank knows its own winners only,
so it counts them here, or says where its shard begins; `redistribute/execute.py` compares ranks in the backward.
"""
from __future__ import annotations

import math

import mindspore as ms
from mindspore import mint, ops

from ..rules.spec import Winners


def winners_of_shard(what: Winners, offset: int, x, extreme):
    """How many elements of the shard `x` attain each of its extremes; of an extreme with one winner, the shard's offset."""
    if what.first:
        return offset
    if not math.prod(x._shape):
        return ops.zeros(extreme._shape, ms.float32)
    wide = ms.float64 if x.dtype == ms.float64 else ms.float32
    x, extreme = (ops.stop_gradient(t).astype(wide) for t in (x, extreme))
    shape = tuple(1 if d in what.dims else n for d, n in enumerate(x._shape))
    attain = (mint.abs(x) if what.magnitude else x) == mint.reshape(extreme, shape)
    return mint.sum(attain.astype(ms.float32), what.dims, keepdim=what.keepdim)
