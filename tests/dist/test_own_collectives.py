# SPDX-License-Identifier: Apache-2.0
"""A program's own collectives over our groups, on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_own_collectives", 4))
def test_own_collectives(case, ranks):
    ranks.check(case)
