# SPDX-License-Identifier: Apache-2.0
"""Own ops at their edges, on four real ranks; shares the launch of the core cases."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_own_ops", 4))
def test_own_ops(case, ranks):
    ranks.check(case)
