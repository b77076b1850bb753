# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients on four real ranks; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_buckets", 4))
def test_buckets(case, ranks):
    ranks.check(case)
