# SPDX-License-Identifier: Apache-2.0
"""When each action of a schedule runs, and the one order of all actions and messages that follows from it.

`simulate` plays the lists with given costs. `lower` sorts actions and messages by those times into one order of everything;
each rank keeps its part. The earliest event that is not done can therefore always run, so such lists cannot wait in a
circle, even if a send ends only with its receive, and both ends of a pair agree on the order of its messages. Times only
choose the order: any costs give a right one.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ScheduleError
from .actions import Action, Actions, Overlap, Result, computing, grid

Costs = Mapping[str | tuple[int, str], float]


class Slot(NamedTuple):
    """An action and when it runs.

    Example:
        >>> Slot(Action("F", 0, 0), 0.0, 1.0).end
        1.0
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with times, of a simulation or of a run: what pictures are drawn from.

    Args:
        actions: the schedule.
        slots: what each rank computes and when, pairs taken apart.

    Example:
        >>> from ms_dtensor.pipeline import one_f_one_b, simulate, zbv
        >>> simulate(one_f_one_b(8, 16)).span, simulate(zbv(8, 16)).span
        (69.0, 51.5)
        >>> simulate(one_f_one_b(2, 2)).costs
        {(0, 'F'): 1.0, (0, 'B'): 2.0, (1, 'F'): 1.0, (1, 'B'): 2.0}
        >>> simulate(zbv(2, 4)).idle, simulate(zbv(2, 4)).local_idle, simulate(zbv(2, 4)).held
        ((0.5, 0.5), (0.0, 0.0), (4, 4))
    """

    actions: Actions
    slots: tuple[tuple[Slot, ...], ...]

    @property
    def span(self) -> float:
        """From the first start of any rank to the last end."""
        return self._end - min(rank[0].start for rank in self.slots if rank)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank does nothing within the span."""
        return tuple(self.span - sum(slot.end - slot.start for slot in rank) for rank in self.slots)

    @property
    def local_idle(self) -> tuple[float, ...]:
        """How long each rank does nothing between its own first action and its last."""
        return tuple(rank[-1].end - rank[0].start - sum(slot.end - slot.start for slot in rank) if rank else 0.0
                     for rank in self.slots)

    @property
    def costs(self) -> dict[str | tuple[int, str], float]:
        """What actions of a stage and kind take on average, as `simulate` takes it."""
        times: dict[str | tuple[int, str], list[float]] = {}
        for rank in self.slots:
            for slot in rank:
                times.setdefault((slot.action.stage, slot.action.kind), []).append(slot.end - slot.start)
        return {key: sum(some) / len(some) for key, some in times.items()}

    @property
    def held(self) -> tuple[int, ...]:
        """The most forwards that a rank holds at once, each till the gradients of its weights: what papers call memory."""
        return self._most("F", "BW")

    @property
    def held_forwards(self) -> tuple[int, ...]:
        """The most forwards at once whose input gradient is not there yet."""
        return self._most("F", "BI")

    @property
    def held_products(self) -> tuple[int, ...]:
        """The most backwards at once that wait for their weight part."""
        return self._most("I", "W")

    @property
    def _end(self) -> float:
        return max(rank[-1].end for rank in self.slots if rank)

    def _most(self, more: str, less: str) -> tuple[int, ...]:
        most = []
        for rank in self.slots:
            count = largest = 0
            for slot in rank:
                count += (slot.action.kind in more) - (slot.action.kind in less)
                largest = max(largest, count)
            most.append(largest)
        return tuple(most)


def simulate(actions: Actions, costs: Costs | None = None, hop: float = 0.0) -> Timeline:
    """Plays a schedule: each action begins when its rank is free and its inputs are there.

    Args:
        actions: the schedule.
        costs: time of F, I, W and B (by default I + W) of all stages of a rank together for one microbatch, of which each of
            v stages takes 1/v; or of one stage, `(stage, kind)`, as it is. F, I and W are 1 unless given.
        hop: time of a message between ranks.

    Returns:
        Starts and ends of all actions.

    Raises:
        ScheduleError: ranks wait for each other in a circle, an input is made by nobody, or a cost is no positive number.

    Example:
        >>> from ms_dtensor.pipeline import gpipe, simulate
        >>> simulate(gpipe(4, 8)).span, simulate(gpipe(4, 8), {"F": 2, (3, "F"): 2.5}, hop=0.5).span
        (33.0, 51.0)
    """
    length = _length(actions, costs or {})
    if not (math.isfinite(hop) and hop >= 0):
        raise ScheduleError(f"For 'simulate', hop is {hop!r}.", "", "A message takes 0 or more.", "hop=0.0")
    slots, circles, lacking = walk(actions, length, hop)
    if circles or lacking:
        rank, place, text = (circles or lacking)[0]
        where = f"{actions.ranks[rank][place]} at rank {rank}, place {place}, {text}\n{grid(actions.ranks, rank, place)}"
        raise ScheduleError("For 'simulate', the schedule cannot run to its end.", where,
                            "An action runs after all before it in its list, and after those whose results it needs.",
                            "check(actions) lists all faults")
    return Timeline(actions, slots)


