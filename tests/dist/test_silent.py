# SPDX-License-Identifier: Apache-2.0
"""Silent failures that are none here; four real ranks, one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_silent", 4))
def test_silent(case, ranks):
    ranks.check(case)
