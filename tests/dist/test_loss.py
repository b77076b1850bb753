# SPDX-License-Identifier: Apache-2.0
"""The parallel loss on four real ranks; shares the launch of the core cases."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_loss", 4))
def test_loss(case, ranks):
    ranks.check(case)
