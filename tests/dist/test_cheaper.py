# SPDX-License-Identifier: Apache-2.0
"""Calls that need no communication; four real ranks, shares a launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_cheaper", 4))
def test_cheaper(case, ranks):
    ranks.check(case)
