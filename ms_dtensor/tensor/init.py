# SPDX-License-Identifier: Apache-2.0
"""Initialisers for DTensors, in place: the values of `torch.nn.init`, from the one global random stream.

Each rank writes its own shard, and for a given seed the global tensor is the same on every mesh, bit for bit. Fans are
those of the *global* shape. Plain tensors are refused: they have no place in the global stream.
"""
from __future__ import annotations

import math

import numpy as np
from mindspore import Tensor

from ..comm.pretended import executing
from ..errors import LayoutError
from ..internals.names import NoFallbackGuard
from ..ops import rng
from ..ops.local.random import kind, tensor
from .dtensor import DTensor


def _write(name: str, x, values) -> DTensor:
    """Writes `values(key, shape, box, dtype)` into the shard of x."""
    if not isinstance(x, DTensor):
        raise LayoutError(f"For '{name}', the tensor must be a DTensor, but got {type(x).__name__}.", "",
                          "Plain tensors have no place in the global stream.", "distribute it first")
    layout = x.layout
    if layout.has_partial():
        raise LayoutError(f"For '{name}', a Partial tensor cannot be initialised.", layout.describe(),
                          "Which summand would each rank hold?", "use a tensor that is not Partial")
    rng.rehearse(lambda *at: values(*at, kind(x.dtype)), layout.shape)
    rng.agree(layout.mesh)
    key = rng.next_key()
    if executing() is not None:
        return x
    array = layout.assemble(lambda box: np.asarray(values(key, layout.shape, box, kind(x.dtype))))
    with NoFallbackGuard():
        Tensor.assign_value(x, tensor(array, x.dtype))
    return x


def uniform_(x, a: float = 0.0, b: float = 1.0) -> DTensor:
    """Uniform in [a, b).

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> x = md.init.uniform_(md.empty(4, device_mesh=mesh), 2.0, 3.0)
        >>> bool((x >= 2).all())
        True
    """
    return _write("uniform_", x, lambda *at: rng.uniform(*at) * at[3](b - a) + at[3](a))


def normal_(x, mean: float = 0.0, std: float = 1.0) -> DTensor:
    """Normal.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.normal_(md.empty(4, device_mesh=mesh), std=0.02)
        DTensor(f32[4], mesh=(tp=1), rank 0 holds [4])
    """
    return _write("normal_", x, lambda *at: rng.normal(*at) * at[3](std) + at[3](mean))


def trunc_normal_(x, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> DTensor:
    """Normal, redrawn (another eight times at most, then clipped) where it falls outside [a, b].

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> x = md.init.trunc_normal_(md.empty(100, device_mesh=mesh), a=-1.0, b=1.0)
        >>> bool((x.abs() <= 1).all())
        True
    """
    def values(key, shape, box, dtype):
        out = rng.normal(key, shape, box, dtype) * dtype(std) + dtype(mean)
        for again in range(1, 9):
            outside = (out < a) | (out > b)
            fresh = rng.normal(rng.Key(key.seed ^ again << 32, key.call), shape, box, dtype)
            out = np.where(outside, fresh * dtype(std) + dtype(mean), out)
        return np.clip(out, a, b)
    return _write("trunc_normal_", x, values)


def constant_(x, value: float) -> DTensor:
    """`value` everywhere.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.constant_(md.empty(2, device_mesh=mesh), 3.0).tolist()
        [3.0, 3.0]
    """
    return _write("constant_", x, lambda key, shape, box, dtype: np.full([hi - lo for lo, hi in box], value, dtype))


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """(fan in, fan out) of a weight [out, in, *kernel].

    Example:
        >>> from ms_dtensor.init import fans
        >>> fans((8, 4, 3, 3))
        (36, 72)
    """
    if len(shape) < 2:
        raise LayoutError(f"For 'fans', a weight of shape {list(shape)} has no fan.", "", "It takes two dims or more.")
    kernel = math.prod(shape[2:])
    return shape[1] * kernel, shape[0] * kernel


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The recommended gain of a nonlinearity.

    Example:
        >>> from ms_dtensor.init import calculate_gain
        >>> calculate_gain("sigmoid")
        1.0
    """
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1 + (0.01 if param is None else param) ** 2))
    gains = {"relu": math.sqrt(2.0), "tanh": 5.0 / 3, "selu": 0.75}
    if nonlinearity in gains or nonlinearity in ("linear", "sigmoid") or nonlinearity.startswith("conv"):
        return gains.get(nonlinearity, 1.0)
    raise LayoutError(f"For 'calculate_gain', {nonlinearity!r} is not known.", "",
                      f"Known are leaky_relu, linear, sigmoid, {', '.join(gains)}.")


def xavier_uniform_(x, gain: float = 1.0) -> DTensor:
    """Uniform with variance gain² · 2 / (fan in + fan out).

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.xavier_uniform_(md.empty(8, 4, device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[8@tp, 4], mesh=(tp=1), rank 0 holds [8, 4])
    """
    bound = gain * math.sqrt(6.0 / sum(fans(x.shape)))
    return uniform_(x, -bound, bound)


def xavier_normal_(x, gain: float = 1.0) -> DTensor:
    """Normal with variance gain² · 2 / (fan in + fan out).

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.xavier_normal_(md.empty(8, 4, device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[8@tp, 4], mesh=(tp=1), rank 0 holds [8, 4])
    """
    return normal_(x, 0.0, gain * math.sqrt(2.0 / sum(fans(x.shape))))


def _kaiming_std(x, a, mode, nonlinearity) -> float:
    return calculate_gain(nonlinearity, a) / math.sqrt(fans(x.shape)[("fan_in", "fan_out").index(mode)])


def kaiming_uniform_(x, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> DTensor:
    """Uniform with variance gain² / fan.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.kaiming_uniform_(md.empty(8, 4, device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[8@tp, 4], mesh=(tp=1), rank 0 holds [8, 4])
    """
    bound = math.sqrt(3.0) * _kaiming_std(x, a, mode, nonlinearity)
    return uniform_(x, -bound, bound)


def kaiming_normal_(x, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> DTensor:
    """Normal with variance gain² / fan.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.kaiming_normal_(md.empty(8, 4, device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[8@tp, 4], mesh=(tp=1), rank 0 holds [8, 4])
    """
    return normal_(x, 0.0, _kaiming_std(x, a, mode, nonlinearity))


def zeros_(x) -> DTensor:
    """Zeros.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.zeros_(md.empty(2, device_mesh=mesh)).tolist()
        [0.0, 0.0]
    """
    return constant_(x, 0.0)


def ones_(x) -> DTensor:
    """Ones.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.init.ones_(md.empty(2, device_mesh=mesh)).tolist()
        [1.0, 1.0]
    """
    return constant_(x, 1.0)