def _length(actions: Actions, costs: Costs) -> Callable[[Action], float]:
    known = {*"FBIW", *((stage, kind) for stage in range(len(actions.owner)) for kind in "FBIW")}
    wrong = [f"{key!r}: {x!r}" for key, x in costs.items() if key not in known or not (math.isfinite(x) and x > 0)]
    if wrong:
        raise ScheduleError("For 'simulate', costs are not as they must be.", ", ".join(wrong[:8]),
                            "A cost is a positive number, of 'F', 'B', 'I' or 'W', or of a stage's, as (0, 'F').",
                            "costs={'F': 1, 'I': 1, 'W': 1}")

    def cost(stage: int, kind: str) -> float:
        if (stage, kind) in costs:
            return costs[stage, kind]
        if kind == "B" and "B" not in costs:
            return cost(stage, "I") + cost(stage, "W")
        return costs.get(kind, 1.0) / actions.owner.count(actions.owner[stage])
    table = {(stage, kind): float(cost(stage, kind)) for stage in range(len(actions.owner)) for kind in "FBIW"}
    return lambda action: table[action.stage, action.kind]


Place = tuple[int, int, str]  # rank, place in its list, what is wrong there


def walk(actions: Actions, length: Callable[[Action], float], hop: float = 0.0
         ) -> tuple[tuple[tuple[Slot, ...], ...], list[Place], list[Place]]:
    """Runs what can run. Where nothing can, names the circle and lets one of its actions pass, so that all are found.

    Returns:
        Times; circles; actions with an input that nobody makes (which counts as there).
    """
    every, stages = list(computing(actions.ranks)), len(actions.owner)
    maker: dict[Result, int] = {}
    for rank, _, action in every:
        maker.setdefault(action.result, rank)
    todo: list[list[tuple[int, Action, list[Result]]]] = [[] for _ in actions.ranks]
    circles: list[Place] = []
    lacking: list[Place] = []
    for rank, place, action in every:
        needs = action.inputs(stages)
        todo[rank].append((place, action, [need for need in needs if need in maker]))
        lacking += [(rank, place, f"needs {name(need)}, which nobody makes") for need in needs if need not in maker]
    done: dict[Result, float] = {}
    at, clock = [0] * len(todo), [0.0] * len(todo)
    slots: list[list[Slot]] = [[] for _ in todo]

    def run(rank: int) -> None:
        _, action, needs = todo[rank][at[rank]]
        start = max([clock[rank], *(done[need] + hop * (maker[need] != rank) for need in needs if need in done)])
        clock[rank] = end = start + length(action)
        if not end > start:
            raise ScheduleError(f"For 'simulate', {action} on rank {rank} ends when it begins, at {start!r}.", "",
                                "Costs may not differ so much that small ones are lost in a sum.", "costs of one scale")
        slots[rank].append(Slot(action, start, end))
        done.setdefault(action.result, end)
        at[rank] += 1

    def lacks(rank: int) -> Result:
        return next(need for need in todo[rank][at[rank]][2] if need not in done)

    while True:
        before = sum(at)
        for rank, actions_left in enumerate(todo):
            while at[rank] < len(actions_left) and all(need in done for need in actions_left[at[rank]][2]):
                run(rank)
        stuck = [rank for rank, actions_left in enumerate(todo) if at[rank] < len(actions_left)]
        if not stuck:
            return tuple(map(tuple, slots)), circles, lacking
        if sum(at) == before:
            circle = follow(stuck[0], lambda rank: maker[lacks(rank)])
            links = []
            for r in circle:
                place, action, _ = todo[r][at[r]]
                links.append(f"{action} at rank {r}, place {place}, waits for {name(lacks(r))}")
            circles.append((circle[0], todo[circle[0]][at[circle[0]]][0], "waits in a circle:\n" + ";\n".join(links)
                            if len(circle) > 1 else f"needs {name(lacks(circle[0]))}, which stands after it"))
            run(circle[0])


