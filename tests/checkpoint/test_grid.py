# SPDX-License-Identifier: Apache-2.0
"""Between jobs of different sizes: two ranks save, one plain process loads and saves, two ranks load, bit for bit.

Within four ranks it is `tests/dist/cases_checkpoint.py`.
"""
import pytest

from tests.checkpoint.programs import load_all, save_all
from tests.msrun import run_ranks

pytestmark = [pytest.mark.usefixtures("cpu"), pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 3, 4)], ids=["two", "four"])
def test_jobs_of_any_number_of_ranks_load_each_others_checkpoints(tmp_path, sizes):
    """In every layout they can have, into each: bit by bit."""
    for size in sizes:
        save_all(tmp_path, 1) if size == 1 else run_ranks("tests.checkpoint.programs", size, ["save", str(tmp_path)])
    for size in sizes:
        told = [load_all(tmp_path, 1)] if size == 1 else sum(
            run_ranks("tests.checkpoint.programs", size, ["load", str(tmp_path)]), [])
        assert len(told) == size
        for pairs in told:
            assert len(pairs) >= 3 and not any(pairs.values()), pairs
