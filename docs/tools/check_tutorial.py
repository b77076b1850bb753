# SPDX-License-Identifier: Apache-2.0
"""Follows the tutorial to the letter in an empty virtual environment and compares what is printed; says how long it took.

    python docs/tools/check_tutorial.py [--page docs/tutorial.md] [--show]

A copy of what git knows is made, so the checkout stays as it is; HOME is a temporary folder. Files that the page says to
write are written, commands are given to one bash in the page's order. Of a `text` block each line must be found in the
output of the command above it, in that order. --show prints the output: for filling in such blocks.
"""
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MARK = "@@block"


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, file to write or "", text) of each fenced block."""
    return BLOCK.findall(page.read_text("utf-8"))


def script(found: list[tuple[str, str, str]]) -> str:
    """One bash program: writes the files, runs the commands, marks where the output of each begins."""
    lines = ["set -euo pipefail", "shopt -s expand_aliases"]
    for i, (language, name, text) in enumerate(found):
        if language == "python":
            lines.append(f"cat > {name} <<'END_OF_BLOCK'\n{text}END_OF_BLOCK")
        elif language == "bash":
            lines += [f'echo "{MARK} {i} $SECONDS"', text]
    return "\n".join([*lines, f'echo "{MARK} {len(found)} $SECONDS"'])


def missing(expected: str, output: str) -> str | None:
    """The first line that is not in the output after those before it."""
    rest = iter(line.rstrip() for line in output.splitlines())
    return next((line for line in expected.splitlines() if line.strip() and line.rstrip() not in rest), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "tutorial.md")
    parser.add_argument("--show", action="store_true", help="print what the commands print")
    options = parser.parse_args()
    found = blocks(options.page)
    with tempfile.TemporaryDirectory(prefix="dtensor_tutorial_") as home:
        copy = Path(home) / "ms_dtensor"
        copy.mkdir()
        pack = "git ls-files -z -co --exclude-standard | tar -c --null -T -"
        packed = subprocess.run(pack, shell=True, cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=copy, check=True, input=packed.stdout)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "MS_", "RANK"))}
        begun = time.monotonic()
        done = subprocess.run(["bash", "-c", script(found)], cwd=copy, env={**clean, "HOME": home}, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        seconds = time.monotonic() - begun
    parts = re.split(rf"^{MARK} (\d+) (\d+)$\n", done.stdout, flags=re.MULTILINE)
    outputs = dict(zip(map(int, parts[1::3]), parts[3::3]))
    starts = list(map(int, parts[2::3]))
    if options.show or done.returncode:
        print(done.stdout)
    if done.returncode:
        print(f"{options.page.name}: a command ended with {done.returncode}", file=sys.stderr)
        return 1
    wrong, last = 0, ""
    for i, (language, _, text) in enumerate(found):
        if language == "bash":
            last = outputs[i]
        elif language == "text" and (line := missing(text, last)) is not None:
            wrong += 1
            print(f"block {i}: not printed, or not in this order: {line!r}", file=sys.stderr)
    spans = [b - a for a, b in zip(starts, starts[1:])]
    print(f"{options.page.name}: {len(found)} blocks, {wrong} with another output; {seconds:.0f} s, installation "
          f"{spans[0]} s, then {', '.join(map(str, spans[1:]))} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
