# SPDX-License-Identifier: Apache-2.0
"""Runs orders on symbols, independently of the library's checks: what does not raise `Wrong` is right.

Ranks run their lists from front to back. Messages have no tags; a send ends only with its receive, and a receive blocks.
What arrives is a symbol of what was computed, so that an activation in the place of another is noticed when it is used.
"""
from collections import Counter

from ms_dtensor.pipeline import Action, Actions, Lowered, Overlap, Recv, Reduce, Send


class Wrong(Exception):
    """The order cannot run, or computes something else."""


class Step:
    """One training step of a model with so many stages and microbatches; `owner` says which rank has a stage's weights."""

    def __init__(self, owner: tuple[int, ...], microbatches: int, memory: int | None = None):
        self.owner, self.microbatches, self.memory = owner, microbatches, memory
        ranks = 1 + max(owner)
        self.have: list[dict] = [{} for _ in range(ranks)]  # of each rank: what was made there or has arrived
        self.held: list[set] = [set() for _ in range(ranks)]
        self.peak = [0] * ranks
        self.gradients: Counter = Counter()  # of weights, by stage and microbatch
        self.reduced: Counter = Counter()

    def take(self, rank: int, what: str, stage: int, m: int) -> None:
        if self.have[rank].get((what, stage, m)) != (what, stage, m):
            raise Wrong(f"rank {rank} has not {what} of stage {stage}, microbatch {m}")

    def compute(self, rank: int, action: Action) -> None:
        kind, s, m = action
        if self.owner[s] != rank or (s, m) in self.held[rank] and kind == "F":
            raise Wrong(f"{action} on rank {rank}")
        if kind == "F":
            if s:
                self.take(rank, "F", s - 1, m)
            self.have[rank]["F", s, m] = "F", s, m
            self.held[rank].add((s, m))
        if kind in "BI":
            self.take(rank, "F", s, m)
            if s < len(self.owner) - 1:
                self.take(rank, "B", s + 1, m)
            if ("B", s, m) in self.have[rank]:
                raise Wrong(f"{action} again")
            self.have[rank]["B", s, m] = "B", s, m
        if kind == "W":
            self.take(rank, "B", s, m)
        if kind in "BW":
            self.gradients[s, m] += 1
            self.held[rank].discard((s, m))
        self.peak[rank] = max(self.peak[rank], len(self.held[rank]))
        if self.memory is not None and self.peak[rank] > self.memory:
            raise Wrong(f"rank {rank} holds {self.peak[rank]}")

    def reduce(self, rank: int, stage: int) -> None:
        if self.owner[stage] != rank or any(self.gradients[stage, m] != 1 for m in range(self.microbatches)):
            raise Wrong(f"stage {stage} is reduced too early")
        self.reduced[stage] += 1

    def finish(self) -> None:
        every = {(s, m) for s in range(len(self.owner)) for m in range(self.microbatches)}
        if self.gradients != Counter(every) or any(self.held):
            raise Wrong("not each gradient was made once")


def run_actions(order: Actions, step: Step) -> Step:
    """Results travel by themselves, at once and under their names: what an order of actions alone means."""
    lists = [[part for action in rank for part in action.parts] for rank in order.ranks]
    at, last = [0] * len(lists), len(step.owner) - 1
    step.have = [{}] * len(step.have)  # one for all

    def ready(a: Action) -> bool:
        needs = {"F": [("F", a.stage - 1)] * (a.stage > 0), "W": [("B", a.stage)]}.get(
            a.kind, [("F", a.stage), ("B", a.stage + 1)][:1 + (a.stage < last)])
        return all((what, s, a.microbatch) in step.have[0] for what, s in needs)
    before = -1
    while sum(at) > before:
        before = sum(at)
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions) and ready(actions[at[rank]]):
                step.compute(rank, actions[at[rank]])
                at[rank] += 1
    if any(i < len(actions) for i, actions in zip(at, lists)):
        raise Wrong("stuck")
    step.finish()
    return step


def run_lowered(order: Lowered, step: Step) -> Step:
    """Blocking receives, sends that wait for them, no tags."""
    at = [0] * len(order.ranks)

    def front(rank: int):
        return order.ranks[rank][at[rank]] if 0 <= rank < len(at) and at[rank] < len(order.ranks[rank]) else None

    def advance(rank: int) -> bool:
        event = front(rank)
        if isinstance(event, Action | Overlap):
            for part in event.parts:
                step.compute(rank, part)
        elif isinstance(event, Reduce):
            step.reduce(rank, event.stage)
        elif isinstance(event, Send) and isinstance(other := front(event.peer), Recv) and other.peer == rank:
            key = event.what, event.stage, event.microbatch
            step.take(rank, *key)
            taken_for = other.what, other.stage + (1 if other.what == "B" else -1), other.microbatch
            step.have[event.peer][taken_for] = key
            at[event.peer] += 1
        else:
            return False
        at[rank] += 1
        return True
    while any([advance(rank) for rank in range(len(at))]):
        pass
    if any(front(rank) is not None for rank in range(len(at))):
        raise Wrong("stuck")
    if step.reduced != Counter(range(len(step.owner))):
        raise Wrong("not each stage was reduced once")
    step.finish()
    return step
