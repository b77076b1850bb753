# SPDX-License-Identifier: Apache-2.0
"""Types of local code on two and four real ranks; shares the launches of the other cases."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE = "tests.dist.cases_types"


@pytest.mark.parametrize("case", case_params(MODULE, 2) + case_params(MODULE, 4))
def test_types(case, ranks):
    ranks.check(case)
