# SPDX-License-Identifier: Apache-2.0
"""All ranks of the job agree, or raise one error: none goes on alone, and none waits for one that has failed.

What a rank meets (a full disk, a damaged file) is told to all before anybody acts on it. Invariant: between two exchanges
here, no rank leaves by an exception.
"""
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import comm
from ..comm.group import Group
from ..errors import CheckpointError
from ..internals.target import target

T = TypeVar("T")


def all_ranks() -> Group | None:
    """All ranks of the job, None if there is one only. Starts the world of a job that msrun launched."""
    world = comm.current_world()
    if world is None and os.environ.get("MS_ROLE"):
        world = comm.start(target().lower())
    return None if world is None or world.size == 1 else comm.group(tuple(range(world.size)))


def rank_of(group: Group | None) -> int:
    """This process's rank in the job."""
    return 0 if group is None else group.rank_index


def gathered(group: Group | None, mine: Any) -> list[Any]:
    """Every rank's object, in order of ranks."""
    return [mine] if group is None else group.all_gather_object(mine)


def together(group: Group | None, what: str, work: Callable[[], T]) -> T:
    """What `work` returns on this rank, after it has succeeded on all.

    Args:
        group: all ranks.
        what: the function that the user called, for messages.
        work: runs on each rank; communicates nothing, or among ranks on all of which it then fails or none.

    Raises:
        CheckpointError: on all ranks the same, where it fails on any; names the ranks.
    """
    result, error = attempted(work)
    raise_together(group, what, error)
    return result  # type: ignore[return-value]


def alike(group: Group | None, tables: Sequence[Mapping[str, str]]) -> bool:
    """Whether all ranks tell the same."""
    told_here = repr([sorted(table.items()) for table in tables]).encode(errors="backslashreplace")
    return len(set(gathered(group, hashlib.blake2b(told_here, digest_size=16).hexdigest()))) == 1


def unlike(group: Group | None, table: Mapping[str, str]) -> dict[str, str]:
    """What the ranks do not tell alike, as lines by key; the same on all of them."""
    if alike(group, [table]):
        return {}
    tables = gathered(group, dict(table))
    keys = [key for key in sorted(set().union(*tables)) if len({t.get(key) for t in tables}) > 1]
    ranks = (0,) if group is None else group.ranks
    return {key: f"'{key}': " + "; ".join(f"rank {rank} {t.get(key, 'has none')}" for rank, t in zip(ranks, tables[:4]))
            for key in keys}


def folder_of(path: Any, who: str) -> Path:
    """The path that the user gave."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"For '{who}', 'path' is {path!r}.", "", "It is a text or a pathlib.Path.",
                              (f"{who}(state, 'run')", "'.' means the folder that the program runs in"))
    return Path(text)


def attempted(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What some work returns, and what it raises."""
    try:
        return work(), None
    except Exception as e:  # of whatever kind: the other ranks wait to be told
        return None, e


def told(error: Exception) -> list:
    """An error as it is sent: its four parts."""
    if isinstance(error, CheckpointError):
        return [error.attempt, error.operands, error.rule, list(error.fix)]
    return [f"{type(error).__name__}: {error}", "", "", []]


def raise_together(group: Group | None, what: str, error: Exception | None) -> None:
    """Raises what has failed on any rank, on all of them; alone, the error itself."""
    if group is not None:
        raise_for_all(what, group.all_gather_object(None if error is None else told(error)))
    elif error is not None:
        raise error


def raise_for_all(what: str, errors: list[list | None]) -> None:
    """Raises what ranks have told, if any has; `errors` is the same on all ranks."""
    bad = {rank: e for rank, e in enumerate(errors) if e is not None}
    if not bad:
        return
    first = next(iter(bad.values()))
    if len(bad) == len(errors) and all(e == first for e in bad.values()):
        raise CheckpointError(*first)
    lines = [f"rank {rank}: {e[0]}" + "".join(f"\n  {line}" for line in e[1].splitlines()) for rank, e in bad.items()]
    more = f"\nand {len(lines) - 4} ranks more" if len(lines) > 4 else ""
    raise CheckpointError(f"For '{what}', {len(bad)} of {len(errors)} ranks failed, the first is rank {min(bad)}.",
                          "\n".join(lines[:4]) + more, first[2] or "All ranks succeed, or none.", first[3])
