# SPDX-License-Identifier: Apache-2.0
"""Tables that are data in docs/tables/ and text on the site only: tens of thousands of words that nobody reads in a row."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "tables"
PAGES = {"op_coverage.md": "op_coverage.json", "op_dtypes.md": "op_dtypes.json"}
NOTE = "The tables stand here on the site, which is built from [their rows](tables/{name}).\n"


def write(name: str, sections: list[dict[str, Any]]) -> None:
    """A section has `heads`, lines of Markdown before it, `columns` and `rows`, all of them Markdown; a row is a line."""
    texts = []
    for section in sections:
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in section["rows"])
        texts.append(f'{{"heads": {json.dumps(section["heads"])}, "columns": {json.dumps(section["columns"])}, "rows": [\n'
                     f"{rows}\n]}}")
    (FOLDER / name).write_text("[\n" + ",\n".join(texts) + "\n]\n", encoding="utf-8")


def rendered(name: str) -> str:
    """The tables of a file as Markdown."""
    lines = []
    for section in json.loads((FOLDER / name).read_text("utf-8")):
        lines += [text for head in section["heads"] for text in (head, "")]
        columns = section["columns"]
        lines += [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *section["rows"])]
        lines.append("")
    return "\n".join(lines)
