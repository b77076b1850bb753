# SPDX-License-Identifier: Apache-2.0
"""Schedules as text: what is written is read back, a bad cell is named, and each kind of fault, all of them at once.

P1: the six schedules are right at every size, and a changed order is named wrong exactly if it is wrong.
"""
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from ms_dtensor.errors import ScheduleError
from ms_dtensor.pipeline import (
    Action,
    Actions,
    Overlap,
    Reduce,
    check,
    dualpipe_v,
    gpipe,
    interleaved,
    lower,
    one_f_one_b,
    simulate,
)
from ms_dtensor.pipeline.builders import BUILDERS
from tests.pipeline.executor import Step, Wrong, run_actions, run_lowered


@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_written_is_read_back(name, tmp_path):
    order = BUILDERS[name](4, 8)
    (tmp_path / "order.csv").write_text(order.csv(), "utf-8")
    assert Actions.load(tmp_path / "order.csv") == order
    assert Actions(order.ranks).owner == order.owner  # guessed from who does what


def test_pytorchs_files_are_read():
    """Waiting times are empty cells there, pairs have a suffix, and lines end as in CSV."""
    order = Actions.parse("0F0,0F1,,3F0,(3F1;0B0)OVERLAP_F_B\r\n1F0,1F1,2F0,,2B0\r\n")
    assert order.ranks[0][3] == Overlap(Action("F", 3, 1), Action("B", 0, 0)) and len(order.ranks[1]) == 4
    assert order.owner == (0, 1, 1, 0) and order.microbatches == 2
    assert Actions.parse("(0F1;0B0)").ranks == Actions.parse("(0F1; 0B0)OVERLAP_F_B").ranks


def test_dualpipe_v_is_pytorchs():
    """The start of rank 0's order and how many actions it has, of 2 ranks and 4 microbatches, as PyTorch prints."""
    cells = dualpipe_v(2, 4).csv().splitlines()[0].replace("OVERLAP_F_B", "").split(",")
    assert cells[:9] == ["0F0", "0F1", "0F2", "3F0", "3I0", "3W0", "3F1", "(0F3;3B1)", "(3F2;0B0)"]
    assert Counter(cell[0] if cell[0] == "(" else cell[1] for cell in cells) == {"F": 5, "I": 3, "W": 3, "B": 2, "(": 3}


@pytest.mark.parametrize("text, said", [
    ("0F0,0X0", "rank 0, place 1: '0X0'"), ("0F0\n1SEND_F0", "rank 1, place 0: '1SEND_F0'"), ("F0", "'F0'"), ("0F", "'0F'"),
    ("-1F0", "'-1F0'"), ("(0B0;0F1)", "'(0B0;0F1)'"), ("(0F0;(0F1;0B0))", "rank 0"), ("0F99999999999", "rank 0"),
    ("", "0 actions"), (",,\n", "0 actions"), ("0F0,0B7", "largest microbatch 7"), ("9F0,0B0", "largest stage is 9")])
def test_what_is_no_schedule_is_refused(text, said):
    with pytest.raises(ScheduleError) as refused:
        Actions.parse(text)
    assert said in str(refused.value) and refused.value.rule and refused.value.fix


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0F0")
    for path in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        with pytest.raises(ScheduleError, match="cannot be read"):
            Actions.load(path)


@pytest.mark.parametrize("arguments", [(4, 6), (4, 2), (0, 1), (2, 0), (2, -2), (2, 2, 0), (2.0, 2)])
def test_sizes_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ScheduleError) as refused:
        interleaved(*arguments)
    assert "For 'interleaved'" in str(refused.value) and refused.value.operands and refused.value.fix


@pytest.mark.parametrize("name", BUILDERS.keys() - {"interleaved"})
def test_the_others_take_any_number_of_microbatches_and_one_rank(name):
    for p, m in ((1, 1), (1, 5), (3, 1), (5, 7)):
        order = BUILDERS[name](p, m)
        assert len(order.ranks) == p and order.microbatches == m
    with pytest.raises(ScheduleError):
        BUILDERS[name](2, 0)


def test_a_text_is_a_grid():
    assert BUILDERS["1f1b"](2, 2).text() == ("place     0    1    2    3\n"
                                             "rank 0  0F0  0F1  0B0  0B1\n"
                                             "rank 1  1F0  1B0  1F1  1B1")


RIGHT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


@pytest.mark.parametrize("text, rank, place, action, said", [
    ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", 0, 3, "0B1", "it is missing"),
    ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", 1, 1, "1F1", "it is missing"),
    ("0F0,0F1,0I0,0B1\n1F0,1B0,1F1,1B1", 0, 3, "0W0", "it is missing"),
    ("0F0,0F1,0W0,0B1\n1F0,1B0,1F1,1B1", 0, 1, "0I0", "it is missing"),
    ("0F0,0F1,0B0,0F1,0B1\n1F0,1B0,1F1,1B1", 0, 3, "0F1", "twice: 0F1 is at rank 0, place 1"),
    ("0F0,0F1,0B0,0W0,0B1\n1F0,1B0,1F1,1B1", 0, 3, "0W0", "twice: 0B0 is at rank 0, place 2"),
    ("0F0,0F1,0I0,0W0,0B0,0B1\n1F0,1B0,1F1,1B1", 0, 4, "0B0", "twice: 0I0 is at rank 0, place 2"),
    ("0F0,0F1,1F1,0B0,0B1\n1F0,1B0,1B1", 0, 2, "1F1", "stage 1 is on rank 1"),
    ("0F0,0F1,0W0,0I0,0B1\n1F0,1B0,1F1,1B1", 0, 2, "0W0", "needs 0B0, which stands after it"),
    ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1", 1, 0, "1B0", "needs 1F0, which stands after it"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", 0, 1, "0B0", "1F1 at rank 1, place 1, waits for 0F1"),
    ("0F0,0B0\n\n1F0,1B0", 1, 0, "nothing", "this rank has no action"),
])
def test_one_fault_is_named_alone(text, rank, place, action, said):
    fault, *others = check(Actions.parse(text))
    assert (fault.rank, fault.place, fault.action) == (rank, place, action) and said in fault.text and not others
    assert str(fault).startswith(f"rank {rank}, place {place}, {action}: ") and f"rank {rank}" in fault.around


