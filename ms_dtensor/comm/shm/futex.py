# SPDX-License-Identifier: Apache-2.0
"""Sleeping until a word of shared memory changes, and waking those who sleep on it: Linux futexes, through ctypes.

One system call wakes all waiters and costs about a microsecond, a third of a socket message. The kernel compares the
word before it puts a caller to sleep, so no wake is ever missed. Not a lock: each word has one writer. Invariant: what a
writer stored before `Word.set` is seen by a reader that has seen the word.
"""
from __future__ import annotations

import ctypes
import platform
import struct
import threading

_NUMBERS = {"x86_64": 202, "amd64": 202, "ppc64le": 221, "s390x": 238}  # others use the kernel's generic table
_machine = platform.machine().lower()
_NUMBER = ctypes.c_long(_NUMBERS.get(_machine, 98))
_WAIT, _WAKE, _EVERYBODY = ctypes.c_int(0), ctypes.c_int(1), ctypes.c_int(0x7FFFFFFF)
_sleep = ctypes.CDLL(None).syscall   # lets other threads run
_wake = ctypes.PyDLL(None).syscall   # too short for that to pay
_fence = None
if _machine not in ("x86_64", "amd64", "s390x"):  # those keep the order of stores and of loads; the others need barriers
    _lock = threading.Lock()
    _lock.acquire()

    def _fence() -> None:
        """A release followed by an acquire: nothing moves across both."""
        _lock.release()
        _lock.acquire()


def duration(seconds: float) -> ctypes.Array:
    """A time in the kernel's form."""
    return ctypes.create_string_buffer(struct.pack("qq", int(seconds), int(seconds % 1 * 1e9)))


class Word:
    """A 32-bit word in shared memory.

    Args:
        words: the memory as 32-bit words.
        base: its address.
        index: which word.
    """

    __slots__ = ("_address", "index", "words")

    def __init__(self, words: memoryview, base: int, index: int):
        self.words, self.index, self._address = words, index, ctypes.c_void_p(base + 4 * index)

    def get(self) -> int:
        """Its value; what was stored before it may be read after."""
        value = self.words[self.index]
        if _fence is not None:
            _fence()
        return value

    def set(self, value: int) -> None:
        """Stores, and wakes everybody who sleeps on the word."""
        if _fence is not None:
            _fence()
        self.words[self.index] = value
        _wake(_NUMBER, self._address, _WAKE, _EVERYBODY)

    def wake(self) -> None:
        """Wakes everybody without a change: look around."""
        _wake(_NUMBER, self._address, _WAKE, _EVERYBODY)

    def sleep(self, value: int, limit: ctypes.Array) -> None:
        """Sleeps while the word has this value, at most `limit`; may return early."""
        _sleep(_NUMBER, self._address, _WAIT, ctypes.c_int(value if value < 0x80000000 else value - 0x100000000), limit)
