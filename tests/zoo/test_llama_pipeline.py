# SPDX-License-Identifier: Apache-2.0
"""The recipe in stages, on two and on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.zoo.cases_pipeline", 2))
def test_two_ranks(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.zoo.cases_pipeline", 4))
def test_four_ranks(case, ranks):
    ranks.check(case)
