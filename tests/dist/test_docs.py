# SPDX-License-Identifier: Apache-2.0
"""Blocks of the documentation on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_docs", 4))
def test_docs(case, ranks):
    ranks.check(case)
