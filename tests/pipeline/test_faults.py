# SPDX-License-Identifier: Apache-2.0
"""Each kind of fault by name, all of them at once, and what the simulation refuses."""
from __future__ import annotations

from dataclasses import replace

import pytest

from ms_dtensor.errors import ScheduleError
from ms_dtensor.pipeline import Actions, Reduce, check, gpipe, lower, one_f_one_b, simulate

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
