# SPDX-License-Identifier: Apache-2.0
"""The cases of cases_parity_more.py on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_parity_more", 4))
def test_parity_more(case, ranks):
    ranks.check(case)
