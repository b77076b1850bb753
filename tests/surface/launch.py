# SPDX-License-Identifier: Apache-2.0
"""The whole table, or the rows that contain a text: one launch of four ranks and one of a single rank."""
from __future__ import annotations

from pathlib import Path

from tests.msrun import launch
from tests.surface.table import COLUMNS


def run_table(text: str = "", folder: Path | None = None, columns: str = "") -> list[dict]:
    """Every cell as {"group", "name", "column", "state", "text"}; a launch that died costs the cell it was in."""
    cells: list[dict] = []
    for size, there in COLUMNS.items():
        if columns and not set(there) & set(columns.split(";")):
            continue
        first = 0
        while True:
            outcome = launch("tests.surface.ranks", size, [first, columns, text], 1500,
                             log_dir=folder and folder / f"surface-{size}-{first}")
            lines = sorted((line for rank in outcome.reports for line in rank if "state" in line), key=lambda c: c["number"])
            cells += {line["number"]: line for line in reversed(lines)}.values()
            if outcome.failure is None:
                break
            begun = max((line["begins"] for line in outcome.reports[0] if "begins" in line), default=None)
            if begun is None:
                raise AssertionError(outcome.failure)
            if begun not in {line["number"] for line in lines}:
                cells.append({"number": begun, "group": "?", "name": f"cell {begun} of {size} ranks", "column": "?",
                              "state": "died", "text": outcome.failure})
            first = begun + 1
    return cells
