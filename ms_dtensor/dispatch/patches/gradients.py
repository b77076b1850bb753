# SPDX-License-Identifier: Apache-2.0
"""The one door of MindSpore's gradients: what belongs to a DTensor comes back as a DTensor.

`ms.grad`, `ms.value_and_grad`, `ops.GradOperation`, `ms.vjp` and the training cells all call `_pynative_executor.grad`,
which gives local tensors in the layout that each producer expects; here they are said to be that. Also closed here: a
forward that raised leaves MindSpore 2.10 recording, and its next gradient would be one of a gradient.
"""
from __future__ import annotations

import functools
from contextvars import ContextVar

from mindspore import Parameter, Tensor, nn
from mindspore.common.recompute import _RecomputeCell
from mindspore.graph.api import _pynative_executor
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

from ...core.tree import leaves, map_leaves
from ...errors import LayoutError, MixedOperandError
from ...redistribute.execute import recorded_gradient
from .. import modes
from ..operands import local_alias, recording, redistribute, retag
from ..replaced import current
from .undo import Patched

_LIMIT = 256
_outputs: dict[int, list] = {}  # by id of a differentiated function: layouts of its outputs; every forward says them anew
_local: ContextVar[bool] = ContextVar("ms_dtensor_local_gradients", default=False)  # inside a recomputation's backward
_installed = Patched()


def _layout(x):
    return getattr(x, "_layout", None)


def _grad(original):
    def grad(fn, operation, weights, grad_position, has_aux, *args):
        if _local.get():
            return original(fn, operation, weights, grad_position, has_aux, *args)
        if weights is not None:
            weights = _current(weights)
        inputs = args[:-1] if operation.sens_param else args
        if operation.sens_param:
            args = *inputs, _sens(fn, args[-1])
        outermost = not recording()
        try:
            out = original(fn, operation, weights, grad_position, has_aux, *args)
        except BaseException:
            _clean(outermost)
            raise
        if out.__class__ is Tensor and getattr(operation, "get_by_position", False) and not operation.get_by_list:
            at = grad_position if grad_position.__class__ is int else grad_position[0]
            if inputs[at].__class__ is not tuple:  # the commonest call, without walking through trees
                return _gradient(out, inputs[at])
        originals = _wanted_inputs(operation, grad_position, inputs)
        if operation.get_by_list:
            given = fn.trainable_params() if weights is None and isinstance(fn, nn.Cell) else weights
            originals += [given] if isinstance(given, Parameter) else list(given or ())
        if not any(layout is not None for layout in map(_layout, originals)):
            return out
        count = len(leaves(out, Tensor))
        assert count == len(originals), f"{count} gradients for {len(originals)} tensors"
        it = iter(originals)
        return map_leaves(lambda g: _gradient(g, next(it)), out, Tensor)
    return grad


def _gradient(g, x):
    """`g`, the gradient of `x`, said to be what it is: it is new and nobody else has it, so its class is changed."""
    layout = _layout(x)
    if layout is None or g.__class__ is not Tensor:
        return g
    return retag(recorded_gradient(g, layout), layout.gradient())


def _wanted_inputs(operation, grad_position, inputs) -> list:
    """The inputs to which the gradients belong, in order; MindSpore leaves out what is no tensor."""
    if operation.get_all:
        chosen = inputs
    elif getattr(operation, "get_by_position", False):
        chosen = [inputs[i] for i in ((grad_position,) if isinstance(grad_position, int) else grad_position)]
    else:
        chosen = () if operation.get_by_list else inputs[:1]
    return [t for x in chosen if isinstance(x, Tensor) or hasattr(x, "__ms_mutable__") for t in leaves(x, Tensor)]


