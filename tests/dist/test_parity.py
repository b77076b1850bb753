# SPDX-License-Identifier: Apache-2.0
"""The ported meaning of PyTorch's tests on four real ranks; docs/parity_behaviours.md says which is which."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_parity_tensor", 4, group="dist4"))
def test_tensor(case, ranks):
    ranks.check(case)