def test_all_faults_are_found_at_once():
    """Two circles, an action twice, one on the wrong rank, one missing."""
    order = Actions.parse("0F0,0B0,0F1,0F1,0B1,0F2,0B2\n1F0,1F1,1B0,1B1,1F2,0B3,1B2\n")
    assert [fault.text.split(":")[0] for fault in check(order)] == [
        "twice", "stage 0 is on rank 0", "it is missing", "it is missing", "it is missing", "waits in a circle"]
    two = Actions.parse("0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3")
    assert [(fault.rank, fault.place) for fault in check(two)] == [(0, 1), (0, 5)]


def test_memory_is_bounded_by_rank():
    assert check(one_f_one_b(4, 8), 4) == []
    assert [(f.rank, f.place, f.action) for f in check(one_f_one_b(4, 8), 2)] == [(0, 2, "0F2"), (1, 2, "1F2")]
    assert len(check(gpipe(4, 8), 7)) == 4


def without(lists, rank, text):
    ranks = [[e for e in events if (r, str(e)) != (rank, text)] for r, events in enumerate(lists.ranks)]
    return replace(lists, ranks=tuple(map(tuple, ranks)))


def swapped(lists, rank, one, two):
    ranks = [list(events) for events in lists.ranks]
    texts = list(map(str, ranks[rank]))
    i, j = texts.index(one), texts.index(two)
    ranks[rank][i], ranks[rank][j] = ranks[rank][j], ranks[rank][i]
    return replace(lists, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize("change, said", [
    (lambda x: without(x, 0, "0SEND_F1"), {"rank 0 does not send it"}),
    (lambda x: without(x, 0, "0RECV_B1"), {"rank 0 does not take it", "1B1 is neither made nor received before"}),
    (lambda x: without(x, 1, "1REDUCE_GRAD"), {"it is missing"}),
    (lambda x: swapped(x, 0, "0F1", "0SEND_F1"), {"0F1 is not made before"}),
    (lambda x: swapped(x, 1, "1RECV_F0", "1F0"), {"0F0 is neither made nor received before"}),
    (lambda x: swapped(x, 0, "0SEND_F0", "0SEND_F1"), {"0F1 is not made before",
                                                       "out of order: at this point rank 0 sends 0SEND_F1"}),
    (lambda x: swapped(x, 0, "0B1", "0REDUCE_GRAD"), {"it does not stand after the last gradients of its stage"}),
    (lambda x: replace(x, ranks=(x.ranks[0], (*x.ranks[1], Reduce(1)))), {"twice"}),
    (lambda x: swapped(x, 1, "1SEND_B0", "1RECV_F1"), {
        "sends that end with their receives wait in a circle:\n0SEND_F1 at rank 0, place 3, waits for rank 1;\n"
        "1SEND_B0 at rank 1, place 2, waits for rank 0", "1B0 is not made before"}),
])
def test_messages_are_judged(change, said):
    lists = lower(simulate(Actions.parse(RIGHT)))
    assert check(lists) == []
    assert {fault.text for fault in check(change(lists))} == said


def test_a_circle_is_printed_without_those_who_wait_for_it():
    order = Actions.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1")
    (fault,) = check(order)
    assert fault.text.splitlines() == ["waits in a circle:", "0B0 at rank 0, place 1, waits for 1B0;",
                                       "1F1 at rank 1, place 1, waits for 0F1"]
    assert fault.around.splitlines()[1] == "rank 0  0F0  [0B0]  0F1  0B1"


@pytest.mark.parametrize("text, costs, hop, said", [
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", {}, 0, "waits in a circle"), ("1F0,1B0", {}, 0, "needs 0F0, which nobody makes"),
    (RIGHT, {"X": 1}, 0, "'X': 1"), (RIGHT, {"F": 0}, 0, "'F': 0"), (RIGHT, {"F": float("nan")}, 0, "nan"),
    (RIGHT, {(2, "F"): 1}, 0, "(2, 'F')"), (RIGHT, {}, -1, "hop is -1"), (RIGHT, {}, float("inf"), "hop is inf"),
    (RIGHT, {"F": 1e30, "B": 1e-9}, 0, "ends when it begins")])
def test_what_cannot_be_simulated_is_refused(text, costs, hop, said):
    with pytest.raises(ScheduleError) as refused:
        simulate(Actions.parse(text), costs, hop)
    assert said in str(refused.value) and refused.value.rule and refused.value.fix


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
