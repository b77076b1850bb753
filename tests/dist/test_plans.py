# SPDX-License-Identifier: Apache-2.0
"""Plans and fused projections on four real ranks; shares the launch of the core cases."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", [*case_params("tests.dist.cases_plans", 4),
                                  *case_params("tests.dist.cases_fused", 4)])
def test_plans(case, ranks):
    ranks.check(case)
