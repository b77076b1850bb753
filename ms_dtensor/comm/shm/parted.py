# SPDX-License-Identifier: Apache-2.0
"""Collectives of many tensors at once that are never packed: pieces go from where they are to where they are wanted.

What `fully_shard` needs: to gather parameters into memory in which they lie as whole tensors, and to reduce whole gradients
to each member's pieces. Packing and unpacking would read and write all of it three times more. Invariants as `engine`'s;
windows are written by others during a collective only.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..parts import Parts
from ..protocol import dtype_text
from .engine import _ALIGN, Engine, Ranks, _up
from .reduce import reduce_into
from .segment import CHUNK
from .state import GroupState
from .window import Window


def _runs(pieces: Sequence[np.ndarray], start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """What lies in [start, stop) of flat arrays one behind another, and where in that range."""
    at = 0
    for piece in pieces:
        a, b = max(start - at, 0), min(stop - at, piece.size)
        if a < b:
            yield at + a - start, piece[a:b]
        at += piece.size
        if at >= stop:
            return


class PartedEngine(Engine):
    """One rank of a shared-memory world; see `Engine`."""

    def window(self, nbytes: int) -> Window:
        """Memory for `all_gather_into`."""
        return Window(self._memory, nbytes)

    def all_gather_into(self, pieces: Sequence[np.ndarray], window: Window, parts: Parts, dtype: np.dtype, ranks: Ranks,
                        async_op: bool = False) -> Any:
        """The members' pieces, cast to a dtype, put together as whole tensors in everybody's window."""
        window.claim()
        offset: Any = window.offset

        def body(g: GroupState, check: int) -> None:
            g.show_result(offset)
            self._signals.sync(g, "all_gather", check)
            for i in (*range(g.index, g.size), *range(g.index)):  # everybody begins elsewhere
                memory, start = (window, 0) if i == g.index else (g.members[i].map, g.result_of(i))
                for t, piece in enumerate(pieces):
                    if piece.size:
                        at = start + parts.starts[t] * dtype.itemsize
                        whole: np.ndarray = np.ndarray(parts.shapes[t], dtype, memory, at)
                        whole[parts.index(t, g.index)] = piece
                        self.sent += piece.size * dtype.itemsize * (i != g.index)
            self._signals.sync(g, "all_gather")
        totals = tuple(parts.totals)
        return self._do("all_gather", ("all_gather_into", dtype, totals), lambda: f"{dtype_text(dtype)} sizes={totals}",
                        ranks, window, body, async_op)

    def reduce_scatter_from(self, wholes: dict[int, np.ndarray], parts: Parts, op: str, ranks: Ranks) -> np.ndarray:
        """The reduction of all members' tensors of some numbers, of one dtype: this member's pieces one behind another."""
        me, numbers = ranks.index(self.rank), tuple(wholes)
        dtype = next(iter(wholes.values())).dtype
        pieces = [[np.ascontiguousarray(x[parts.index(i, r)]).reshape(-1) for i, x in wholes.items()]
                  for r in range(len(ranks))]
        totals = tuple(parts.total(numbers, r) for r in range(len(ranks)))
        out = np.empty(totals[me], dtype)
        stride = min(_up(max(totals) * dtype.itemsize), CHUNK // len(ranks) // _ALIGN * _ALIGN)
        step = stride // dtype.itemsize

        def body(g: GroupState, check: int) -> None:
            for number, start in enumerate(range(0, max(max(totals), 1), step)):
                for i, total in enumerate(totals):
                    count = min(total - start, step)
                    if i != me and count > 0:
                        target = self._parts(g, count, dtype, i * stride, number & 1)[me]
                        for at, run in _runs(pieces[i], start, start + count):
                            target[at:at + run.size] = run
                self._signals.sync(g, "reduce_scatter", check if number == 0 else None)
                count = min(totals[me] - start, step)
                if count > 0:
                    views = self._parts(g, count, dtype, me * stride, number & 1)
                    for at, run in _runs(pieces[me], start, start + count):
                        given = [run if v is views[me] else v[at:at + run.size] for v in views]
                        reduce_into([out[start + at:start + at + run.size]], op, given)
                    self.sent += count * dtype.itemsize * (g.size - 1)
            self._signals.sync(g, "reduce_scatter")  # all groups share the area: leave it when all have read
        return self._do("reduce_scatter", ("reduce_scatter_from", op, dtype, totals, numbers),
                        lambda: f"{op} {dtype_text(dtype)} sizes={totals}", ranks, out, body)
