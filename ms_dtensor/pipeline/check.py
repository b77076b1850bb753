# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an order, all of it: each fault names rank, place and action and has the cells around it.

Two kinds of order: `Actions`, as people write them, and `Lowered`, with messages, as ranks run them. Messages are judged as
the hardest transport has them: no tags, in order per pair of ranks, and a send ends only with its receive.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .actions import Action, Actions, Overlap, Result, computing, grid
from .order import Lowered, Recv, Reduce, Send, follow, name, walk


@dataclass(frozen=True)
class Fault:
    """Something wrong at a place of an order.

    Args:
        rank: whose list.
        place: where in it; of something missing, where it may belong.
        action: what stands there, or is missing.
        text: what is wrong.
        around: the cells around it.

    Example:
        >>> from ms_dtensor.pipeline import Actions, check
        >>> print(*check(Actions.parse("0F0,0B0\\n1F0,1W0,1I0")))
        rank 1, place 1, 1W0: needs 1B0, which stands after it
          place     0      1    2
          rank 0  0F0    0B0
          rank 1  1F0  [1W0]  1I0
    """

    rank: int
    place: int
    action: str
    text: str
    around: str

    def __str__(self) -> str:
        return f"rank {self.rank}, place {self.place}, {self.action}: " + f"{self.text}\n{self.around}".replace("\n", "\n  ")


BEFORE = {"F": "", "B": "F", "I": "F", "W": "FI"}  # of the same stage and microbatch
Found = Iterator[tuple[int, int, object, str]]  # rank, place, action, what is wrong


def check(order: Actions | Lowered, memory: int | None = None) -> list[Fault]:
    """Lists the faults of an order; none means that it runs to its end and each gradient is made once.

    Args:
        order: actions alone, or with messages.
        memory: how many forwards a rank may hold at once, each from its F to its B or W.

    Example:
        >>> from ms_dtensor.pipeline import Actions, check, one_f_one_b
        >>> check(one_f_one_b(4, 8)), [fault.text for fault in check(one_f_one_b(2, 4), memory=1)]
        ([], ['2 forwards are held at once; 1 may be'])
        >>> print(*check(Actions.parse("0F0,0B0,0F1,0B1\\n1F0,1F1,1B0,1B1")))
        rank 0, place 1, 0B0: waits in a circle:
          0B0 at rank 0, place 1, waits for 1B0;
          1F1 at rank 1, place 1, waits for 0F1
          place     0      1    2    3
          rank 0  0F0  [0B0]  0F1  0B1
          rank 1  1F0    1F1  1B0  1B1
    """
    found = [*_contents(order), *_memory(order, memory)]
    found += [*_local(order), *_reductions(order), *_messages(order)] if isinstance(order, Lowered) else _waiting(order)
    return [Fault(rank, place, str(action), text, grid(order.ranks, rank, place)) for rank, place, action, text in found]


def _contents(order: Actions | Lowered) -> Found:
    """Each forward and each backward once, on the rank of its stage."""
    at: dict[Action, tuple[int, int]] = {}
    for rank, place, action in computing(order.ranks):
        home = order.owner[action.stage]
        if rank != home:
            yield rank, place, action, f"stage {action.stage} is on rank {home}"
        whole = [action._replace(kind=kind) for kind in ("IW" if action.kind == "B" else "B" if action.kind in "IW" else "")]
        for other in (action, *whole):
            if other in at:
                yield rank, place, action, "twice: {} is at rank {}, place {}".format(other, *at[other])
                break
        at.setdefault(action, (rank, place))
    for rank, actions in enumerate(order.ranks):
        if not actions:
            yield rank, 0, "nothing", "this rank has no action"
    count = 1 + max((action.microbatch for action in at), default=-1)
    for stage, rank in enumerate(order.owner):
        for m in range(count):
            has = {kind for kind in "FBIW" if Action(kind, stage, m) in at}
            kinds = {"F"} | (set("IW") if has & set("IW") and "B" not in has else set("B"))
            for kind in sorted(kinds - has):
                near = [place for (k, s, i), (r, place) in at.items() if (r, s) == (rank, stage) and (
                    k == kind and i < m or i == m and k in BEFORE[kind])]
                yield max(rank, 0), max(near, default=-1) + 1, Action(kind, stage, m), "it is missing"


def _memory(order: Actions | Lowered, memory: int | None) -> Found:
    held: list[set[Result]] = [set() for _ in order.ranks]
    told: set[int] = set()
    for rank, place, action in computing(order.ranks):
        if action.kind == "F":
            held[rank].add(action.result)
        elif action.kind != "I":
            held[rank].discard(("F", action.stage, action.microbatch))
        if memory is not None and len(held[rank]) > memory and rank not in told:
            told.add(rank)
            yield rank, place, action, f"{len(held[rank])} forwards are held at once; {memory} may be"


