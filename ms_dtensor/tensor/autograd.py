# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad` and `grad`: MindSpore's own, with the gradients of DTensors handed back as DTensors.

MindSpore's functions work unmodified and give local tensors in the layout of each parameter; these wrap the result.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor
from mindspore.common.api import _pynative_executor

from ..dispatch.operands import recording, retag
from ..redistribute.execute import recorded_gradient
from .dtensor import DTensor


def value_and_grad(fn, grad_position=None, weights=None, has_aux=False):
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
        >>> value, gradient = md.value_and_grad(lambda t: (t * t).sum(), 0)(x)
        >>> value.item(), gradient
        (5.0, DTensor(f32[1@tp, 2], mesh=(tp=1), rank 0 holds [1, 2]))
    """
    return _wrapping(ms.value_and_grad(fn, grad_position, weights, has_aux), 1, grad_position, weights)


def grad(fn, grad_position=0, weights=None, has_aux=False):
    """As `mindspore.grad`; see `value_and_grad`.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.grad(lambda x: (x * x).sum())(md.ones(2, device_mesh=mesh)).to_local()
        Tensor(shape=[2], dtype=Float32, value= [ 2.00000000e+00,  2.00000000e+00])
    """
    return _wrapping(ms.grad(fn, grad_position, weights, has_aux), 0 if has_aux else None, grad_position, weights)


def _wrapping(inner, at: int | None, grad_position, weights):
    """`inner` with the gradients among its results as DTensors; they are result `at`, or all there is.

    MindSpore 2.10 keeps on recording after a forward that raised, and the next gradient would be one of a gradient.
    """
    if weights is not None and not isinstance(weights, Tensor):
        weights = list(weights)

    def differentiated(*args, **kwargs):
        outermost = not recording()
        try:
            out = inner(*args, **kwargs)
        except BaseException:
            if outermost:
                _pynative_executor.clear_res()
            raise
        originals = weights
        if grad_position is not None:
            originals = args[grad_position] if grad_position.__class__ is int else [args[i] for i in grad_position]
        gradients = out if at is None else out[at]
        if weights is not None and grad_position is not None:
            gradients = _wrap_gradients(gradients[0], originals), _wrap_gradients(gradients[1], weights)
        else:
            gradients = _wrap_gradients(gradients, originals)
        return gradients if at is None else (*out[:at], gradients, *out[at + 1:])
    return differentiated


def _wrap_gradients(gradients, originals):
    """The gradients, those of DTensors as DTensors: each is new and nobody else has it, so its class is changed."""
    several = gradients.__class__ is tuple
    if originals.__class__ is not list:
        originals = [originals] * (len(gradients) if several else 1)
    done = [retag(recorded_gradient(g, o._layout), o._layout.gradient()) if g.__class__ is Tensor and isinstance(o, DTensor)
            else g for g, o in zip(gradients if several else (gradients,), originals)]
    return tuple(done) if several else done[0]
