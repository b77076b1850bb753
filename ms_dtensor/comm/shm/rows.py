# SPDX-License-Identifier: Apache-2.0
"""Rows from every member to every member, in numbers of which each member knows only its own.

Each writes a table of what it gives and expects in front of its slot, and behind it the pieces that fit; one meeting; each
reads its pieces. What does not fit is written straight into the receiver's result, and then they meet again: both ends of a
piece know its size, so they agree how it goes, and the tables tell all whether anybody has to. Invariant: numbers that do
not fit are refused by all members alike, from the tables, before any result is touched.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import CollectiveMismatch
from ..protocol import kind, offsets
from .engine import Ranks, _up
from .parted import PartedEngine
from .segment import SLOT
from .signals import GroupState


class RowsEngine(PartedEngine):
    """One rank of a shared-memory world; see `Engine`."""

    def all_to_all_rows(self, x: np.ndarray, send_sizes: Sequence[int], recv_sizes: Sequence[int], ranks: Ranks,
                        async_op: bool = False) -> Any:
        """See `Backend.all_to_all_rows`."""
        n, me, rest, row = len(ranks), ranks.index(self.rank), x.shape[1:], math.prod(x.shape[1:])
        front = _up(16 * n)
        room = (SLOT - front) // n // 64 * 64  # of a piece in the slot
        given, taken = offsets(send_sizes), offsets(recv_sizes)
        far = [j != me and recv_sizes[j] * row * x.itemsize > room for j in range(n)]
        out, place = self._result((taken[-1], *rest), x.dtype, any(far))
        numbers = np.array([send_sizes, recv_sizes], np.int64)

        def body(g: GroupState, check: int) -> None:
            slots, table = g.slots(), g.members[me].view(g.slots()[me], 2 * n, numbers.dtype)
            table[...] = numbers.reshape(-1)
            for j in range(n):
                piece = x[given[j]:given[j + 1]]
                if j != me and 0 < piece.nbytes <= room:
                    g.members[me].view(slots[me] + front + j * room, piece.size, x.dtype).reshape(piece.shape)[...] = piece
            g.show_result(place)
            self._signals.sync(g, "all_to_all_rows", check)
            tables = [g.members[i].view(slots[i], 2 * n, numbers.dtype).reshape(2, n) for i in range(n)]
            sends, recvs = (np.stack([t[k] for t in tables]) for k in (0, 1))
            _check(sends, recvs, ranks)
            for j in range(n):
                target = out[taken[j]:taken[j + 1]]
                if j == me:
                    target[...] = x[given[me]:given[me + 1]]
                elif target.size and not far[j]:
                    view = g.members[j].view(slots[j] + front + me * room, target.size, x.dtype)
                    target[...] = view.reshape(target.shape)
                    self.sent += target.nbytes
            np.fill_diagonal(sends, 0)
            if sends.max() * row * x.itemsize <= room:
                return
            for j in (*range(me + 1, n), *range(me)):  # everybody begins elsewhere
                piece = x[given[j]:given[j + 1]]
                if piece.nbytes > room:
                    before = int(recvs[j, :me].sum())
                    whole: np.ndarray = np.ndarray((int(recvs[j].sum()), *rest), x.dtype, g.members[j].map, g.result_of(j))
                    whole[before:before + piece.shape[0]] = piece
                    self.sent += piece.nbytes
            self._signals.sync(g, "all_to_all_rows")
        return self._do("all_to_all_rows", ("all_to_all_rows", x.dtype, rest), lambda: kind(x, 0), ranks, out, body,
                        async_op)


def _check(sends: np.ndarray, recvs: np.ndarray, ranks: Ranks) -> None:
    """Refuses tables that do not fit; all members have met once and read the same ones, so they may go on."""
    odd = np.argwhere(sends != recvs.T)
    if len(odd):
        error = CollectiveMismatch(
            f"For 'all_to_all_rows', ranks disagree about {len(odd)} of {sends.size} pieces.",
            "\n".join(f"rank {ranks[i]} gives rank {ranks[j]} {sends[i, j]} rows, which expects {recvs[j, i]}"
                      for i, j in odd[:8].tolist()),
            "What one member sends another is what that one receives: both sides read one table.",
            "make the sizes from what every rank knows, or exchange them first")
        error.in_step = True
        raise error