def _waiting(order: Actions) -> Found:
    for rank, place, text in walk(order, lambda action: 1.0)[1]:
        yield rank, place, order.ranks[rank][place], text


def _local(order: Lowered) -> Found:
    """What an action needs or a message takes along is there: made on this rank before, or received before."""
    made = {action.result for _, _, action in computing(order.ranks)}
    for rank, events in enumerate(order.ranks):
        there: set[Result] = set()
        for place, event in enumerate(events):
            if isinstance(event, Recv):
                there.add(event.result)
            elif isinstance(event, Send) and event.result not in there:
                yield rank, place, event, f"{name(event.result)} is not made before"
            elif isinstance(event, Action | Overlap):
                for part in event.parts:
                    for need in part.inputs(len(order.owner)):
                        if need not in there and need in made:
                            yield rank, place, event, f"{name(need)} is neither made nor received before"
                    there.add(part.result)


def _reductions(order: Lowered) -> Found:
    last = {action.stage: (rank, place) for rank, place, action in computing(order.ranks) if action.kind in "BW"}
    seen: set[int] = set()
    for rank, events in enumerate(order.ranks):
        for place, event in enumerate(events):
            if isinstance(event, Reduce):
                if last.get(event.stage, (-1, 0))[0] != rank or last[event.stage][1] > place:
                    yield rank, place, event, "it does not stand after the last gradients of its stage"
                if event.stage in seen:
                    yield rank, place, event, "twice"
                seen.add(event.stage)
    for stage in sorted(last.keys() - seen):
        yield *last[stage], Reduce(stage), "it is missing"


def _messages(order: Lowered) -> Found:
    """Each has its other end, both ends have the same order, and sends that end with their receives wait in no circle."""
    lines: dict[tuple[int, int], tuple[list, list]] = defaultdict(lambda: ([], []))  # sender, receiver -> sends, receives
    for rank, events in enumerate(order.ranks):
        for place, event in enumerate(events):
            if isinstance(event, Send | Recv):
                key = (rank, event.peer) if isinstance(event, Send) else (event.peer, rank)
                lines[key][isinstance(event, Recv)].append((place, event))
    kept: list[list[tuple[int, Send | Recv]]] = [[] for _ in order.ranks]
    for (source, target), ends in sorted(lines.items()):
        paired = Counter(e.result for _, e in ends[0]) & Counter(e.result for _, e in ends[1])
        sides: tuple[list, list] = ([], [])
        for side, rank, other, verb in ((0, source, target, "take"), (1, target, source, "send")):
            left = paired.copy()
            for place, event in ends[side]:
                left[event.result] -= 1
                if left[event.result] >= 0:
                    sides[side].append((place, event))
                    kept[rank].append((place, event))
                else:
                    yield rank, place, event, f"rank {other} does not {verb} it"
        for (_, sent), (place, taken) in zip(*sides):
            if sent.result != taken.result:
                yield target, place, taken, f"out of order: at this point rank {source} sends {sent}"
                break
    yield from _rendezvous([sorted(events, key=lambda pair: pair[0]) for events in kept])


def _rendezvous(queues: Sequence[list[tuple[int, Send | Recv]]]) -> Found:
    at = [0] * len(queues)

    def front(rank: int) -> Send | Recv | None:
        return queues[rank][at[rank]][1] if at[rank] < len(queues[rank]) else None

    while True:
        before = sum(at)
        for rank in range(len(queues)):
            while (mine := front(rank)) and (its := front(mine.peer)) and its.peer == rank and type(its) is not type(mine):
                at[rank] += 1
                at[mine.peer] += 1
        if sum(at) > before:
            continue
        stuck = [rank for rank in range(len(queues)) if front(rank)]
        if not stuck:
            return
        circle = follow(stuck[0], lambda rank: queues[rank][at[rank]][1].peer)
        links = ["{1} at rank {2}, place {0}, waits for rank {1.peer}".format(*queues[r][at[r]], r) for r in circle]
        place, event = queues[circle[0]][at[circle[0]]]
        yield circle[0], place, event, "sends that end with their receives wait in a circle:\n" + ";\n".join(links)
        queues[event.peer].remove(next(pair for pair in queues[event.peer][at[event.peer]:]
                                       if pair[1].peer == circle[0] and type(pair[1]) is not type(event)))
        at[circle[0]] += 1
