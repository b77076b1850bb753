# SPDX-License-Identifier: Apache-2.0
"""The ported meaning of PyTorch's tests on four real ranks; docs/parity_behaviours.md says which is which."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULES = ("cases_parity_tensor", "cases_parity_moves", "cases_parity_parallel")


@pytest.mark.parametrize("case", [p for m in MODULES for p in case_params(f"tests.dist.{m}", 4)])
def test_parity(case, ranks):
    ranks.check(case)
