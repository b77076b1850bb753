# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own gradients, hooks, training cells and loss scalers on four real ranks; shares a launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", [*case_params("tests.dist.cases_surface", 4),
                                  *case_params("tests.dist.cases_training", 4),
                                  *case_params("tests.dist.cases_hooks", 4)])
def test_surface(case, ranks):
    ranks.check(case)
