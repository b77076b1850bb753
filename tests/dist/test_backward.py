# SPDX-License-Identifier: Apache-2.0
"""Gradients that are kept in `.grad`; two real ranks, one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_backward", 2))
def test_backward(case, ranks):
    ranks.check(case)
