# SPDX-License-Identifier: Apache-2.0
"""The table of what MindFormers 2.1.0 imports is whole; see `conftest.py` for its wheel."""
import ast
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.compat.test_interop import MINDFORMERS


@pytest.mark.skipif(not os.environ.get("MINDFORMERS_WHEEL"), reason="the wheel is not here: see conftest.py")
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
