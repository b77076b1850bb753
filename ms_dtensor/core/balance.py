# SPDX-License-Identifier: Apache-2.0
"""Which rank gets which tokens of packed documents: as many as its shard has rows, nearly equal work, few keys to send.

Whole documents first, longest first; then the most loaded rank and the least loaded one exchange equal numbers of tokens,
the end of one's run (late tokens see much) for the beginning of the other's. Cutting the list at equal counts is another
start, and of the two results the one that sends less is taken. Integers only and no randomness: every rank computes the same
order, and nothing is sent for it. Cost grows with the number of runs, not of tokens.
"""
from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Run = tuple[int, int, int]  # document, start, stop
_CANDIDATES = 8             # latest ends and earliest beginnings that a swap looks at: all pairs take minutes
_ENOUGH = 1.01              # of the mean: no rank has more work


class Mask(NamedTuple):
    """Which tokens of its document a token sees.

    Attributes:
        causal: itself and those before it; else all.
        window: of these the last so many; None: all.
    """

    causal: bool = True
    window: int | None = None

    def keys(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """The keys that queries [start, stop) of a document of this length see among them all: [first, last)."""
        if not self.causal:
            return 0, length
        return 0 if self.window is None else max(0, start - self.window + 1), stop

    def work(self, start: int, stop: int, length: int) -> int:
        """Pairs of a query of [start, stop) and a key that it sees.

        Example:
            >>> from ms_dtensor.core.balance import Mask
            >>> Mask().work(2, 4, 9), Mask(window=2).work(0, 4, 9), Mask(causal=False).work(2, 4, 9)
            (7, 7, 18)
        """
        if not self.causal:
            return (stop - start) * length
        return self._upto(stop) - self._upto(start)

    def _upto(self, n: int) -> int:
        w = self.window
        return n * (n + 1) // 2 if w is None or n <= w else w * (w + 1) // 2 + (n - w) * w

    def missing(self, runs: Iterable[tuple[int, int]], length: int) -> int:
        """Rows of keys that queries of these runs of one document need beside their own."""
        at = own = need = 0
        for start, stop in sorted(runs):
            lo, hi = self.keys(start, stop, length)
            need += max(hi - max(lo, at), 0)
            at, own = max(at, hi), own + stop - start
        return need - own


def in_a_row(documents: Sequence[int], rooms: Sequence[int]) -> list[list[Run]]:
    """The list as it is, cut where a rank is full."""
    out: list[list[Run]] = [[] for _ in rooms]
    rank, left = 0, list(rooms)
    for d, n in enumerate(documents):
        at = 0
        while at < n:
            while not left[rank]:
                rank += 1
            k = min(n - at, left[rank])
            out[rank].append((d, at, at + k))
            left[rank] -= k
            at += k
    return out


def whole(documents: Sequence[int], rooms: Sequence[int], mask: Mask) -> list[list[Run]]:
    """Longest first, each to the rank with least work that has room; one that fits nowhere is cut."""
    out: list[list[Run]] = [[] for _ in rooms]
    left, load = list(rooms), [0] * len(rooms)
    heap, rest = [(0, r) for r in range(len(rooms))], []

    def give(r: int, d: int, start: int, stop: int) -> None:
        out[r].append((d, start, stop))
        left[r] -= stop - start
        load[r] += mask.work(start, stop, documents[d])
    for d in sorted((d for d, n in enumerate(documents) if n), key=lambda d: (-documents[d], d)):
        n, passed = documents[d], []
        while heap and left[heap[0][1]] < n:
            passed.append(heapq.heappop(heap))
        if heap:
            r = heap[0][1]
            give(r, d, 0, n)
            heapq.heapreplace(heap, (load[r], r))
        else:
            rest.append(d)
        for item in passed:
            heapq.heappush(heap, item)
    for d in rest:
        at = 0
        for r in sorted((r for r in range(len(rooms)) if left[r]), key=lambda r: (-load[r], r)):  # beginnings are cheap
            k = min(documents[d] - at, left[r])
            if k:
                give(r, d, at, at + k)
                at += k
    return out


class _Loads:
    """Runs by rank and document, and each rank's work, while they are exchanged."""

    def __init__(self, runs: list[list[Run]], documents: Sequence[int], mask: Mask):
        self.documents, self.mask = documents, mask
        self.runs: list[dict[int, list[tuple[int, int]]]] = []
        for rank in runs:
            by: dict[int, list[tuple[int, int]]] = {}
            for d, a, b in rank:
                by.setdefault(d, []).append((a, b))
            self.runs.append(by)
        self.work = [sum(mask.work(a, b, documents[d]) for d, a, b in rank) for rank in runs]

    def listed(self, r: int) -> Iterator[Run]:
        return ((d, a, b) for d, pieces in self.runs[r].items() for a, b in pieces)

    def _after(self, r: int, less: Run, more: Run) -> dict[int, list[tuple[int, int]]]:
        """A rank's runs of the documents that an exchange is about; `less` lies at an end of one of them."""
        (d, lo, hi), (e, a, b) = less, more
        out = {x: list(self.runs[r].get(x, ())) for x in (d, e)}
        start, stop = next(p for p in out[d] if p[0] <= lo and hi <= p[1])
        out[d].remove((start, stop))
        out[d] += [p for p in ((start, lo), (hi, stop)) if p[0] < p[1]]
        out[e].append((a, b))
        return out

    def more_rows(self, a: int, b: int, late: Run, early: Run) -> int:
        """Key rows that have to be sent beside those of now, if rank `a` gives `late` for `early` of rank `b`."""
        total = 0
        for r, less, more in ((a, late, early), (b, early, late)):
            for d, pieces in self._after(r, less, more).items():
                total += self.mask.missing(pieces, self.documents[d]) - self.mask.missing(self.runs[r].get(d, ()),
                                                                                         self.documents[d])
        return total

    def exchange(self, a: int, b: int, late: Run, early: Run) -> None:
        for r, less, more in ((a, late, early), (b, early, late)):
            for d, pieces in self._after(r, less, more).items():
                if pieces:
                    self.runs[r][d] = pieces
                else:
                    del self.runs[r][d]
            self.work[r] += self._work(more) - self._work(less)

    def _work(self, run: Run) -> int:
        return self.mask.work(*run[1:], self.documents[run[0]])


def level(runs: list[list[Run]], documents: Sequence[int], mask: Mask) -> list[list[Run]]:
    """Exchanges equal numbers of tokens until the most loaded rank has at most 1.01 of the mean, or nothing helps."""
    loads, n = _Loads(runs, documents, mask), len(runs)
    mean = sum(loads.work) / n
    for _ in range(6 * n):
        a, b = max(range(n), key=loads.work.__getitem__), min(range(n), key=loads.work.__getitem__)
        if loads.work[a] <= _ENOUGH * mean:
            break
        found = _best_exchange(loads, a, b, mean)
        if found is None:
            break
        loads.exchange(a, b, *found)
    return [list(loads.listed(r)) for r in range(n)]


def _best_exchange(loads: _Loads, a: int, b: int, mean: float) -> tuple[Run, Run] | None:
    """Ends of runs of `a` for as long beginnings of runs of `b`, such that one of the two has the mean afterwards.

    Of those that come so far the one after which fewest keys are sent; else the one that comes farthest.
    """
    want = min(loads.work[a] - mean, mean - loads.work[b]) or (loads.work[a] - loads.work[b]) / 2
    far = loads.mask.window or max(loads.documents)
    late = heapq.nsmallest(_CANDIDATES, loads.listed(a), key=lambda x: (-min(x[2], far), x[1] - x[2], x))
    early = heapq.nsmallest(_CANDIDATES, loads.listed(b), key=lambda x: (x[1], x[1] - x[2], x))
    best = None
    for d, start, stop in late:
        for e, first, last in early:
            def gain(k: int, d=d, stop=stop, e=e, first=first) -> int:
                return loads._work((d, stop - k, stop)) - loads._work((e, first, first + k))
            # beyond half the way the runs pass each other, and the gain falls again
            k = min(stop - start, last - first, max(1, (stop - first) // 2))
            if stop <= first or gain(k) <= 0:
                continue
            if gain(k) >= want:
                low = 0
                while k - low > 1:
                    middle = (low + k) // 2
                    low, k = (low, middle) if gain(middle) >= want else (middle, k)
            pair = (d, stop - k, stop), (e, first, first + k)
            key = -min(gain(k), want), loads.more_rows(a, b, *pair)
            if best is None or key < best[0]:
                best = key, pair
    return None if best is None else best[1]


def solve(documents: Sequence[int], rooms: Sequence[int], mask: Mask) -> list[list[Run]]:
    """Runs of each rank, `rooms` tokens in all: the better of two starts; see `balance`."""
    if not mask.causal:  # a token's work is its document's length, wherever it stands: nothing to exchange ends for
        return whole(documents, rooms, mask)

    def score(runs: list[list[Run]]) -> tuple[bool, float]:
        work = [sum(mask.work(a, b, documents[d]) for d, a, b in rank) for rank in runs]
        ratio = max(work) * len(work) / max(sum(work), 1)
        return (True, ratio) if ratio > 2 * _ENOUGH - 1 else (False, sum(rows_missing(r, documents, mask) for r in runs))
    first = level(whole(documents, rooms, mask), documents, mask)
    (bad, most) = score(first)
    if not bad and not most:  # nothing is sent
        return first
    second = level(in_a_row(documents, rooms), documents, mask)
    return second if score(second) < (bad, most) else first


def rows_missing(runs: Iterable[Run], documents: Sequence[int], mask: Mask) -> int:
    """Rows of keys that a rank of these runs needs of others."""
    by: dict[int, list[tuple[int, int]]] = {}
    for d, a, b in runs:
        by.setdefault(d, []).append((a, b))
    return sum(mask.missing(pieces, documents[d]) for d, pieces in by.items())
