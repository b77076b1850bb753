# SPDX-License-Identifier: Apache-2.0
"""Does this MindSpore behave as the library relies on? Asked with the first DTensor, in some milliseconds.

A MindSpore whose internals differ is refused with the name of the probe that failed, never trusted, because most such
differences would show as wrong numbers only. So no upper version bound is needed.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from ..errors import ConfigError
from .names import FIX, Function, NoFallbackGuard, executor, recording, run_backward
from .target import outside_meta


class _Asked(Tensor):
    """A tensor that counts how often its class was asked; the marker lets `plain OP asked` find it."""

    asked = 0
    _run_own_op = True

    def __fallback__(self, func, args=(), kwargs=None):
        _Asked.asked += 1
        with NoFallbackGuard():
            return func(*args, **(kwargs or {}))


def _plain(*values: float) -> Tensor:
    return Tensor([*values], ms.float32)


def _noting(*values: float) -> Tensor:
    return Tensor._make_subclass(_Asked, _plain(*values))


FORMS: dict[str, Callable] = {
    "a function with overloads": lambda x, y: mint.add(x, y), "a mint function": lambda x, y: mint.exp(x),
    "an ops function": lambda x, y: ops.tanh(x), "a method": lambda x, y: x.mul(y), "an operator": lambda x, y: x * y,
    "an operator with a number": lambda x, y: 2.0 * x, "a primitive": lambda x, y: ops.Neg()(x),
    "a keyword operand": lambda x, y: mint.mul(_plain(1.0, 2.0), other=y),
    "a sequence of tensors": lambda x, y: mint.cat((x, y)), "the second operand": lambda x, y: mint.add(_plain(1.0, 2.0), y),
}


def _the_hook_is_asked() -> str:
    """Every call form asks the class of a Tensor subclass, once."""
    x, y = _noting(1.0, 2.0), _noting(3.0, 4.0)
    for form, call in FORMS.items():
        _Asked.asked = 0
        call(x, y)
        if _Asked.asked != 1:
            return f"{form} asked {_Asked.asked} times"
    return ""


def _the_guard_guards() -> str:
    """Inside the guard nobody is asked; behind it everybody is again."""
    x = _noting(1.0, 2.0)
    _Asked.asked = 0
    with NoFallbackGuard():
        with NoFallbackGuard():
            mint.exp(x)
        x * x
    if _Asked.asked:
        return "asked inside NoFallbackGuard"
    mint.exp(x)
    return "" if _Asked.asked else "not asked behind NoFallbackGuard"


def _a_class_can_be_assigned() -> str:
    """A result becomes a subclass in place, with its values and its place in the graph."""
    def fn(x):
        y = x * x
        y.__class__ = _Asked
        with NoFallbackGuard():
            return (y * y).sum()
    gradient = ms.grad(fn)(_plain(1.0, 2.0))
    return "" if gradient.tolist() == [4.0, 32.0] else f"the gradient of x**4 at 1, 2 is {gradient.tolist()}"


def _an_alias_is_the_same_value_to_autograd() -> str:
    """`_make_subclass` of a tensor of a graph shares its storage, and gradients through both add up."""
    def fn(x):
        y = x * x
        alias = Tensor._make_subclass(_Asked, y)
        with NoFallbackGuard():
            return (y * 3.0 + alias * alias).sum()
    gradient = ms.grad(fn)(_plain(1.0, 2.0))
    return "" if gradient.tolist() == [10.0, 44.0] else f"the gradient of 3x**2 + x**4 at 1, 2 is {gradient.tolist()}"


class _Triple(Function):  # type: ignore[misc, valid-type]
    @staticmethod
    def forward(ctx, x):
        ctx.seen = ms.Tensor(x)
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        return g * 3.0


def _nodes_hooks_and_callbacks_run() -> str:
    """A node's own backward counts, a hook sees its gradient, a final callback comes last, recording is told."""
    seen: list[Any] = []

    def hook(gradient):
        executor.queue_backward_final_callback(lambda: seen.append("end"))
        seen.append(gradient.tolist())
        return gradient * 2.0

    def fn(x):
        seen.append(recording())
        y = _Triple.apply(x)
        y.register_hook(hook)
        return (y * y).sum()
    before = recording()
    gradient = ms.grad(fn)(_plain(1.0, 2.0))
    if seen != [True, [2.0, 4.0], "end"]:
        return f"recording, the hook's gradient and the callback were {seen}"
    if recording() is not before:
        return "recording does not end with the gradient"
    return "" if gradient.tolist() == [12.0, 24.0] else f"the gradient is {gradient.tolist()} for [12, 24]"


