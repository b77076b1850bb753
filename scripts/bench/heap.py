# SPDX-License-Identifier: Apache-2.0
"""What tensors take in a real process, counted where they get their memory: `heap.c` loaded before it, and the shared arena.

It knows nothing of dry runs, rules or ops, so it can judge them. The invariant: bytes that were asked for count, from when a
piece is handed out until it is given back; what kernels and compilers ask for themselves does not.
"""
from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import zlib
from pathlib import Path

SOURCE = Path(__file__).parent / "heap.c"


def built() -> Path:
    """The library of `heap.c`; the environment of a process to be measured has `LD_PRELOAD` with it."""
    out = Path(tempfile.gettempdir()) / f"ms_dtensor_heap_{zlib.crc32(SOURCE.read_bytes()):08x}.so"
    if not out.exists():
        own = f"{out}.{os.getpid()}"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", own, str(SOURCE), "-ldl", "-lpthread"], check=True)
        os.replace(own, out)
    return out


class Heap:
    """Of this process, which was started with `LD_PRELOAD`."""

    def __init__(self) -> None:
        self._own = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._own.heap_now.restype = self._own.heap_most.restype = ctypes.c_long
        self._own.heap_begins.argtypes = ctypes.c_long, ctypes.c_long
        self._own.heap_ends.argtypes = ctypes.c_long,
        self._watch_arena()

    def now(self) -> int:
        """Bytes at this time."""
        return self._own.heap_now()

    def most(self) -> int:
        """The most at one time since `again`."""
        return self._own.heap_most()

    def again(self) -> None:
        """From here on."""
        self._own.heap_again()

    def _watch_arena(self) -> None:
        """Results of collectives lie in shared memory, in blocks that the library hands out."""
        from ms_dtensor.comm.shm import arena
        given, begins, ends = arena.Arena.array, self._own.heap_begins, self._own.heap_ends
        back = arena._Block.__del__

        def array(of, shape, dtype, nbytes, again=False):
            out, offset = given(of, shape, dtype, nbytes, again)
            begins(out.ctypes.data, nbytes)
            return out, offset

        def gone(block):
            ends(block.__array_interface__["data"][0])
            back(block)
        arena.Arena.array, arena._Block.__del__ = array, gone  # type: ignore[method-assign]
