# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring of the package runs and prints what it says."""
from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import ms_dtensor

SKIP = {"ms_dtensor.__main__"}
MODULES = sorted(m.name for m in pkgutil.walk_packages(ms_dtensor.__path__, "ms_dtensor.") if m.name not in SKIP)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, cpu):
    result = doctest.testmod(importlib.import_module(name),
                             optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0
