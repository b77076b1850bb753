# SPDX-License-Identifier: Apache-2.0
"""What people from outside ran into, on four real ranks; shares a launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_outsiders", 4))
def test_outsiders(case, ranks):
    ranks.check(case)
