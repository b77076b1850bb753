# SPDX-License-Identifier: Apache-2.0
"""Between jobs of different sizes: two ranks save, one plain process loads and saves, two ranks load, bit for bit.

All of the grid is `python -m tests.long.check_checkpoints grid`; within four ranks it is `tests/dist/cases_checkpoint.py`.
"""
from __future__ import annotations

import pytest

from tests.checkpoint.programs import load_all, save_all
from tests.msrun import run_ranks

pytestmark = [pytest.mark.usefixtures("cpu"), pytest.mark.dist, pytest.mark.timeout(400)]


def test_two_ranks_and_one_process_load_each_others_checkpoints(tmp_path):
    run_ranks("tests.checkpoint.programs", 2, ["save", str(tmp_path)])
    save_all(tmp_path, 1)
    found = load_all(tmp_path, 1)
    assert list(found) == ["1 -> 1", "fsdp=2 -> 1", "tp=2 -> 1"] and not any(found.values()), found
    for (told,) in run_ranks("tests.checkpoint.programs", 2, ["load", str(tmp_path)]):
        assert len(told) == 6 and not any(told.values()), told
