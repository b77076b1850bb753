# SPDX-License-Identifier: Apache-2.0
"""The files of a run's folder, read back: `run.json`, and one for each piece that is done. What is damaged is named.

The invariant: a figure that is no number (NaN) is None, as one that was not measured.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.files import replacing
from ...errors import ConfigError

FACTS = {"label": str, "date": str, "commit": str | None, "versions": dict, "nodes": int, "slots": int, "suite": str,
         "algorithms": list, "command": str}
PIECE = {"piece": str, "benchmark": str, "ranks": int, "rows": list}


def read(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The file's object.

    Args:
        path: of the file.
        wanted: the type of each key that it has, `FACTS` or `PIECE`.

    Raises:
        ConfigError: it is no such object; the text names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(path, f"{type(found).__name__} where an object is")
    wrong = [key for key, kind in wanted.items() if key not in found or not isinstance(found[key], kind)]
    if wrong or not all(isinstance(row, dict) for row in found.get("rows", ())):
        raise _damaged(path, f"no {', '.join(wrong or ['rows'])} as `bench` writes it")
    return found


def write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _damaged(path: Path, why: str) -> ConfigError:
    again = "another folder" if path.name == "run.json" else "the same command takes it again"
    return ConfigError(f"For '{path}', the file is damaged: {why}.", str(path), "`bench` wrote it, whole.", again)
