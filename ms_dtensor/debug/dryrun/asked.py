# SPDX-License-Identifier: Apache-2.0
"""Plain tensors of a dry run that are asked for their value: `float(x.to_local())`, which would be 0 without a word.

DTensors refuse that themselves; what is plain is MindSpore's. The invariant: while no dry run is under way, MindSpore's own
methods stand in their places; for tensors that have values they run in one, too.
"""
from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mindspore import Tensor

from ...comm.pretended import executing
from ...comm.record import is_user_file
from ...dispatch.patches.undo import Patched
from ...tensor.dtensor import DTensor

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ASKED = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
_patched, _lock = Patched(), threading.Lock()
_under_way = 0  # dry runs, of all threads


def asked_by_user() -> bool:
    """Whether the innermost frame that is not MindSpore's or of dry runs is the user's, and not one of this library's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not (name.startswith((_HERE, "<")) or "/mindspore/" in name or frame.f_code is DTensor.to_local.__code__):
            break
        frame = frame.f_back
    return is_user_file(frame.f_code.co_filename)


@contextmanager
def values_watched() -> Iterator[None]:
    """Inside, who asks a tensor without data for its value gets what the dry run was told of it; in any thread."""
    global _under_way
    with _lock:
        if not _under_way:
            for name in _ASKED:
                _patched.put(Tensor, name, _watched(name, getattr(Tensor, name)))
        _under_way += 1
    try:
        yield
    finally:
        with _lock:
            _under_way -= 1
            if not _under_way:
                _patched.take_back()


def _watched(name: str, original):
    @functools.wraps(original)
    def asked(self, *args, **kwargs):
        dry = executing()
        if dry is None or getattr(self, "_layout", None) is not None or not dry.is_asked(self):
            return original(self, *args, **kwargs)
        told = dry.value(self, name).tolist()
        convert = {"__bool__": bool, "__float__": float, "__int__": int, "__index__": int}.get(name)
        return told if convert is None else convert(told)
    return asked
