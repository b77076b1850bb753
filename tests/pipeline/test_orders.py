# SPDX-License-Identifier: Apache-2.0
"""P1: the six schedules are right at every size, and a changed order is named wrong exactly if it is wrong."""
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from ms_dtensor.pipeline import Action, Overlap, check, lower, simulate
from ms_dtensor.pipeline.builders import BUILDERS
from tests.pipeline.executor import Step, Wrong, run_actions, run_lowered


def sizes(name: str, p: int) -> list[int]:
    return [m for m in range(1, 4 * p + 1) if name != "interleaved" or m % p == 0]


def parts(ranks) -> list[list[Action]]:
    return [[part for a in rank if isinstance(a, Action | Overlap) for part in a.parts] for rank in ranks]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_is_right_at_every_size(name):
    for p in (2, 4, 8):
        for m in sizes(name, p) if p < 8 else {1, 7, 8, 16} & set(sizes(name, 8)):
            is_sound(name, p, m)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_every_schedule_of_eight_ranks_is_right_at_every_size(name):
    for m in sizes(name, 8):
        is_sound(name, 8, m)


def is_sound(name, p, m):
    order = BUILDERS[name](p, m)
    assert check(order) == []
    timeline = simulate(order)
    lists = lower(timeline)
    assert check(lists, max(timeline.held)) == [] and parts(lists.ranks) == parts(order.ranks)  # no computation moves
    assert tuple(run_lowered(lists, Step(order.owner, m)).peak) == timeline.held


@pytest.mark.parametrize("name", BUILDERS)
def test_unequal_costs_and_slow_messages_give_a_right_order_too(name):
    rng = random.Random(3)
    order = BUILDERS[name](4, 8)
    for _ in range(10):
        costs = {(s, kind): rng.choice((0.3, 1.0, 7.7)) for s in range(len(order.owner)) for kind in "FBIW"}
        lists = lower(simulate(order, costs, hop=rng.choice((0.0, 0.1, 5.0))))
        assert check(lists) == []
        run_lowered(lists, Step(order.owner, 8))


NOTHING_THERE = ("it is missing", "this rank has no action")


# -- changed orders --------------------------------------------------------------------------------------------------------
def swap(rng, lists):
    full = [rank for rank in lists if len(rank) > 1]
    rank = rng.choice(full)
    i = rng.randrange(len(rank) - 1)
    j = i + 1 if rng.random() < 0.7 else rng.randrange(len(rank))
    rank[i], rank[j] = rank[j], rank[i]


def drop(rng, lists):
    rank = rng.choice([rank for rank in lists if rank])
    del rank[rng.randrange(len(rank))]


def move(rng, lists):
    rank = rng.choice([rank for rank in lists if rank])
    event = rank.pop(rng.randrange(len(rank)))
    to = rank if rng.random() < 0.8 else rng.choice(lists)
    to.insert(rng.randrange(len(to) + 1), event)


def is_right(run, order, step) -> bool:
    try:
        run(order, step)
    except Wrong:
        return False
    return True


@cache
def made(name, p, m):
    order = BUILDERS[name](p, m)
    timeline = simulate(order)
    return order, lower(timeline), max(timeline.held)


def judged(name, p, m, rng, change) -> tuple[str, str]:
    """Changes the actions, and the lists with messages; both verdicts must be those of an execution."""
    order, messages, memory = made(name, p, m)
    verdicts = []
    for run, before in ((run_actions, order), (run_lowered, messages)):
        lists = [list(rank) for rank in before.ranks]
        change(rng, lists)
        changed = replace(before, ranks=tuple(map(tuple, lists)))
        faults = check(changed, memory)
        right = is_right(run, changed, Step(order.owner, m, memory))
        assert right == (not faults), (name, p, m, change.__name__, lists, [str(f) for f in faults])
        if run is run_actions and not faults:
            run_lowered(lower(simulate(changed)), Step(order.owner, m, memory))
        for fault in faults:
            assert fault.action in fault.around.partition("[")[2].partition("]")[0] or fault.text in NOTHING_THERE
        verdicts.append("right" if right else "wrong")
    return verdicts[0], verdicts[1]


def judge(name, p, count):
    rng = random.Random(f"{name} {p}")
    seen: Counter = Counter()
    for change in (swap, drop, move):
        for _ in range(count):
            one, two = judged(name, p, rng.choice(sizes(name, p)), rng, change)
            seen.update([("actions", one), ("lists", two)])
    assert min(seen.values()) > 5 and len(seen) == 4, seen  # both verdicts were met, of both kinds of order


@pytest.mark.parametrize("name", BUILDERS)
def test_a_changed_order_of_two_ranks_is_judged_as_it_runs(name):
    judge(name, 2, 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("p", (4, 8))
@pytest.mark.parametrize("name", BUILDERS)
def test_a_changed_order_of_many_ranks_is_judged_as_it_runs(name, p):
    judge(name, p, 200)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("p", (2, 4, 8))
@pytest.mark.parametrize("name", BUILDERS)
def test_changed_orders_of_every_size(name, p):
    rng = random.Random(1)
    for m in sizes(name, p):
        for change in (swap, drop, move):
            for _ in range(200):
                judged(name, p, m, rng, change)