def _gradients_pass_one_door() -> str:
    """`ms.grad`, `GradOperation` and their like all ask `executor.grad`, found on the object."""
    calls: list[int] = []
    original = executor.grad

    def counting(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)
    had = "grad" in executor.__dict__
    executor.grad = counting
    try:
        ms.grad(lambda x: (x * x).sum())(_plain(1.0))
        ms.value_and_grad(lambda x: (x * x).sum())(_plain(1.0))
        ops.GradOperation(get_all=True)(lambda x: (x * x).sum())(_plain(1.0))
    finally:
        if had:
            executor.grad = original
        else:
            del executor.grad
    return "" if len(calls) == 3 else f"{len(calls)} of 3 gradient functions passed executor.grad"


def _tensors_tell_their_state() -> str:
    """Leaves and shapes are told without waiting for data."""
    told: list[Any] = []

    def fn(x):
        y = x * x
        told.extend([y._is_leaf, tuple(y._shape)])
        return y.sum()
    x = _plain(1.0, 2.0)
    ms.grad(fn)(x)
    return "" if [x._is_leaf, *told] == [True, False, (2,)] else f"_is_leaf and _shape tell {[x._is_leaf, *told]}"


def _backwards_come_in_any_order() -> str:
    """Forwards that are recorded one after another have their backwards later, in any order, of what is asked for."""
    xs, ys = [_plain(1.0, 2.0), _plain(3.0, 4.0)], []
    for x in xs:
        Tensor.requires_grad_(x, True)
        executor.set_grad_flag(True)
        try:
            ys.append((x * x).sum())
        finally:
            executor.set_grad_flag(False)
    found = [run_backward((ys[i],), (ms.Tensor(1.0, ms.float32),), False, False, (xs[i],), True,
                          accumulate_grad=False)[0].asnumpy().tolist() for i in (1, 0)]
    return "" if found == [[6.0, 8.0], [2.0, 4.0]] and not recording() else f"the gradients are {found}"


PROBES = (_the_hook_is_asked, _the_guard_guards, _a_class_can_be_assigned, _an_alias_is_the_same_value_to_autograd,
          _nodes_hooks_and_callbacks_run, _gradients_pass_one_door, _tensors_tell_their_state)


PYNATIVE = "ms.set_context(mode=ms.PYNATIVE_MODE)"


def in_graph_mode() -> bool:
    """Whether MindSpore compiles every cell, and so asks no tensor's class."""
    return ms.get_context("mode") == ms.GRAPH_MODE


@cache
def check_internals() -> None:
    """Runs every probe, once.

    Raises:
        ConfigError: MindSpore is in graph mode, or behaves otherwise; names the probe.
    """
    if in_graph_mode():
        raise ConfigError("For 'ms_dtensor', MindSpore is in GRAPH_MODE.", "ms.get_context('mode')",
                          "A compiled graph does not dispatch: it would compute on this rank's shard.", PYNATIVE)
    for probe in PROBES:
        _ask(probe, "ms_dtensor")


@cache
def check_recordings() -> None:
    """Runs the probe of what only recordings, and so pipelines, stand on.

    Raises:
        ConfigError: MindSpore lacks it.
    """
    _ask(_backwards_come_in_any_order, "Recording")


def _ask(probe: Callable[[], str], who: str) -> None:
    try:
        with outside_meta():  # a model may be made without values, and what is asked has some
            found = probe()
    except Exception as error:  # whatever an unknown MindSpore raises is a difference
        found = f"{type(error).__name__}: {error}"
    if found:
        raise ConfigError(f"For '{who}', MindSpore {ms.__version__} does not behave as the library relies on.",
                          f"probe '{probe.__name__.strip('_')}': {found}", (probe.__doc__ or "").strip(), FIX)
