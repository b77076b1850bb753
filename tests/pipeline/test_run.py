# SPDX-License-Identifier: Apache-2.0
"""Pipelines that run, on real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", [c for kind in ("run", "parts", "trace", "more")
                                  for c in case_params(f"tests.pipeline.cases_{kind}", 2)])
def test_two_ranks(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", [c for kind in ("run", "parts") for c in case_params(f"tests.pipeline.cases_{kind}", 4)])
def test_four_ranks(case, ranks):
    ranks.check(case)
