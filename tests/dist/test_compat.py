# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's names on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_compat", 4))
def test_compat(case, ranks):
    ranks.check(case)
