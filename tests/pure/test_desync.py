# SPDX-License-Identifier: Apache-2.0
"""Who is blamed for a desync, from the calls alone, and by backends that do not see one by themselves; ranks are threads."""
import threading

import pytest

from ms_dtensor.comm.agree import Agreement, check_every
from ms_dtensor.comm.shm.deadlock import circle, reached
from ms_dtensor.comm.shm.desync import odd_ranks
from ms_dtensor.errors import CollectiveMismatch, ConfigError
from tests.msrun import PATIENCE

WORLD = " over ranks (0, 1, 2, 3)"


def test_the_minority_is_odd():
    calls = [(0, "a" + WORLD), (1, "a" + WORLD), (2, "b" + WORLD), (3, "a" + WORLD)]
    assert odd_ranks(calls, calls) == ("a" + WORLD, [2])


def test_of_two_ranks_none_is_blamed():
    calls = [(0, "a over ranks (0, 1)"), (1, "b over ranks (0, 1)")]
    assert odd_ranks(calls, [*calls, (0, "b over ranks (0, 1)")])[1] == []


def test_other_groups_break_a_tie():
    calls = [(0, "a over ranks (0, 1)"), (1, "b over ranks (0, 1)")]
    assert odd_ranks(calls, [*calls, (2, "b over ranks (2, 3)"), (3, "")]) == ("b over ranks (0, 1)", [0])


def test_a_group_across_the_others_is_odd():
    """Rank 1 reduces over its column where all others reduce over their row; 2 and 3 have gone on."""
    row = "sum over ranks "
    calls = [(0, row + "(0, 1)"), (1, row + "(1, 3)"), (2, "barrier" + WORLD), (3, "barrier" + WORLD)]
    others = [*calls, (2, row + "(2, 3)"), (3, row + "(2, 3)")]
    assert odd_ranks(calls, others, keys={0, 1, 3})[1] == [1]


class Waiting:
    """A segment as `circle` sees it."""

    def __init__(self, *conditions, words=(0, 0, 0)):
        self.words, self.conditions, self.number = list(words), list(conditions), 1

    def waits(self):
        return self.number, self.conditions


def test_circles_are_found_and_those_who_close_them():
    ring = {0: Waiting((1, 0, 1)), 1: Waiting((2, 0, 1)), 2: Waiting((0, 0, 1)), 3: Waiting((0, 0, 1))}
    assert circle(0, ring) == ({0, 1, 2}, {0, 1, 2})
    assert circle(3, ring)[0] == set()  # it waits for the circle, and is no part of it
    two = {0: Waiting((1, 0, 1), (2, 0, 1)), 1: Waiting((0, 0, 1)), 2: Waiting((0, 0, 1))}
    assert circle(0, two) == ({0, 1, 2}, {0})
    ring[1].words[0] = 1  # what rank 0 waits for has come; it has not woken up yet
    assert circle(0, ring) == (set(), set())


def test_who_moves_meanwhile_is_in_no_circle():
    class Moving(Waiting):
        def waits(self):
            self.number += 1
            return self.number, self.conditions
    assert circle(0, {0: Waiting((1, 0, 1)), 1: Moving((0, 0, 1))})[0] == set()


def test_a_word_that_comes_between_two_looks_is_no_circle():
    """Rank 0 ends the meeting that rank 1 sleeps in, and waits for it at the next, after rank 1 has been looked at.

    Rank 1 has not woken up and published nothing new: eight ranks on two busy cores were told that their calls differed.
    """
    class GoesOn(Waiting):
        def waits(self):
            self.words[0] = 1
            return super().waits()
    assert circle(1, {0: GoesOn((1, 0, 1)), 1: Waiting((0, 0, 1))}) == (set(), set())


def test_counters_wrap_around():
    assert reached(3, 0xFFFFFFFE) and not reached(0xFFFFFFFE, 3)


# -- backends that do not see a desync by themselves; ranks are threads ------------------------------------------------
def run(programs, every):
    """What each rank's check raised, and how many checksums were gathered."""
    n = len(programs)
    meet, boxes, raised, gathered = threading.Barrier(n, timeout=PATIENCE), [None] * n, [None] * n, []

    def rank(r):
        def gather(value, group):
            boxes[r] = value if isinstance(value, int) else list(value)  # as a message: a copy
            meet.wait()
            got = list(boxes)
            if r == 0 and isinstance(value, int):
                gathered.append(value)
            meet.wait()
            return got
        agreement = Agreement(every, gather, gather)
        try:
            for what, about in programs[r]:
                agreement.call(what, about, tuple(range(n)))
        except CollectiveMismatch as e:
            raised[r] = e
    threads = [threading.Thread(target=rank, args=(r,)) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return raised, len(gathered)


def test_ranks_that_agree_exchange_one_number_every_k_th_call():
    calls = [("all_reduce", f"sum Float32[{i}]") for i in range(12)]
    for every, wanted in ((1, 12), (4, 3), (5, 2), (0, 0)):
        raised, gathered = run([calls] * 3, every)
        assert raised == [None] * 3 and gathered == wanted


@pytest.mark.parametrize("every", [1, 2, 4])
def test_the_first_call_that_differs_is_named_on_every_rank(every):
    usual = [("all_reduce", f"sum Float32[{i}]") for i in range(8)]
    odd = [*usual[:5], ("all_gather", "Float32[3]"), *usual[6:]]
    raised, _ = run([usual, usual, odd], every)
    for e in raised:
        text = str(e)
        assert "rank(s) 2 made another call" in text and "rank 2: all_gather Float32[3]" in text, text
        assert "rank 0: all_reduce sum Float32[5]" in text and text.count("test_desync.py:") == 3


def test_how_often_comes_from_the_environment(monkeypatch):
    assert check_every(64) == 64
    monkeypatch.setenv("MS_DTENSOR_CHECK_EVERY", "7")
    assert check_every(64) == 7
    monkeypatch.setenv("MS_DTENSOR_CHECK_EVERY", "often")
    with pytest.raises(ConfigError, match="no number of collectives"):
        check_every(1)
