# SPDX-License-Identifier: Apache-2.0
"""Derivatives of derivatives on four real ranks; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_second_order", 4))
def test_second_order(case, ranks):
    ranks.check(case)
