# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad` and `grad`: MindSpore's own, under names that say what comes back.

MindSpore's functions give DTensors for DTensors by themselves (`dispatch/patches/gradients.py`).
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor


def value_and_grad(fn, grad_position=0, weights=None, has_aux=False):
    """As `mindspore.value_and_grad`; the gradient of a DTensor is a DTensor in its gradient layout.

    Args:
        fn: function or Cell; returns the loss (a DTensor or plain), with `has_aux` also other outputs.
        grad_position: index or indices of the inputs to differentiate, or None.
        weights: parameters to differentiate, or None.
        has_aux: whether `fn` returns outputs beyond the loss that take no part.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> x = md.distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh, [md.Shard(0)])
        >>> value, gradient = md.value_and_grad(lambda t: (t * t).sum())(x)
        >>> value.item(), gradient
        (5.0, DTensor(f32[1@tp, 2], mesh=(tp=1), rank 0 holds [1, 2]))
    """
    return ms.value_and_grad(fn, grad_position, _listed(weights), has_aux)


def grad(fn, grad_position=0, weights=None, has_aux=False):
    """As `mindspore.grad`; see `value_and_grad`.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.grad(lambda x: (x * x).sum())(md.ones(2, device_mesh=mesh)).to_local()
        Tensor(shape=[2], dtype=Float32, value= [ 2.00000000e+00,  2.00000000e+00])
    """
    return ms.grad(fn, grad_position, _listed(weights), has_aux)


def _listed(weights):
    return weights if weights is None or isinstance(weights, Tensor) else list(weights)
