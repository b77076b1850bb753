# SPDX-License-Identifier: Apache-2.0
"""The device's branch over the strict emulator, on two and on four real ranks; a launch each."""
from __future__ import annotations

import pytest

from tests.cases import case_params

MODULE = "tests.dist.cases_rehearsal"


@pytest.mark.parametrize("case", [*case_params(MODULE, 2), *case_params(MODULE, 4)])
def test_rehearsal(case, ranks):
    ranks.check(case)
