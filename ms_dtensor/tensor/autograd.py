# SPDX-License-Identifier: Apache-2.0
"""`value_and_grad` and `grad`: MindSpore's own, under names that say what comes back.

MindSpore's functions give DTensors for DTensors by themselves (`dispatch/patches/gradients.py`). At each call they make the
function that they then run, which takes longer than an op does; here it is made once.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mindspore as ms
from mindspore import Tensor

from ..dispatch.patches.gradients import end_abandoned
from ..internals.names import composite, context, context_keys, enabled


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
    return _made_once(ms.value_and_grad(fn, grad_position, _listed(weights), has_aux))


def grad(fn, grad_position=0, weights=None, has_aux=False):
    """As `mindspore.grad`; see `value_and_grad`.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.grad(lambda x: (x * x).sum())(md.ones(2, device_mesh=mesh)).to_local()
        Tensor(shape=[2], dtype=Float32, value= [ 2.00000000e+00,  2.00000000e+00])
    """
    return _made_once(ms.grad(fn, grad_position, _listed(weights), has_aux))


def _listed(weights):
    return weights if weights is None or isinstance(weights, Tensor) else list(weights)


def _made_once(gradient: Callable) -> Callable:
    """A gradient function of MindSpore's, as it is; in PyNative mode what it makes at each call is kept for the next."""
    if not isinstance(gradient, FunctionType):
        return gradient
    told = dict(zip(gradient.__code__.co_freevars, (cell.cell_contents for cell in gradient.__closure__ or ())))
    if "grad_" not in told or "fn_" not in told:  # of graph mode, or of another release
        return gradient
    make, fn = told["grad_"], told["fn_"]
    rest = (told.get("weights"), *((told["grad_position"],) if "grad_position" in told else ()))
    made: Any = None  # (MindSpore's decorator when it was made, which is patched; what it is)

    @functools.wraps(gradient)
    def run(*args, **kwargs):
        nonlocal made
        if context.get_param(context_keys.mode) != ms.PYNATIVE_MODE or not enabled():
            return gradient(*args, **kwargs)
        end_abandoned()  # before there is a DTensor, MindSpore goes on recording what raised, and would take this for nested
        if made is None or made[0] is not composite._wrap_func:
            made = composite._wrap_func, make(fn, *rest)
        return made[1](*args, **kwargs)
    return run
