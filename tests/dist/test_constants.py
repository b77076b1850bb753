# SPDX-License-Identifier: Apache-2.0
"""Constants that a model makes, on two real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_constants", 2))
def test_constants(case, ranks):
    ranks.check(case)
