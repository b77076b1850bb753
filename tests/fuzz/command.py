# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the fuzzers have in common: which programs, on how many ranks, for how long."""
from __future__ import annotations

import argparse


def parser_of(doc: str | None, ranks: int, programs: int, only: tuple[int, ...] | None = None) -> argparse.ArgumentParser:
    """`doc`: the page that it shows; then what is taken where nothing is said. `only`: how many ranks there can be."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=ranks, choices=only)
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", help="comma-separated; instead of a range")
    parser.add_argument("--minutes", type=float, default=10)
    return parser


def seeds_of(options: argparse.Namespace) -> list[int]:
    """The programs' seeds."""
    if options.seeds:
        return [int(s) for s in options.seeds.split(",")]
    return list(range(options.first, options.first + options.programs))
