# SPDX-License-Identifier: Apache-2.0
"""The list of what waits is right: every row matches a test, no mark stands elsewhere, and the page is the list."""
import re

import pytest

from tests import tiers
from tests.conftest import COLLECTED, ROOT
from tests.tiers import CHOSEN, LATER, PAGE, Later, page, sampled, tier


def test_the_page_is_the_list():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.tiers"


def test_no_mark_stands_elsewhere():
    marked = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")
              if re.search(r"mark\.(merge|night)\b", path.read_text(encoding="utf-8"))]
    assert not marked, f"{marked}: say in LATER of tests/tiers.py what waits, and why"


def test_each_row_leaves_a_test_out_and_each_word_keeps_one(request):
    names = request.config.stash[COLLECTED]
    if len({name.partition("::")[0] for name in names}) < 150:
        pytest.skip("only a part of the tests was collected")
    for row in LATER:
        found = [name for name in names if row.matches(name)]
        assert any(tier(name) == row.tier for name in found), row
        assert not row.every or any(tier(name) == "push" for name in found), row
        for word in row.keep:
            assert any(word in name for name in found), (row, word)


def test_a_slice_is_the_same_everywhere_and_has_what_is_kept(monkeypatch):
    rows = Later("tests/a.py::test_b[*", "merge", "", 4, ("fault",)), Later("tests/*", "night", "")
    monkeypatch.setattr(tiers, "LATER", rows)
    at = {n: tier(f"tests/a.py::test_b[{n}]") for n in range(400)}
    assert 60 < sum(t == "push" for t in at.values()) < 140 and set(at.values()) == {"push", "merge"}
    assert [n for n in range(12) if at[n] == "push"] == [3, 7, 10]
    assert tier("tests/a.py::test_b[a fault]") == "push"
    assert tier("tests/a.py::test_c") == "night" and tier("elsewhere") == "push"


def test_within_a_test_a_later_tier_takes_all(monkeypatch):
    monkeypatch.setenv(CHOSEN, "push")
    assert sampled(range(10), 4) == [0, 4, 8] and sampled((3,), 2) == [3]
    monkeypatch.setenv(CHOSEN, "merge")
    assert sampled(range(10), 4) == list(range(10))
