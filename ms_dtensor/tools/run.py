# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor run --as hyper_parallel script.py ...`: runs a program of another library's, unedited."""
from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Runs a Python program that imports another library, with ms_dtensor in its place: as `python script.py ...` would, with the
script's folder first on the path. Under msrun it is one rank:
msrun ... python -m ms_dtensor run --as hyper_parallel script.py
"""


def main(arguments: Sequence[str]) -> int:
    """The command; exit code 2 for a script that is not there, else the program's own."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor run", description=DESCRIPTION)
    parser.add_argument("--as", dest="library", choices=["hyper_parallel"], required=True,
                        help="whose place ms_dtensor takes")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    if not given.script.is_file():
        parser.error(f"there is no file {str(given.script)!r}")
    from ..compat import hyper_parallel
    hyper_parallel.register()
    sys.argv[:] = [str(given.script), *given.arguments]
    sys.path.insert(0, str(given.script.resolve().parent))
    runpy.run_path(str(given.script), run_name="__main__")
    return 0
