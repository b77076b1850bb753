# SPDX-License-Identifier: Apache-2.0
"""Whole models on four real ranks against one device; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.models.cases_models", 4))
def test_models(case, ranks):
    ranks.check(case)
