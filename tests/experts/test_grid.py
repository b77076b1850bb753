# SPDX-License-Identifier: Apache-2.0
"""Experts beside every other axis, and peers' faults; on four ranks, and before a merge on eight."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE, COUNTS, FAULTS, DEVICE = (f"tests.experts.cases_{name}" for name in ("grid", "counts", "faults", "device"))


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4) + case_params(FAULTS, 4)
                         + case_params(DEVICE, 4))
def test_grid(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params(MODULE, 8) + case_params(COUNTS, 8))
def test_eight(case, ranks):
    ranks.check(case)
