# SPDX-License-Identifier: Apache-2.0
"""Who is blamed for a desync, from the calls alone."""
from __future__ import annotations

from ms_dtensor.comm.shm.deadlock import circle, reached
from ms_dtensor.comm.shm.desync import odd_ranks

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
