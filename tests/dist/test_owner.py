# SPDX-License-Identifier: Apache-2.0
"""Small bfloat16 tensors, threads and children on four real ranks; in the launch of `test_core`."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_owner", 4))
def test_owner(case, ranks):
    ranks.check(case)
