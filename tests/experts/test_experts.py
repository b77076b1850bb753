# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts, on two and four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE, RECIPE, COUNTS, SHARED = (f"tests.experts.cases_{name}" for name in ("experts", "recipe", "counts", "shared"))


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4)
                         + case_params(RECIPE, 4) + case_params(COUNTS, 4) + case_params(SHARED, 2) + case_params(SHARED, 4))
def test_experts(case, ranks):
    ranks.check(case)
