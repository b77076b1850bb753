# SPDX-License-Identifier: Apache-2.0
"""A slice of the table of docs/mindspore_surface.md: every row in one column, and the page says what the rows say.

All cells: `docs/tools/mindspore_surface.py`, which takes some minutes and writes the page.
"""
from __future__ import annotations

import pytest

from tests.surface.launch import run_table
from tests.surface.page import NAMES, PAGE, page, unexplained
from tests.surface.table import SLICE, Plain, Row, all_rows, differs, run

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    return run_table(SLICE, folder=tmp_path_factory.mktemp("surface"))


@pytest.mark.timeout(1800)
def test_every_cell_is_equal_or_refused_for_a_stated_reason(cells):
    wrong = unexplained(cells)
    assert not wrong, "\n\n".join(f"{c['group']}: {c['name']} [{c['column']}] {c['state']}\n{c['text']}" for c in wrong)
    assert len(cells) == len(all_rows()) > 62  # at least 250 cells in all


def test_the_page_is_todays():
    assert PAGE.read_text(encoding="utf-8") == page(), "run docs/tools/mindspore_surface.py"
    refused = sum(row.reason(column) is not None for row in all_rows() for column in NAMES)
    assert refused * 10 <= len(all_rows()) * len(NAMES)


def test_a_cell_can_be_wrong():
    row = Row("group", "name", lambda s: 1.0)
    assert run(row, Plain(), 1.0)["state"] == "equal"
    assert run(row, Plain(), 1.001)["state"] == "wrong" and run(row, Plain(), [1.0])["state"] == "wrong"
    assert run(Row("group", "name", lambda s: 1 / 0), Plain(), 1.0)["state"] == "raw"
    assert differs({"a": 1.0}, {"b": 1.0}, 0) and differs(float("nan"), 1.0, 0) and not differs("x", "x", 0)
