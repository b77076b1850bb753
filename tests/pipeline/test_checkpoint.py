# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pipelines on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.pipeline.cases_checkpoint", 4))
def test_checkpoint(case, ranks):
    ranks.check(case)