def name(result: Result) -> str:
    """A result by the action that makes it."""
    kind, stage, microbatch = result
    return f"{stage}{kind}{microbatch}"


def follow(first: int, peer: Callable[[int], int]) -> list[int]:
    """The circle that is met when each rank points at another, smallest rank first.

    Example:
        >>> follow(0, {0: 2, 2: 3, 3: 2}.__getitem__)
        [2, 3]
    """
    path = [first]
    while (following := peer(path[-1])) not in path:
        path.append(following)
    circle = path[path.index(following):]
    least = circle.index(min(circle))
    return circle[least:] + circle[:least]


# -- messages ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Message:
    peer: int
    what: str
    stage: int
    microbatch: int


class Send(_Message):
    """A stage's result goes to another rank.

    Args:
        peer: the rank that takes it.
        what: `F`, the activation, or `B`, the gradient of the stage's input.
        stage: the stage that made it.
        microbatch: of which microbatch.

    Example:
        >>> str(Send(1, "F", 0, 3))
        '0SEND_F3'
    """

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.what}{self.microbatch}"

    @property
    def result(self) -> Result:
        return self.what, self.stage, self.microbatch


class Recv(_Message):
    """The other end: the stage is the one that needs it.

    Args:
        peer: the rank that sends.
        what: `F`, the activation of the stage before, or `B`, the gradient of the stage after.
        stage: the stage that needs it.
        microbatch: of which microbatch.

    Example:
        >>> str(Recv(0, "F", 1, 3)), Recv(0, "F", 1, 3).result == Send(1, "F", 0, 3).result
        ('1RECV_F3', True)
    """

    def __str__(self) -> str:
        return f"{self.stage}RECV_{self.what}{self.microbatch}"

    @property
    def result(self) -> Result:
        return self.what, self.stage + (1 if self.what == "B" else -1), self.microbatch


@dataclass(frozen=True)
class Reduce:
    """All gradients of a stage's weights are there, and may be reduced over data-parallel ranks.

    Example:
        >>> str(Reduce(2))
        '2REDUCE_GRAD'
    """

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"


@dataclass(frozen=True)
class Lowered:
    """What each rank does, messages and reductions included; texts as PyTorch has them.

    Args:
        ranks: the events of each rank.
        owner: the rank of each stage.

    Example:
        >>> from ms_dtensor.pipeline import gpipe, lower, simulate
        >>> print(lower(simulate(gpipe(2, 1))).text())
        place          0         1         2         3             4
        rank 0       0F0  0SEND_F0  0RECV_B0       0B0  0REDUCE_GRAD
        rank 1  1RECV_F0       1F0       1B0  1SEND_B0  1REDUCE_GRAD
    """

    ranks: tuple[tuple[Action | Overlap | Send | Recv | Reduce, ...], ...]
    owner: tuple[int, ...]

    def text(self) -> str:
        """A grid: a row per rank, a column per place in the list."""
        return grid(self.ranks)


def lower(timeline: Timeline) -> Lowered:
    """Puts messages and reductions among the actions: each where its result is made, on both ranks, in one order.

    Args:
        timeline: a simulated schedule in which `check` finds no fault.

    Example:
        >>> from ms_dtensor.pipeline import check, lower, simulate, zbv
        >>> check(lower(simulate(zbv(4, 8))))
        []
    """
    owner, stages = timeline.actions.owner, len(timeline.actions.owner)
    events: list[tuple[float, int, int, Sequence[tuple[int, Action | Send | Recv | Reduce]]]] = []
    last: dict[int, tuple[float, int]] = {}  # stage -> end of its last gradients, rank
    for rank, slots in enumerate(timeline.slots):
        for action, start, end in slots:
            events.append((start, 2, rank, [(rank, action)]))
            what, stage, microbatch = action.result
            if action.kind in "BW":
                last[stage] = max(last.get(stage, (0.0, 0)), (end, rank))
            to = stage + 1 if what == "F" else stage - 1
            if what != "W" and 0 <= to < stages and owner[to] != rank:
                events.append((end, 0, rank, [(rank, Send(owner[to], what, stage, microbatch)),
                                              (owner[to], Recv(rank, what, to, microbatch))]))
    events += [(end, 1, rank, [(rank, Reduce(stage))]) for stage, (end, rank) in last.items()]
    lists: list[list] = [[] for _ in timeline.slots]
    for *_, ends in sorted(events, key=lambda event: event[:3]):
        for rank, event in ends:
            lists[rank].append(event)
    return Lowered(tuple(map(tuple, lists)), owner)
