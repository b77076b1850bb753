# SPDX-License-Identifier: Apache-2.0
"""The page says what the rows of the table say, each has a name of its own, and a cell can be wrong."""
from tests.surface.cases_rows import NAMED
from tests.surface.page import NAMES, PAGE, page
from tests.surface.table import Plain, Row, all_rows, differs, run


def test_the_page_is_todays():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.surface.page"
    refused = sum(row.reason(column) is not None for row in all_rows() for column in NAMES)
    assert refused * 10 <= len(all_rows()) * len(NAMES) and len(all_rows()) == len(NAMED)


def test_a_cell_can_be_wrong():
    row = Row("group", "name", lambda s: 1.0)
    assert run(row, Plain(), 1.0)["state"] == "equal"
    assert run(row, Plain(), 1.001)["state"] == "wrong" and run(row, Plain(), [1.0])["state"] == "wrong"
    assert run(Row("group", "name", lambda s: 1 / 0), Plain(), 1.0)["state"] == "raw"
    assert differs({"a": 1.0}, {"b": 1.0}, 0) and differs(float("nan"), 1.0, 0) and not differs("x", "x", 0)
