# SPDX-License-Identifier: Apache-2.0
"""Local forms of random ops: the numbers of one shard out of the global stream.

`shape` and `box` say which part of which global tensor the shard is. A mask is a constant for autograd, so the backward
sees the same one. `CPU` holds the same ops on whole tensors, with the primitives' arguments.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .. import rng
from .basic import clone
from .dtypes import as_dtype
from .lookup import host_values

_NUMPY = {"Float16": np.float32, "BFloat16": np.float32, "Float32": np.float32, "Float64": np.float64}


def tensor(array: np.ndarray, dtype) -> Tensor:
    """An array as a tensor of its own memory, in `dtype`."""
    out = Tensor(np.ascontiguousarray(array))
    return out if out.dtype == dtype else out.astype(dtype)


def kind(dtype):
    """The NumPy dtype in which numbers for `dtype` are drawn."""
    return _NUMPY.get(str(dtype), np.float32)


def _mask(keep: float, shape, box, dtype):
    return tensor(rng.keep_mask(rng.next_key(), shape, keep, box), dtype)


def dropout(x, keep, shape, box):
    """(x with elements zeroed and the others scaled, mask)."""
    mask = _mask(keep, shape, box, x.dtype)
    return x * mask * (1.0 / keep if keep else 0.0), mask


def dropout_channels(x, keep, shape, box):
    """Dropout of whole channels (dims 0 and 1); the mask is boolean."""
    mask = _mask(keep, (*shape[:2], *(1,) * (len(shape) - 2)), (*box[:2], *((0, 1),) * (len(shape) - 2)), x.dtype)
    full = ops.broadcast_to(mask, tuple(x._shape))
    out = x * mask * (1.0 / keep if keep else 0.0)
    return out.astype(x.dtype) if "Int" in str(x.dtype) else out, full.astype(ms.bool_)


def _like(draw):
    """`(x, *parameters, dtype, shape, box)` -> new numbers by `draw(key, shape, box, NumPy dtype, *parameters)`."""
    def call(x, *args):
        *parameters, dtype, shape, box = args
        dtype = as_dtype(dtype) or x.dtype
        return tensor(np.asarray(draw(rng.next_key(), shape, box, kind(dtype), *parameters)), dtype)
    return call


rand_like, randn_like = _like(rng.uniform), _like(rng.normal)
randint_like = _like(lambda key, shape, box, _, low, high: rng.integers(key, shape, low, high, box))


def bernoulli(p, shape, box):
    """1 with probability p, else 0."""
    draws = Tensor(rng.uniform(rng.next_key(), shape, box))
    return (draws < p.astype(ms.float32)).astype(p.dtype)


def bernoulli_like(x, p, shape, box):
    """1 with probability p (broadcast), else 0, in the shape and dtype of x."""
    draws = Tensor(rng.uniform(rng.next_key(), shape, box))
    return (draws < (p.astype(ms.float32) if isinstance(p, Tensor) else p)).astype(x.dtype)


def normal_of(mean, std, shape, box):
    """Normal numbers with mean and deviation per element, in the dtype of the first tensor of the two."""
    first = mean if isinstance(mean, Tensor) else std
    return (Tensor(rng.normal(rng.next_key(), shape, box)) * std + mean).astype(first.dtype)


def multinomial(p, count, replacement, wide, shape, box):
    """`count` places for each row of weights: by their running sums, or as the first to arrive at these rates."""
    weights, key = host_values(p).astype(np.float64), rng.next_key()
    if replacement:
        ends = np.cumsum(weights, -1)
        draws = rng.uniform(key, shape, box, np.float64) * ends[..., -1:]
        rows = [np.searchsorted(e, d, "right") for e, d in zip(ends.reshape(-1, ends.shape[-1]), draws.reshape(-1, count))]
        places = np.array(rows, np.int64).reshape(draws.shape)
    else:
        n = weights.shape[-1]
        with np.errstate(divide="ignore"):
            arrival = rng.exponential(key, (*shape[:-1], n), (*box[:-1], (0, n)), np.float64) / weights
        places = np.argsort(arrival, -1, kind="stable")[..., :count]
    return Tensor(np.ascontiguousarray(places, np.int64 if wide else np.int32))


def _whole(x):
    shape = tuple(x._shape)
    return shape, tuple((0, n) for n in shape)


def _places(p, count):
    shape = (*p._shape[:-1], count)
    return shape, tuple((0, n) for n in shape)


def _classic_channels(x, attrs):
    return dropout_channels(x, attrs["keep_prob"], *_whole(x))


vars(_classic_channels)["takes_attributes"] = True


def _broadcast(mean, std):
    shape = np.broadcast_shapes(*(tuple(v._shape) for v in (mean, std) if isinstance(v, Tensor)))
    return shape, tuple((0, n) for n in shape)


def _functional(fn):
    def call(x, p, training, *_):
        return fn(x, 1.0 - p, *_whole(x))[0] if training and p else clone(x)
    return call


TABLE = {
    "dropout": dropout, "dropout_channels": dropout_channels, "func_dropout": lambda *args: dropout(*args)[0],
    "func_dropout_channels": lambda *args: dropout_channels(*args)[0], "rand_like": rand_like, "randn_like": randn_like,
    "randint_like": randint_like, "bernoulli": bernoulli, "bernoulli_like": bernoulli_like, "normal_of": normal_of,
    "normal_into": _like(lambda key, shape, box, t, mean, std: rng.normal(key, shape, box, t) * t(std) + t(mean)),
    "uniform_into": _like(lambda key, shape, box, t, lo, hi: rng.uniform(key, shape, box, t) * t(hi - lo) + t(lo)),
    "random_into": _like(lambda key, shape, box, t, lo, hi: rng.integers(
        key, shape, 0 if hi is None else lo, 1 << 24 if hi is None else hi, box)),
    "multinomial": multinomial,
    "exponential_into": _like(lambda key, shape, box, t, rate: rng.exponential(key, shape, box, t) / t(rate)),
}

DRAWS = frozenset((*TABLE, "dropout_attention", "dropout_speed_attention"))  # local forms that take numbers of the stream
CPU = {
    "Dropout2D": _classic_channels, "Dropout3D": _classic_channels,
    "Dropout": lambda x, keep_prob=0.5, *_: dropout(x, keep_prob, *_whole(x)),
    "FuncDropoutExt": _functional(dropout), "Dropout2dExt": _functional(dropout_channels),
    "RandLikeExt": lambda x, seed=None, offset=None, dtype=None, device=None: rand_like(x, dtype, *_whole(x)),
    "RandnLike": lambda x, seed=None, offset=None, dtype=None, device=None: randn_like(x, dtype, *_whole(x)),
    "RandIntLike": lambda x, low, high, seed=None, offset=None, dtype=None, device=None:
        randint_like(x, low, high, dtype, *_whole(x)),
    "Multinomial": lambda p, count, *_: multinomial(p, count, True, False, *_places(p, count)),
    "MultinomialExt": lambda p, count, replacement=False, *_: multinomial(p, count, replacement, True, *_places(p, count)),
    "BernoulliExt": lambda p, *_: bernoulli(p, *_whole(p)),
    "Bernoulli": lambda x, p: bernoulli_like(x, p, *_whole(x)),
    **dict.fromkeys(("NormalTensorTensor", "NormalTensorFloat", "NormalFloatTensor"),
                    lambda mean, std, *_: normal_of(mean, std, *_broadcast(mean, std))),
}
