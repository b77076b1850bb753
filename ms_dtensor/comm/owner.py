# SPDX-License-Identifier: Apache-2.0
"""Who may communicate for a rank: the process that connected, and one thread of it.

A forked child holds its parent's sockets and memory, and two threads take turns in an order of their own on every rank:
what either sends would be taken for another call. Kinds and shapes of calls are compared between ranks, but equal calls of
two threads are not told apart, so turns cannot be allowed and checked. The invariant: all collectives of a rank are made in
one order, its program's.
"""
from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

from ..errors import CommError

COLLECTIVES = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows", "exchange",
               "broadcast", "scatter", "barrier", "all_gather_object", "broadcast_object")


class Owner:
    """The process that made it, and the first thread that communicates (after its end, the next one).

    Threads that MindSpore made may communicate too: it may run a backward for the thread that waits for it.

    Attributes:
        forked: this process is a child of the one that connected.
    """

    def __init__(self) -> None:
        self.forked = False
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._ident = 0
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _in_child(mine()))

    def check(self, what: str) -> None:
        """Raises if the caller may not make the collective `what`."""
        if threading.get_ident() != self._ident:
            self._claim(what)

    def _claim(self, what: str) -> None:
        if self.forked:
            raise CommError(f"For '{what}', this process is a forked child of the rank's.",
                            f"the rank's process is {self._pid}, this is {os.getpid()}",
                            "A rank is one process: what a child sent would be taken for its parent's next call.",
                            ("communicate in the parent, and hand the child plain arrays",
                             "start the child with multiprocessing's 'spawn', before the mesh is made"))
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):  # not started from Python
            return
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread, self._ident = thread, threading.get_ident()
                return
        raise CommError(f"For '{what}', another thread communicates for this rank.",
                        f"thread '{self._thread.name}' did, this is '{thread.name}'",
                        "Collectives have one order on all ranks, and threads have none.",
                        ("communicate on one thread; let others hand it their work through a queue",
                         "to overlap communication with work, use async_op=True"))


class Owned:
    """A backend from elsewhere whose calls come from the rank's owner only; see `owned`."""


def owned(backend: Any) -> type:
    """`backend`, whose collectives refuse forked children and further threads as those of our own backends do."""
    owner = Owner()

    def checked(name):
        call = getattr(backend, name)

        @functools.wraps(call)
        def collective(self, *args, **kwargs):
            owner.check(name)
            return call(self, *args, **kwargs)
        return collective

    @functools.wraps(backend.close)
    def close(self, reason=""):
        if not owner.forked:
            backend.close(self, reason)
    return type(backend.__name__, (backend, Owned), {
        **{name: checked(name) for name in COLLECTIVES}, "close": close, "__module__": backend.__module__,
        "__doc__": backend.__doc__, "__qualname__": backend.__qualname__})


def _in_child(owner: Owner | None) -> None:
    if owner is not None:
        owner.forked, owner._ident = True, 0
        owner._lock = threading.Lock()  # another thread may have held it
