# SPDX-License-Identifier: Apache-2.0
"""Styles, data parallelism and the parallel loss on four real ranks; shares the launch of test_core."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", [*case_params("tests.dist.cases_styles", 4), *case_params("tests.dist.cases_overlapped", 4),
                                  *case_params("tests.dist.cases_overlapped", 2)])
def test_styles(case, ranks):
    ranks.check(case)
