# SPDX-License-Identifier: Apache-2.0
"""mindcv as it is in the package index, on two real ranks."""
from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.cases import case_params


@pytest.mark.skipif(find_spec("mindcv") is None, reason="mindcv is not installed: pip install '.[third_party]'")
@pytest.mark.parametrize("case", case_params("tests.third_party.cases_mindcv", 2))
def test_mindcv(case, ranks):
    ranks.check(case)
