# SPDX-License-Identifier: Apache-2.0
"""Our optimizers on four real ranks; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_optimizers", 4))
def test_optimizers(case, ranks):
    ranks.check(case)
