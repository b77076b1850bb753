# SPDX-License-Identifier: Apache-2.0
"""Indexing, in-place ops, views and Python's protocols on four real ranks; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_bypass", 4))
def test_bypass(case, ranks):
    ranks.check(case)
