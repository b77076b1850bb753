# SPDX-License-Identifier: Apache-2.0
"""Plain tensors of a dry run that are asked for their value: `float(x.to_local())`, which would be 0 without a word.

DTensors refuse that themselves; what is plain is MindSpore's. Parameters that are made meanwhile are marked: others have
values that the user may still want. The invariant: while no dry run is under way, MindSpore's own
methods stand in their places; for tensors that have values they run in one, too.
"""
from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mindspore import Parameter, Tensor

from ...comm.pretended import MADE_DRY, executing
from ...comm.record import is_user_file
from ...errors import ConfigError
from ...internals.undo import Patched
from ...tensor.dtensor import DTensor

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ASKED = ("item", "tolist", "asnumpy", "__array__", "__bool__", "__float__", "__int__", "__index__")
_patched, _lock = Patched(), threading.Lock()


def asked_by_user(through=(DTensor.to_local, DTensor.full_tensor)) -> bool:
    """Whether the innermost frame that is not MindSpore's, of dry runs or of these is the user's, not this library's."""
    codes = [method.__code__ for method in through]
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_HERE, "<")) or "/mindspore/" in name or frame.f_code in codes):
            break
        frame = frame.f_back
    return is_user_file(frame.f_code.co_filename)


def _in_node() -> bool:
    """Whether an autograd node's own forward or backward asks: it computes with NumPy, of whatever is there."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames and hasattr(
                frame.f_locals.get(code.co_varnames[0]), "save_for_backward"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def values_watched() -> Iterator[None]:
    """Inside, who asks a tensor without data for its value gets what the dry run was told of it; of one dry run at a time.

    Raises:
        ConfigError: another dry run is under way, here or in another thread: MindSpore records one forward at a time.
    """
    if not _lock.acquire(blocking=False):
        raise ConfigError("For 'dry_run', another one is under way.", "", "A process is one rank of one world at a time.",
                          ("leave the outer block first", "a process of its own, in the place of another thread"))
    try:
        for name in _ASKED:
            _patched.put(Tensor, name, _watched(name, getattr(Tensor, name)))
        _patched.put(Parameter, "__init__", _marking(Parameter.__init__))
        try:
            yield
        finally:
            _patched.take_back()
    finally:
        _lock.release()


def _watched(name: str, original):
    @functools.wraps(original)
    def asked(self, *args, **kwargs):
        dry = executing()
        if dry is None or getattr(self, "_layout", None) is not None or not dry.is_asked(self):
            return original(self, *args, **kwargs)
        if name in ("asnumpy", "__array__"):
            return original(self, *args, **kwargs) if _in_node() else dry.array(self, name)
        told = dry.value(self, name).tolist()
        convert = {"__bool__": bool, "__float__": float, "__int__": int, "__index__": int}.get(name)
        return told if convert is None else convert(told)
    return asked


def _marking(original):
    @functools.wraps(original)
    def made(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if executing() is not None:
            self.__dict__[MADE_DRY] = True
    return made
