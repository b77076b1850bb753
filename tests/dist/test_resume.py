# SPDX-License-Identifier: Apache-2.0
"""The recipe resumed on four real ranks; shares a launch. With processes that are killed: tests/zoo/test_llama_resume.py."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_resume", 4))
def test_resume(case, ranks):
    ranks.check(case)
