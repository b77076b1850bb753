# SPDX-License-Identifier: Apache-2.0
"""A training run read back from its folder: `metrics.jsonl`, one JSON object a line, as columns over steps."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

FILE = "metrics.jsonl"
FIGURES = ("loss", "held_out_loss", "grad_norm", "tokens_per_s", "memory_gib")  # that a plot shows


@dataclass(frozen=True, slots=True)
class Run:
    """What a run recorded.

    Attributes:
        name: the shortest end of its path that no other run of the same reading has.
        rows: the lines, in order.
    """

    name: str
    rows: tuple[dict[str, Any], ...]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values where a number of this name was recorded.

        Example:
            >>> Run("a", ({"step": 1, "loss": 3.0}, {"step": 2, "loss": None})).series("loss")
            ([1], [3.0])
        """
        pairs = [(int(row["step"]), float(row[key])) for row in self.rows if _number(row.get(key))]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def communication(self, warmup: int = 1) -> dict[str, tuple[float, float, float]]:
        """Per step, after the first ones: {"all_reduce tp": (calls, bytes, milliseconds)}, by time."""
        steps = [row["comm"] for row in self.rows if isinstance(row.get("comm"), dict)]
        steps = steps[warmup:] or steps
        totals: dict[str, list[float]] = {}
        for step in steps:
            for key, line in step.items():
                total = totals.setdefault(key, [0.0, 0.0, 0.0])
                for i, value in enumerate(line):
                    total[i] += value / len(steps)
        ordered = sorted(totals.items(), key=lambda item: -item[1][2])
        return {key: (calls, nbytes, ms) for key, (calls, nbytes, ms) in ordered}


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs of folders.

    Raises:
        ConfigError: a folder without a run, or a line that is not one of a run.
    """
    return [Run(name, _rows(folder)) for name, folder in zip(_names(folders), folders, strict=True)]


def _rows(folder: Path) -> tuple[dict[str, Any], ...]:
    path = folder / FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        near = sorted(p.parent for p in folder.glob(f"*/{FILE}")) if folder.is_dir() else []
        raise ConfigError(f"For 'plot', '{folder}' is no run.", f"{FILE}: {error.strerror}",
                          f"train.py writes {FILE} into train.log_dir.",
                          f"below it are: {', '.join(map(str, near[:5]))}" if near else "name the folder of a run") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"For 'plot', '{path}' is no text.", f"byte {error.object[error.start]:#04x} at {error.start}",
                          f"train.py writes {FILE}: one JSON object a line.", "name the folder of a run") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            if number < len(lines):  # the last one may be torn: the run goes on, or was killed
                raise ConfigError(f"For 'plot', line {number} of '{path}' is no JSON object.", line[:80], "One a line.",
                                  "take the line out") from None
            continue
        if line.strip() and (wrong := _wrong(rows[-1])):
            raise ConfigError(f"For 'plot', line {number} of '{path}' is of no run: {wrong}.", line[:80],
                              f"train.py writes {FILE}: a whole step, and figures that are numbers or null.",
                              "take the line out")
    if not any("loss" in row for row in rows):
        raise ConfigError(f"For 'plot', '{folder}' has no step yet.", f"{len(rows)} lines in {FILE}",
                          "A plot needs one step at least.", "wait for the first step")
    return tuple(rows)


def _number(value: Any) -> bool:
    return isinstance(value, float) or isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _wrong(row: dict[str, Any]) -> str:
    """What a line has that a run does not write; "" if nothing."""
    there = [key for key in (*FIGURES, "comm") if row.get(key) is not None]
    if there and (not _number(row.get("step")) or isinstance(row["step"], float)):
        return f"its step is {row.get('step')!r:.40}"
    for key in there:
        value = row[key]
        lines = list(value.values()) if isinstance(value, dict) else [None]
        good = all(isinstance(x, list) and len(x) == 3 and all(map(_number, x)) for x in lines) if key == "comm" \
            else _number(value)
        if not good:
            return f"its {key} is {value!r:.40}"
    return ""


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]
