# SPDX-License-Identifier: Apache-2.0
"""Every refusal on four real ranks; shares the launch of the core cases."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_refusals", 4))
def test_refusals(case, ranks):
    ranks.check(case)
