# SPDX-License-Identifier: Apache-2.0
"""The recipe in stages, on two and on four real ranks."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", [c for kind in ("pipeline", "stages") for c in case_params(f"tests.zoo.cases_{kind}", 2)])
def test_two_ranks(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", [c for kind in ("pipeline", "stages") for c in case_params(f"tests.zoo.cases_{kind}", 4)])
def test_four_ranks(case, ranks):
    ranks.check(case)
