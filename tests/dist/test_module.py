# SPDX-License-Identifier: Apache-2.0
"""Distributed cells and deferred parameters on four real ranks; shares the launch of the core cases."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_module", 4))
def test_module(case, ranks):
    ranks.check(case)
