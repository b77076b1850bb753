# SPDX-License-Identifier: Apache-2.0
"""The recipe with its tokens cut over cp, on two and four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE = "tests.context.cases_recipe"


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4))
def test_recipe(case, ranks):
    ranks.check(case)
