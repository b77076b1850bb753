# SPDX-License-Identifier: Apache-2.0
"""Steps that ranks leave by an exception, on real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.pipeline.cases_errors", 2))
def test_two_ranks(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.pipeline.cases_errors", 4))
def test_four_ranks(case, ranks):
    ranks.check(case)
