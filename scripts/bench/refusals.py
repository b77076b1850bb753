# SPDX-License-Identifier: Apache-2.0
"""How many of our own local functions a check of types refuses: the recipes, attention over sequences, experts, as JSON.

    msrun --worker_num=2 --local_worker_num=2 --join=True scripts/bench/refusals.py --out refusals_2.json    # and with 4

The programs are those of `tests/debug/cases_types.py`, which train as one device does, so any refusal is a false one. Each
is run once with every `local_map` and `DFunction` checked; a call is counted once for its function and layouts.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ms_dtensor import comm
from ms_dtensor.custom_ops import local_map
from ms_dtensor.debug import checks
from ms_dtensor.errors import OpRuleError
from tests.debug.cases_types import OWN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", help="these programs, comma-separated; default: all")
    args = parser.parse_args()
    world, checked, refused = comm.start("cpu"), Counter[str](), dict[str, str]()
    run_checked = local_map.checked_run

    def counted(who, *args):
        checked[who] += 1
        try:
            return run_checked(who, *args)
        except OpRuleError as error:
            refused.setdefault(f"{who}", str(error)[:300])
            raise
    local_map.checked_run = counted  # type: ignore[assignment]
    failed, began = {}, time.perf_counter()
    programs = [(module, name) for module, name in OWN[world.size] if args.only is None or name in args.only.split(",")]
    for module, name in programs:
        try:
            with checks(rules=False, types=True):
                getattr(module, name)(world)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    if world.rank == 0:
        total = sum(checked.values())
        Path(args.out).write_text(json.dumps({
            "ranks": world.size, "programs": len(programs), "functions": len(checked), "checked": total,
            "refused": len(refused), "share": len(refused) / total if total else None, "which": refused, "failed": failed,
            "seconds": round(time.perf_counter() - began, 1)}, indent=1) + "\n")
    comm.shutdown()


if __name__ == "__main__":
    main()
