# SPDX-License-Identifier: Apache-2.0
"""MindSpore's private names. Nothing else imports one; a release without one is refused by our error."""
from __future__ import annotations

from importlib import import_module
from typing import Any

import mindspore as ms

from ..errors import ConfigError

FIX = ("use a MindSpore release that docs/support.md lists", "report the message with your MindSpore version")


def _private(module: str, name: str) -> Any:
    """A private name, or our error instead of an ImportError from the middle of an import."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"For 'ms_dtensor', MindSpore {ms.__version__} has no {module}.{name}.", str(error),
                          "The library dispatches and differentiates through it.", FIX) from error


NoFallbackGuard = _private("mindspore._c_expression", "NoFallbackGuard")  # inside, no operand's `__fallback__` is asked
TensorOverloadCall = _private("mindspore._c_expression", "TensorOverloadCall")  # the class of `mint.add`, `Tensor.add`, ...
GroupOptions = _private("mindspore._c_expression", "GroupOptions")  # what a communicator is made with
UsersFunction: Any = _private("mindspore.common._grad_function", "_Function")  # an autograd node written in Python


class Function(UsersFunction):
    """The base of our own nodes, which get local tensors: a user's `apply` is asked for DTensors (`patches/bprops.py`)."""

    apply = vars(UsersFunction)["apply"]


executor = _private("mindspore.graph.api", "_pynative_executor")  # autograd's state: recording, gradients, callbacks
# the engine below `executor.grad`; only recordings need it, and their probe refuses a release without it
run_backward: Any = getattr(import_module("mindspore._c_expression"), "run_backward", None)
# the same storage as a leaf, without a gradient: in a sixth of `ops.stop_gradient`'s time; and no view, which kernels copy
detach: Any = getattr(import_module("mindspore._c_expression"), "pyboost_detach", None) or ms.ops.stop_gradient
TensorPy = _private("mindspore._c_expression", "TensorPy")  # its C++ methods: Python ones cost as much again
set_versions = _private("mindspore._c_expression", "_unsafe_set_version_counter")  # a backward refuses what has another
no_grad = _private("mindspore.graph.api", "_no_grad")  # inside, nothing is recorded
set_requires_grad = ms.Tensor.requires_grad_  # MindSpore's own: `compat.backward` puts PyTorch's in its place
recording = executor._executor.grad_flag  # the C++ method: the Python one around it costs as much again
enabled = executor._executor.enable_grad  # whether `no_grad` is not around; `recording` goes on inside it
context = _private("mindspore.context", "_context")()._context_handle  # its C++ half: `get_context` costs 40 times as much
_devices = getattr(import_module("mindspore.common"), "device", None)  # of `DeviceCtx`; a release may have none
context_keys = _private("mindspore._c_expression", "ms_ctx_param")
RecomputeCell = _private("mindspore.common.recompute", "_RecomputeCell")  # what `cell.recompute()` runs
recompute_module: Any = import_module("mindspore.common.recompute")  # the random state that it saves and restores
CellBackwardHook = _private("mindspore.ops.operations._inner_ops", "CellBackwardHook")
functional_overload = _private("mindspore.ops", "functional_overload")  # the objects behind functions with overloads
composite = _private("mindspore.ops.composite", "base")  # `GradOperation`
grad_func = _private("mindspore.ops.function.grad", "grad_func")  # `grad`, `value_and_grad`, `vjp`, ...
jit_api = _private("mindspore.graph", "api")
jit_trace = _private("mindspore.graph", "jit_trace")
seeds: Any = import_module("mindspore.common.seed")  # `_GLOBAL_SEED` and `_KERNEL_SEED`: whence `ops.dropout` draws
pijit_context = _private("mindspore.graph._utils", "pijit_context")
TensorHookHandle = _private("mindspore.common.hook_handle", "_TensorHookHandle")
HookBackward = _private("mindspore.ops.operations.debug_ops", "HookBackward")
InsertGradientOf = _private("mindspore.ops.operations.debug_ops", "InsertGradientOf")


def device_stack() -> list:
    """Devices that are around this thread's `DeviceCtx`, outermost first."""
    stack = getattr(_devices, "_DEVICE_STACK", None)
    return [] if stack is None else stack.get_stack()
