# SPDX-License-Identifier: Apache-2.0
"""The cases of cases_orphans.py on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_orphans", 4))
def test_orphans(case, ranks):
    ranks.check(case)
