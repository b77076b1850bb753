# SPDX-License-Identifier: Apache-2.0
"""Asynchronous redistribution on four real ranks; shares a launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_later", 4))
def test_later(case, ranks):
    ranks.check(case)
