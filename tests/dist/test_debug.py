# SPDX-License-Identifier: Apache-2.0
"""What is shown is what was communicated, on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_debug", 2) + case_params("tests.dist.cases_debug", 4))
def test_debug(case, ranks):
    ranks.check(case)
