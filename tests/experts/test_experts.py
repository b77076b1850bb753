# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, on two, four and eight real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE, RECIPE, COUNTS, EIGHT = (f"tests.experts.cases_{name}" for name in ("experts", "recipe", "counts", "eight"))


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4)
                         + case_params(RECIPE, 4) + case_params(COUNTS, 4))
def test_experts(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params(EIGHT, 8) + case_params(COUNTS, 8))
def test_eight(case, ranks):
    ranks.check(case)
