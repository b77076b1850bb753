# SPDX-License-Identifier: Apache-2.0
"""The library's doors on four real ranks; one launch with the cases of the same group."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_doors", 4))
def test_doors(case, ranks):
    ranks.check(case)
