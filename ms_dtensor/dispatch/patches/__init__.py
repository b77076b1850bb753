# SPDX-License-Identifier: Apache-2.0
"""Where MindSpore is patched: `plain OP dtensor` must reach us whichever operand comes first.

MindSpore 2.10 asks only the *first* operand's class for `__fallback__` in operators such as `parameter + dtensor`, and
a class without one computes on local storage silently. One class attribute on `mindspore.Tensor` closes that for every
entry point. It is installed with the first DTensor and `uninstall()` removes it; plain tensors are not slowed, because
MindSpore asks only subclasses (and Parameters, which pay about 2 us). The doors of the modules beside
this one, (holder, attribute, what is made of the original), come with it, and go with it.
"""
from __future__ import annotations

from mindspore import Tensor

from ...core.tree import first_dtensor
from ...internals.names import NoFallbackGuard, recording
from ...internals.probes import check_internals
from ...internals.undo import Patched
from ..constants import Constant, plain_call
from ..held import holding, plain_product
from . import bprops, checkpoints, functions, gradients, hooks, jit, keywords, training, written

_NAME = "__fallback__"
_installed, _for_recordings = Patched(), Patched()


def _plain_fallback(self, func, args=(), kwargs=None):
    first = first_dtensor(args, kwargs, "_run_own_op")
    if first is not None:
        return first.__fallback__(func, args, kwargs)
    store = holding.get()
    with NoFallbackGuard():
        if store is not None:
            return plain_product(store, func, args, kwargs)
        if Constant.met and recording():
            return plain_call(func, args, kwargs)
        return func(*args) if not kwargs else func(*args, **kwargs)


def install() -> None:
    """Installs the patch; does nothing where it is in place."""
    if _NAME not in Tensor.__dict__:
        setattr(Tensor, _NAME, _plain_fallback)
        try:
            check_internals()
        except BaseException:  # also Ctrl-C: half of the patches must not stay
            delattr(Tensor, _NAME)
            raise
        gradients.end_abandoned()
        for holder, name, door in (*functions.doors(), *keywords.doors(), *jit.DOORS, *gradients.DOORS, *hooks.DOORS,
                                   *training.doors(), *checkpoints.DOORS):
            _installed.put(holder, name, door(getattr(holder, name)))
        install_for_recordings()


def install_for_recordings() -> None:
    """Installs what a `Recording` needs without a DTensor, too; does nothing where it is in place."""
    if not _for_recordings:
        for holder, name, door in (*written.DOORS, *bprops.DOORS):
            _for_recordings.put(holder, name, door(getattr(holder, name)))


def uninstall() -> None:
    """Removes the patch; `plain OP dtensor` then computes on local storage again, as in plain MindSpore."""
    if Tensor.__dict__.get(_NAME) is _plain_fallback:
        delattr(Tensor, _NAME)
        _for_recordings.take_back()
        _installed.take_back()
