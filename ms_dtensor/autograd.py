# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad` and `grad`: MindSpore's own, with the gradients of DTensors handed back as DTensors.

MindSpore's functions work unmodified and give local tensors in the layout of each parameter; these wrap the result.
"""
from __future__ import annotations

import mindspore as ms
from mindspore import Tensor
from mindspore.common.api import _pynative_executor

from .dtensor import DTensor
from .faces import recording, wrap


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
    inner = _tidy(ms.value_and_grad(fn, grad_position, weights, has_aux))

    def wrapped(*args, **kwargs):
        value, gradients = inner(*args, **kwargs)
        return value, _wrap_gradients(gradients, args, grad_position, weights)
    return wrapped


def grad(fn, grad_position=0, weights=None, has_aux=False):
    """As `mindspore.grad`; see `value_and_grad`.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.grad(lambda x: (x * x).sum())(md.ones(2, device_mesh=mesh)).to_local()
        Tensor(shape=[2], dtype=Float32, value= [ 2.00000000e+00,  2.00000000e+00])
    """
    inner = _tidy(ms.grad(fn, grad_position, weights, has_aux))

    def wrapped(*args, **kwargs):
        out = inner(*args, **kwargs)
        if has_aux:
            return _wrap_gradients(out[0], args, grad_position, weights), *out[1:]
        return _wrap_gradients(out, args, grad_position, weights)
    return wrapped


def _tidy(inner):
    """MindSpore 2.10 keeps on recording after a forward that raised, and the next gradient would be one of a gradient."""
    def run(*args, **kwargs):
        outermost = not recording()
        try:
            return inner(*args, **kwargs)
        except BaseException:
            if outermost:
                _pynative_executor.clear_res()
            raise
    return run


def _wrap_gradients(gradients, args, grad_position, weights):
    if grad_position.__class__ is int:
        of_args = args[grad_position]
    else:
        of_args = None if grad_position is None else [args[i] for i in grad_position]
    if weights is None:
        return _like(gradients, of_args)
    weights = weights if isinstance(weights, Tensor) else list(weights)
    if of_args is None:
        return _like(gradients, weights)
    return _like(gradients[0], of_args), _like(gradients[1], weights)


def _like(gradients, originals):
    if originals.__class__ is list:
        if gradients.__class__ is tuple or not isinstance(gradients, Tensor):
            return tuple(map(_like, gradients, originals))
        originals = originals[0]
    elif gradients.__class__ is tuple:
        return tuple(_like(g, originals) for g in gradients)
    if gradients.__class__ is Tensor and isinstance(originals, DTensor):
        return wrap(gradients, originals._layout.gradient())
    return gradients
