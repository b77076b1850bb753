# SPDX-License-Identifier: Apache-2.0
"""A batch as a list of tokens, each with its document and its place in it, and which rank has which of them.

The order is data: ids, labels, places are put in it on the host; the layout is plain `Shard(0)`.
Attention, rotary tables and losses ask for (document, place), never for a row's number. Which keys a rank needs of whom
follows from the order alone. Pure: no MindSpore, no rank of its own. Invariant: the runs of all ranks are the documents,
each token once, and a rank has as many tokens as its shard of the list has rows. How the order is found: `balance.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import ConfigError
from .balance import Mask, Run, in_a_row, rows_missing, solve
from .placements import chunk_bounds

_lay_out: Callable[..., Any] | None = None  # set once, by the layer that knows DTensors: this one must not import upwards


def bind_layout(lay_out: Callable[..., Any]) -> None:
    """Tells this module who makes DTensors for `Tokens.cut`."""
    global _lay_out
    _lay_out = lay_out


@dataclass(frozen=True)
class Tokens:
    """Documents of a packed batch, cut over ranks.

    A value without tensors: recompute and pipelines carry it as they carry a number. With data parallelism each part of the
    batch has one of its own, of as many tokens.

    Attributes:
        documents: their lengths, in tokens; some may be 0.
        runs: of each rank, what it has of them: (document, start, stop), by document and place.
        sizes: tokens of each rank, as `Shard(0)` cuts them over one axis or over several.

    Raises:
        ConfigError: the runs are not the documents, or not as many tokens as a shard has rows.

    Example:
        >>> from ms_dtensor import Tokens
        >>> tokens = Tokens((5, 3), (((0, 0, 1), (1, 0, 3)), ((0, 1, 5),)))
        >>> tokens.index(0).tolist(), tokens.places(1).tolist()
        ([0, 5, 6, 7], [1, 2, 3, 4])
        >>> tokens.work(0), tokens.work(1), tokens.rows_needed(1)
        (7, 14, 1)
    """

    documents: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "documents", tuple(self.documents))
        object.__setattr__(self, "runs", tuple(tuple(tuple(run) for run in rank) for rank in self.runs))
        held: list[Run] = sorted(run for rank in self.runs for run in rank)
        ends = [0] * len(self.documents)
        right = True
        for d, start, stop in held:
            right = right and 0 <= d < len(ends) and start == ends[d] < stop
            if right:
                ends[d] = stop
        if not right or tuple(ends) != self.documents:
            raise ConfigError("For 'Tokens', the runs are not the documents.", f"{len(self.documents)} documents",
                              "Each token of each document is in one run of one rank.", "balance(documents, ranks)")
        for r, mine in enumerate(self.runs):
            if list(mine) != sorted(mine):  # the tables of keys go through them once, from the front
                raise ConfigError("For 'Tokens', the runs of a rank are not by document and place.", f"rank {r}: {mine}",
                                  "A rank has its tokens by document, and those of a document by place.",
                                  f"{tuple(sorted(mine))}, and its rows in this order")
        have = tuple(sum(stop - start for _, start, stop in rank) for rank in self.runs)
        if not self.sizes:
            object.__setattr__(self, "sizes", shard_sizes(sum(have), len(have)))
        if have != self.sizes:
            raise ConfigError("For 'Tokens', ranks do not have as many tokens as a shard has rows.",
                              f"tokens {list(have)}, rows {list(self.sizes)}",
                              "Shard(0) gives each rank as many, and the last ones fewer.", "balance(documents, ranks)")

    def __len__(self) -> int:
        """Tokens in all."""
        return sum(self.documents)

    def __hash__(self) -> int:  # of the fields; kept, as caches ask for it at every call
        kept = self.__dict__.get("_hash")
        if kept is None:
            kept = hash((self.documents, self.runs))
            object.__setattr__(self, "_hash", kept)
        return kept

    @property
    def ranks(self) -> int:
        return len(self.runs)

    def index(self, rank: int | None = None) -> np.ndarray:
        """i64[n]: where the tokens of a rank, or of all ranks one after another, stand in the documents as they came."""
        return self._of(rank)[0]

    def places(self, rank: int | None = None) -> np.ndarray:
        """i32[n]: of the tokens of a rank, or of all, how many of their document are before them."""
        return self._of(rank)[1]

    def _of(self, rank: int | None) -> tuple[np.ndarray, np.ndarray]:
        first = np.cumsum([0, *self.documents])
        runs = [run for r in ((rank,) if rank is not None else range(self.ranks)) for run in self.runs[r]]
        places = [np.arange(a, b, dtype=np.int32) for _, a, b in runs] or [np.zeros(0, np.int32)]
        return np.concatenate([first[d] + p for (d, *_), p in zip(runs, places)] or [np.zeros(0, np.int64)]), \
            np.concatenate(places)

    def restore(self, x: np.ndarray) -> np.ndarray:
        """Rows of all ranks one after another (a `full_tensor`), in the order in which the documents came.

        Example:
            >>> import numpy as np
            >>> from ms_dtensor import balance
            >>> tokens, x = balance((5, 3), 2), np.arange(8)
            >>> tokens.restore(x[tokens.index()]).tolist()
            [0, 1, 2, 3, 4, 5, 6, 7]
        """
        if np.ndim(x) < 1 or len(x) != len(self):
            raise ConfigError(f"For 'Tokens.restore', there are {len(x) if np.ndim(x) else 'no'} rows for {len(self)} "
                              "tokens.", "", "Each token has a row, those of rank 0 first.",
                              "x.full_tensor(), of one part of the batch")
        out = np.empty_like(x)
        out[self.index()] = x
        return out

    def cut(self, *arrays: np.ndarray, mesh: Any, axes: Sequence[str] | str = ("cp",)) -> Any:
        """Host arrays [n, ...] in the order of the documents, as DTensors `[n@axes, ...]` in this order.

        Args:
            arrays: ids, labels, `tokens.places()` of all documents in order; each has a row for each token of this part of
                the batch.
            mesh: all axes of the DTensors; those not in `axes` have copies.
            axes: which cut the list, outermost first. The last of them, whose sizes multiply to the number of ranks, cut
                this part; those before are data parallel, and each of their coordinates passes its own. One that is
                called "ulysses" comes last, and cuts what each of the ranks has.

        Raises:
            ConfigError: another number of rows, or no axes of so many ranks.

        Example:
            >>> import numpy as np, ms_dtensor as md
            >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
            >>> md.in_order((2, 1), 1).cut(np.array([7, 8, 9]), mesh=mesh)
            DTensor(i64[3@cp], mesh=(cp=1), rank 0 holds [3])
        """
        for x in arrays:
            if not isinstance(x, np.ndarray):
                raise ConfigError(f"For 'Tokens.cut', {type(x).__name__} is no NumPy array.", "",
                                  "The batch is cut on the host, before tensors are made of it.", "tensor.asnumpy()")
            if len(x) != len(self):
                raise ConfigError(f"For 'Tokens.cut', an array has {len(x)} rows for {len(self)} tokens.", "",
                                  "There is a row for each token, in the order of the documents.",
                                  "pass what the documents were made of")
        if _lay_out is None:
            raise ConfigError("For 'Tokens.cut', there is no mesh yet.", "", "DTensors lie on a mesh.", "init_device_mesh")
        made = _lay_out(self, arrays, mesh, (axes,) if isinstance(axes, str) else tuple(axes))
        return made[0] if len(made) == 1 else made

    def work(self, rank: int, *, causal: bool = True, window: int | None = None) -> int:
        """Pairs of one of the rank's tokens and a key that it sees."""
        mask = Mask(causal, window)
        return sum(mask.work(a, b, self.documents[d]) for d, a, b in self.runs[rank])

    def rows_needed(self, rank: int, *, causal: bool = True, window: int | None = None) -> int:
        """Keys that the rank's tokens see and that other ranks have."""
        return rows_missing(self.runs[rank], self.documents, Mask(causal, window))

    def explain(self, *, causal: bool = True, window: int | None = None) -> str:
        """Who has what and who gets what, as a table; a digit of the figure is the rank that has this part of a document.

        Example:
            >>> from ms_dtensor import head_tail
            >>> print(head_tail((16,), 2).explain())
            rank  tokens  work     runs  gets
               0       8  1.00x       2     8  of rank 1: 8
               1       8  1.00x       1     4  of rank 0: 4
            <BLANKLINE>
            document 0, 16 tokens  0000111111110000
        """
        how = {"causal": causal, "window": window}
        work = [self.work(r, **how) for r in range(self.ranks)]  # type: ignore[arg-type]
        mean = max(sum(work) / self.ranks, 1)
        lines = ["rank  tokens  work     runs  gets"]
        for r, mine in enumerate(keys_by_rank(self, Mask(causal, window))):
            of = ", ".join(f"rank {s}: {len(rows)}" for s, rows in enumerate(mine.rows) if len(rows) and s != r)
            gets = self.rows_needed(r, causal=causal, window=window)
            lines.append(f"{r:4}  {self.sizes[r]:6}  {work[r] / mean:4.2f}x  {len(self.runs[r]):6}  {gets:4}"
                         + (f"  of {of}" if of else ""))
        lines.append("")
        for d, n in list(enumerate(self.documents))[:16]:
            owner = np.zeros(n, int)
            for r, runs in enumerate(self.runs):
                for e, a, b in runs:
                    if e == d:
                        owner[a:b] = r
            shown = owner[np.linspace(0, n - 1, min(n, 64)).astype(int)] if n else owner
            digits = "0123456789abcdefghijklmnopqrstuvwxyz"
            lines.append(f"document {d}, {n} tokens  " + "".join(digits[r % len(digits)] for r in shown))
        if len(self.documents) > 16:
            lines.append(f"and {len(self.documents) - 16} documents more")
        return "\n".join(lines)


