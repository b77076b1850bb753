# SPDX-License-Identifier: Apache-2.0
"""The grid of masks, heads and lengths, bytes of the backward and peers' faults, on two, four and eight real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE = "tests.context.cases_grid"


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4))
def test_grid(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params(MODULE, 8))
def test_eight(case, ranks):
    ranks.check(case)
