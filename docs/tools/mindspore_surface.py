# SPDX-License-Identifier: Apache-2.0
"""MindSpore's training surface on every kind of mesh against one device; writes docs/mindspore_surface.md.

    python docs/tools/mindspore_surface.py                     everything; the page
    python docs/tools/mindspore_surface.py --only "amp"        rows whose group or name contains the text; JSON only
    python docs/tools/mindspore_surface.py --columns "fsdp;tp" these columns; JSON only

Prints JSON; fails on a cell that is neither equal nor refused for a stated reason.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.surface.launch import run_table  # noqa: E402
from tests.surface.page import PAGE, page, unexplained  # noqa: E402


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--columns", default="")
    options = parser.parse_args()
    cells = run_table(options.only, columns=options.columns)
    wrong = unexplained(cells)
    if not (options.only or options.columns or wrong):
        PAGE.write_text(page(), encoding="utf-8")
    states: dict[str, int] = {}
    for cell in cells:
        states[cell["state"]] = states.get(cell["state"], 0) + 1
    print(json.dumps({"cells": len(cells), **states, "unexplained": wrong}, indent=1))
    return 1 if wrong or not cells else 0


if __name__ == "__main__":
    sys.exit(main())
