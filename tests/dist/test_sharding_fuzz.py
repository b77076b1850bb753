# SPDX-License-Identifier: Apache-2.0
"""Random data-parallel programs on two real ranks; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_sharding_fuzz", 2))
def test_sharding_fuzz(case, ranks):
    ranks.check(case)
