# SPDX-License-Identifier: Apache-2.0
"""Schedules as text: what is written is read back, PyTorch's files are read, and a bad cell is named."""
from __future__ import annotations

from collections import Counter

import pytest

from ms_dtensor.errors import ScheduleError
from ms_dtensor.pipeline import Action, Actions, Overlap, dualpipe_v, interleaved
from ms_dtensor.pipeline.builders import BUILDERS


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
