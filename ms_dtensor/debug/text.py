# SPDX-License-Identifier: Apache-2.0
"""How the debug tools, and commands, print: aligned columns, short paths, sizes a person can read."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def columns(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> str:
    """Rows as aligned text; columns that are empty throughout are left out."""
    used = [i for i in range(len(rows[0])) if any(r[i] for r in rows)]
    wide = {i: max(len(r[i]) for r in rows) for i in used}
    return "\n".join("  ".join(r[i].rjust(wide[i]) if i in right else r[i].ljust(wide[i]) for i in used).rstrip()
                     for r in rows)


def short_site(site: str) -> str:
    """`file:line` relative to the working directory if it is below, else the last two parts of the path."""
    name, _, line = site.rpartition(":")
    if not name:
        return site
    path = Path(name)
    try:
        shown = path.relative_to(Path.cwd())
    except ValueError:
        shown = Path(*path.parts[-2:])
    return f"{shown}:{line}"


def human(size: float) -> str:
    """`1536` -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def plural(count: int, noun: str) -> str:
    """`2, "rank"` -> "2 ranks"."""
    return f"{count} {noun}" + "s" * (count != 1)
