# SPDX-License-Identifier: Apache-2.0
"""Results that do not depend on what a rank's shard holds; four real ranks, one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_alike", 4))
def test_alike(case, ranks):
    ranks.check(case)
