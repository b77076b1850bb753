# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0 as it is in the package index, on real ranks; `MINDFORMERS_WHEEL` names the folder it was unpacked in.

    pip download --no-deps mindformers==2.1.0 && unzip -d mf mindformers-2.1.0-*.whl && export MINDFORMERS_WHEEL=$PWD/mf
"""
from __future__ import annotations

import ast
import os
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cases import case_params
from tests.test_hyper_parallel import MINDFORMERS

HERE = find_spec("mindformers") is not None or bool(os.environ.get("MINDFORMERS_WHEEL"))
PARTS = ("", "_trainer", "_files", "_parallel", "_router", "_context")
MODULES = tuple(f"tests.third_party.cases_mindformers{part}" for part in PARTS)
CASES = [p for module in MODULES for n in (2, 4) for p in case_params(module, n, group="mindformers")] if HERE else []


@pytest.mark.skipif(not HERE, reason="the wheel is not here: see the top of this file")
@pytest.mark.parametrize("case", CASES)
def test_mindformers(case, ranks):
    ranks.check(case)


@pytest.mark.skipif(not os.environ.get("MINDFORMERS_WHEEL"), reason="the wheel is not here: see the top of this file")
@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in its files
def test_all_that_it_imports_is_in_the_table():
    found = defaultdict(set)
    for file in Path(os.environ["MINDFORMERS_WHEEL"], "mindformers").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hyper_parallel":
                found[node.module.partition(".")[2]] |= {alias.name for alias in node.names}
    listed = {module: set(names.split()) for module, names in MINDFORMERS.items()}
    assert len(found) > 15 and {module: names - listed.get(module, set()) for module, names in found.items()} == {
        module: set() for module in found}
