# SPDX-License-Identifier: Apache-2.0
"""The blocks of pages that speak of several ranks, run as they stand."""
from __future__ import annotations

import re
from pathlib import Path

from tests.cases import case

DOCS = Path(__file__).resolve().parents[2] / "docs"


@case(world_size=4, timeout=120)
def training_with_mindspore(world):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "training_with_mindspore.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 9
    names: dict = {"__name__": __name__}  # MindSpore asks functions for their module
    for block in blocks:
        exec(compile(block, "training_with_mindspore.md", "exec"), names)
    assert 0 < float(names["loss"]) < 3