def shard_sizes(n: int, *ranks: int) -> tuple[int, ...]:
    """Rows of each rank of a list cut by `Shard(0)` over axes of so many ranks, outermost first.

    Example:
        >>> from ms_dtensor.core.tokens import shard_sizes
        >>> shard_sizes(5, 4), shard_sizes(5, 2, 2)
        ((2, 2, 1, 0), (2, 1, 1, 1))
    """
    sizes = [n]
    for parts in ranks:
        sizes = [b - a for size in sizes for a, b in chunk_bounds(size, parts)]
    return tuple(sizes)


def _made(documents: Sequence[int], runs: Sequence[Sequence[Run]], sizes: tuple[int, ...]) -> Tokens:
    """Runs by document and place, those that follow each other as one."""
    out = []
    for rank in runs:
        joined: list[Run] = []
        for d, a, b in sorted(rank):
            if joined and joined[-1][0] == d and joined[-1][2] == a:
                joined[-1] = d, joined[-1][1], b
            else:
                joined.append((d, a, b))
        out.append(tuple(joined))
    return Tokens(tuple(documents), tuple(out), sizes)


def _checked(who: str, documents: Sequence[int], ranks: int | Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    parts: tuple[Any, ...] = tuple(ranks) if isinstance(ranks, Iterable) else (ranks,)
    lengths: list[Any] = list(documents) if isinstance(documents, Iterable) else [documents]
    wrong = [n for n in lengths if not isinstance(n, int | np.integer) or n < 0]
    if not isinstance(documents, Iterable):
        wrong = lengths
    if wrong or not parts or not all(isinstance(n, int | np.integer) and n > 0 for n in parts):
        raise ConfigError(f"For '{who}', {list(parts)} ranks cannot have these documents.",
                          f"a length {wrong[0]!r}" if wrong else f"{len(lengths)} documents",
                          "Documents have lengths, and there is a rank.", "lengths in tokens, and the size of the axis")
    return [int(n) for n in lengths], shard_sizes(sum(map(int, lengths)), *map(int, parts))


def balance(documents: Sequence[int], ranks: int | Sequence[int], *, window: int | None = None,
            causal: bool = True) -> Tokens:
    """An order in which all ranks have nearly equal work of attention, as many tokens as a shard has rows, few keys to send.

    Most documents stay whole on one rank; a long one is cut such that early and late tokens meet on a rank. Every rank
    computes the same, on the host; nothing is communicated.

    Args:
        documents: lengths, in tokens.
        ranks: how many; of several axes that cut the list, their sizes.
        window: how many tokens, itself included, a token sees.
        causal: it sees none behind it.

    Example:
        >>> from ms_dtensor import balance
        >>> tokens = balance((90, 40, 30, 20, 20), 2)
        >>> [sum(b - a for _, a, b in runs) for runs in tokens.runs], [tokens.work(r) for r in range(2)]
        ([100, 100], [2905, 2895])
    """
    lengths, sizes = _checked("balance", documents, ranks)
    check_mask("balance", causal, window)
    return _made(lengths, solve(lengths, sizes, Mask(causal, window)), sizes)


def in_order(documents: Sequence[int], ranks: int | Sequence[int]) -> Tokens:
    """The list as it is, cut over the ranks; see `balance`. Late ranks have more work of causal attention.

    Example:
        >>> from ms_dtensor import in_order
        >>> in_order((5, 3), 2).runs
        (((0, 0, 4),), ((0, 4, 5), (1, 0, 3)))
    """
    lengths, sizes = _checked("in_order", documents, ranks)
    return _made(lengths, in_a_row(lengths, sizes), sizes)


def head_tail(documents: Sequence[int], ranks: int | Sequence[int]) -> Tokens:
    """Rank r has the r-th piece from the front of the list and the r-th from its end; see `balance`.

    Equal work for one causal document; of several documents the ranks' work differs as these do.

    Example:
        >>> from ms_dtensor import head_tail
        >>> head_tail((8,), 2).runs
        (((0, 0, 2), (0, 6, 8)), ((0, 2, 6),))
    """
    lengths, sizes = _checked("head_tail", documents, ranks)
    heads = [-(-n // 2) for n in sizes]
    pieces = in_a_row(lengths, [*heads, *(n - h for n, h in zip(reversed(sizes), reversed(heads)))])
    return _made(lengths, [pieces[r] + pieces[-1 - r] for r in range(len(sizes))], sizes)


def check_mask(who: str, causal: bool, window: int | None) -> None:
    """Refuses a window that is none, or one without an order of tokens."""
    if window is not None and (not causal or not isinstance(window, int | np.integer) or window < 1):
        raise ConfigError(f"For '{who}', there is no such mask.", f"causal={causal}, window={window}",
                          "A window is the last tokens before one, and itself.", ("causal=True", "window=None"))


# -- keys --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Keys:
    """What the queries of one rank see.

    Attributes:
        rows: of each rank, which of its rows: i64, by document and place.
        pieces: of each rank, what these rows are: (document, start, stop), in their order.
        spans: of each run of queries, (first, last) of the places of the keys that it sees among them.
        order: i64: of these keys, run by run, where they are among `rows` of rank 0, 1, and so on.
    """

    rows: tuple[np.ndarray, ...]
    pieces: tuple[tuple[Run, ...], ...]
    spans: tuple[tuple[int, int], ...]
    order: np.ndarray


@lru_cache(maxsize=64)
def keys_by_rank(tokens: Tokens, mask: Mask) -> tuple[Keys, ...]:
    """Who needs which keys of whom, the same on every rank; made once for a batch and all its layers."""
    held: list[list[tuple[int, int, int, int]]] = [[] for _ in tokens.documents]  # (start, stop, rank, its first row)
    for r, runs in enumerate(tokens.runs):
        at = 0
        for d, a, b in runs:
            held[d].append((a, b, r, at))
            at += b - a
    for pieces in held:
        pieces.sort()
    return tuple(_keys(tokens, mask, runs, held) for runs in tokens.runs)


def _keys(tokens: Tokens, mask: Mask, runs: tuple[Run, ...], held: list[list[tuple[int, int, int, int]]]) -> Keys:
    spans = tuple(mask.keys(a, b, tokens.documents[d]) for d, a, b in runs)
    rows: list[list[np.ndarray]] = [[] for _ in range(tokens.ranks)]
    found: list[tuple[int, int, int, int, int]] = []  # (document, start, stop, rank, number among what that rank gives)
    count, upto = [0] * tokens.ranks, (-1, 0)
    for (d, *_), (lo, hi) in zip(runs, spans):
        start = max(lo, upto[1]) if upto[0] == d else lo  # runs are sorted: what an earlier one saw is there
        for a, b, r, row in held[d]:
            a, b, row = max(a, start), min(b, hi), row + max(start - a, 0)
            if a < b:
                rows[r].append(np.arange(row, row + b - a))
                found.append((d, a, b, r, count[r]))
                count[r] += b - a
        upto = d, max(hi, upto[1]) if upto[0] == d else hi
    first = np.cumsum([0, *count])
    by: dict[int, list[tuple[int, int, int]]] = {}
    for d, a, b, r, number in found:
        by.setdefault(d, []).append((a, b, int(first[r]) + number))
    order = [np.arange(at + max(lo - a, 0), at + min(hi, b) - a) for (d, *_), (lo, hi) in zip(runs, spans)
             for a, b, at in sorted(by.get(d, ())) if max(lo, a) < min(hi, b)]
    pieces = tuple(tuple((d, a, b) for d, a, b, of, _ in found if of == r) for r in range(tokens.ranks))
    return Keys(tuple(np.concatenate(x) if x else np.zeros(0, np.int64) for x in rows), pieces, spans,
                np.concatenate(order) if order else np.zeros(0, np.int64))
