# SPDX-License-Identifier: Apache-2.0
"""Rows by a table, on two and four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE = "tests.context.cases_rows"


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4))
def test_rows(case, ranks):
    ranks.check(case)
