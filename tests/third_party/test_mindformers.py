# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0 as it is in the package index, on real ranks; `MINDFORMERS_WHEEL` names the folder it was unpacked in.

    pip download --no-deps mindformers==2.1.0 && unzip -d mf mindformers-2.1.0-*.whl && export MINDFORMERS_WHEEL=$PWD/mf
"""
from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests.cases import case_params

HERE = find_spec("mindformers") is not None or bool(os.environ.get("MINDFORMERS_WHEEL"))
MODULES = ("tests.third_party.cases_mindformers", "tests.third_party.cases_mindformers_trainer")
CASES = [p for module in MODULES for n in (2, 4) for p in case_params(module, n, group="mindformers")] if HERE else []


@pytest.mark.skipif(not HERE, reason="the wheel is not here: see the top of this file")
@pytest.mark.parametrize("case", CASES)
def test_mindformers(case, ranks):
    ranks.check(case)
