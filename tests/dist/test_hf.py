# SPDX-License-Identifier: Apache-2.0
"""Published weights on four real ranks; shares a launch. Models of `transformers`: tests/checkpoint/test_hf_ranks.py."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_hf", 4))
def test_hf(case, ranks):
    ranks.check(case)
