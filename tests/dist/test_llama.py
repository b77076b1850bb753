# SPDX-License-Identifier: Apache-2.0
"""The recipe's model with other families' options on four real ranks; shares a launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_llama", 4))
def test_llama(case, ranks):
    ranks.check(case)
