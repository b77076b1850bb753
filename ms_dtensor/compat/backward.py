# SPDX-License-Identifier: Apache-2.0
"""A training loop as PyTorch writes it: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`, over `md.backward`.

While it is on, everything is recorded, and tensors have PyTorch's attributes; a step of an optimizer is not recorded, and
evaluation belongs under `no_grad`. On and off are one state, `BackwardCompat`, of a process.
"""
from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from mindspore import Tensor, mint, ops

from ..dispatch.reached import know
from ..dispatch.recorded import backward as ours
from ..dispatch.recorded import kept, not_recorded, recorded
from ..errors import ConfigError
from ..internals.names import set_requires_grad
from ..internals.undo import Patched

_BASE: Any = Tensor.__mro__[-2]  # C++'s class, of which tensors and parameters are

_MINT = (mint.optim.Adam, mint.optim.AdamW, mint.optim.SGD)


def _backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    """`md.backward`: adds the gradients to `.grad` of the leaves that this was computed from."""
    if create_graph:
        raise ConfigError("For 'backward', create_graph=True is not offered.", "",
                          "What a backward computes is not recorded.", "md.grad of a function that calls md.grad")
    ours(self, gradient, bool(retain_graph), inputs)


def _requires_grad(self) -> bool:
    return self._requires_grad


def _requires_grad_(self, requires_grad: bool = True):
    """PyTorch's: MindSpore's returns nothing, and here the tensor is one whose gradient a backward keeps."""
    set_requires_grad(self, requires_grad)
    if requires_grad:
        know([self])
    return self


def _detach(self):
    return ops.stop_gradient(self)


def _step(self) -> None:
    """A step by `.grad` of MindSpore's optimizer."""
    params = list(self.parameters)
    without = [p.name for p in params if getattr(p, "grad", None) is None]
    if without:
        raise ConfigError(f"For '{type(self).__name__}.step', parameters have no '.grad'.", ", ".join(without[:5]),
                          "MindSpore's optimizers step all of their parameters.",
                          ("loss.backward() of a loss that reaches them", "an optimizer of the others alone"))
    with not_recorded():
        self(tuple(p.grad for p in params))


def _zero_grad(self, set_to_none: bool = True) -> None:
    """Lets go of the `.grad` of the optimizer's parameters."""
    for p in self.parameters:
        p.grad = None


_ON_TENSORS: dict[str, Any] = {"backward": _backward, "grad": kept, "detach": _detach, "requires_grad_": _requires_grad_,
                               "requires_grad": property(_requires_grad, _requires_grad_),
                               "is_leaf": property(lambda self: self._is_leaf)}
_ON_OPTIMIZERS: dict[str, Any] = {"step": _step, "zero_grad": _zero_grad}


class BackwardCompat:
    """PyTorch's way of a training loop, while it is on.

    Attributes:
        on: whether it is.
    """

    def __init__(self) -> None:
        self._stack: ExitStack | None = None

    @property
    def on(self) -> bool:
        """Whether it is on."""
        return self._stack is not None

    def enable(self) -> BackwardCompat:
        """Puts the attributes on tensors and optimizers, and begins to record; does nothing where it is on."""
        if self._stack is None:
            with ExitStack() as stack:
                stack.enter_context(recorded())
                patched = Patched()
                stack.callback(patched.take_back)
                for holder, attributes in ((_BASE, _ON_TENSORS), *((o, _ON_OPTIMIZERS) for o in _MINT)):
                    for name, value in attributes.items():
                        patched.put(holder, name, value)
                self._stack = stack.pop_all()
        return self

    def disable(self) -> None:
        """Takes them back, and ends the recording; `.grad` of parameters stays."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def __enter__(self) -> BackwardCompat:
        return self

    def __exit__(self, *exc) -> None:
        self.disable()


_state = BackwardCompat()


def compat_is_on() -> bool:
    """Whether gradients are kept in `.grad`."""
    return _state.on


def enable_mindspore_backward_compat() -> BackwardCompat:
    """Gives tensors `backward`, `grad`, `detach`, `requires_grad` and `requires_grad_` as PyTorch has them, and MindSpore's
    optimizers `step` and `zero_grad`.

    From here on, or in a `with` block, everything is recorded; gradients are `md.backward`'s, of all leaves that a loss is
    computed from, bit for bit those of `value_and_grad`. It is refused meanwhile, as are pipelines but hyper_parallel's.

    Returns:
        The state: to be left as a context, or by `disable()`.

    Raises:
        OpRuleError: inside a gradient or a recording.

    Example:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.backward import enable_mindspore_backward_compat
        >>> from ms_dtensor.optim import SGD
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> optimizer = SGD(net.trainable_params(), lr=0.5)
        >>> with enable_mindspore_backward_compat():
        ...     loss = net(ms.Tensor([[1.0, 2.0]])).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     net.weight.grad.asnumpy().tolist(), net.weight.asnumpy().tolist()
        ([[1.0, 2.0]], [[0.5, 0.0]])
    """
    return _state.enable()
