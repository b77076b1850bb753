# SPDX-License-Identifier: Apache-2.0
"""Fused attention on two real ranks; shares a launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_attention", 2))
def test_attention(case, ranks):
    ranks.check(case)