def _current(weights):
    """Weights that were listed before the model was distributed are the parameters that took their places."""
    if weights is None or isinstance(weights, Tensor):
        return weights if weights is None else current(weights)
    now = [current(p) for p in weights]
    for p in now:
        if _layout(p) is not None and not isinstance(p, Parameter):
            raise LayoutError("For a gradient, one of 'weights' is a DTensor, but no Parameter.", p._layout.describe(),
                              "MindSpore gives zeros for what is no parameter.",
                              ("Parameter(distribute_tensor(...))", "distribute_module(cell, device_mesh)",
                               "pass it as an input, and grad_position"))
    return weights if all(a is b for a, b in zip(now, weights)) else type(weights)(now)


# -- what an output is weighted with ----------------------------------------------------------------------------------


def _end_graph(original):
    def end_graph(fn, output, *args, **kwargs):
        layouts = [_layout(output)] if isinstance(output, Tensor) else [_layout(x) for x in leaves(output, Tensor)]
        if any(layouts):
            if len(_outputs) >= _LIMIT:
                _outputs.clear()
            _outputs[id(fn)] = layouts
        else:
            _outputs.pop(id(fn), None)
        return original(fn, output, *args, **kwargs)
    return end_graph


def _sens(fn, sens):
    """The given cotangents as local tensors, each laid out as its output's cotangent."""
    layouts = iter(_outputs.get(id(fn), ()))

    def local(s):
        want, have = next(layouts, None), _layout(s)
        if want is None and have is None or have is None and not s._shape:
            return s
        if want is None or have is None and not modes.mode.get().implicit_replication or tuple(s.shape) != want.shape:
            raise MixedOperandError(
                "For a gradient, 'sens' does not fit the output.",
                f"output {'plain' if want is None else want.describe()}, sens "
                f"{'plain ' + str(list(s._shape)) if have is None else have.describe()}",
                "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
                ("distribute_tensor(sens, device_mesh, placements)", "a 0-d sens", "differentiate (output * sens).sum()"))
        target = want.gradient()
        if have is None:
            s = retag(local_alias(s), target.replicated())
        return local_alias(redistribute(s, target, implicit="sens"))
    return map_leaves(local, sens, Tensor)


# -- around them ------------------------------------------------------------------------------------------------------


def _clean(outermost: bool) -> None:
    """After an exception in the outermost gradient nothing is recorded any more."""
    if outermost:
        _pynative_executor.clear_res()
        _pynative_executor.set_grad_flag(False)


def _forward(original):
    @functools.wraps(original)
    def forward(fn, *args, **kwargs):
        if recording():
            with modes.HigherOrderBlock():
                return original(fn, *args, **kwargs)
        try:
            return original(fn, *args, **kwargs)
        except BaseException:
            _clean(True)
            raise
    return forward


def _complex_call(original):
    @functools.wraps(original)
    def complex_call(self, *args, **kwargs):  # of a cell after `set_grad()`, as training cells call it, among others
        outermost = not recording()
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            _clean(outermost)
            raise
    return complex_call


def _recomputed(original):
    @functools.wraps(original)
    def construct(self, *args, **kwargs):  # its parameters were listed when `recompute()` was called
        self.internal_params[:] = [current(p) for p in self.internal_params]
        return original(self, *args, **kwargs)
    return construct


def _recomputing(original):
    @functools.wraps(original)
    def bprop(self, *args):
        token = _local.set(True)
        try:
            return original(self, *args)
        finally:
            _local.reset(token)
    return bprop


_DOORS = (
    (_pynative_executor, "grad", _grad), (_pynative_executor, "end_graph", _end_graph),
    (base, "_pynative_func_grad_forward", _forward), (grad_func, "_pynative_func_grad_forward", _forward),
    (nn.Cell, "_complex_call", _complex_call),
    (_RecomputeCell, "construct", _recomputed), (_RecomputeCell, "bprop", _recomputing),
)


def install() -> None:
    """Installs the doors; does nothing where they are in place."""
    if not _installed:
        for holder, name, door in _DOORS:
            _installed.put(holder, name, door(getattr(holder, name)))


def uninstall() -> None:
    """Takes them back."""
    _installed.take_back()
