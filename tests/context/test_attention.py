# SPDX-License-Identifier: Apache-2.0
"""Attention of a list that ranks share, on two and four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE = "tests.context.cases_attention"


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4))
def test_attention(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params(MODULE, 8))
def test_eight(case, ranks):
    ranks.check(case)
