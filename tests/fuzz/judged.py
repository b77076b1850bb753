# SPDX-License-Identifier: Apache-2.0
"""What fuzzers have in common whose programs a `Judge` runs on real ranks: the launches, what ranks report, what is printed.

References are made by turns, each rank those of every so-many-th seed. A launch that ends early costs the program that it
was in; the next one goes on behind it.
"""
from __future__ import annotations

import argparse
import faulthandler
import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np

from ms_dtensor import comm
from ms_dtensor.errors import CommError
from tests.dist.support import each_once
from tests.fuzz.check import agreed
from tests.fuzz.command import parser_of, seeds_of
from tests.fuzz.sharding.ranks import LIMIT, LOST_STEP
from tests.msrun import launch, report

ENDS = "\n\n---"  # from here on MindSpore tells of its own code


def differing(got, right, what: str, bar: float) -> list[str]:
    """What to say of values that are not the right ones, relative to the largest of these, or to 1."""
    got, right = np.asarray(got), np.asarray(right)
    off = np.abs(got - right).max(initial=0) if got.shape == right.shape else np.inf
    return [] if off <= bar * max(1, np.abs(right).max(initial=0)) else [f"{what}: off by {off}"]


def referred(refer: Callable, program: Any) -> Any:
    """What one device makes of it, or what it raised, so that all ranks are told."""
    try:
        return refer(program)
    except Exception:
        ms.common.api._pynative_executor.clear_res()
        return traceback.format_exc()[:3000]


def run_ranks(job: dict, generate: Callable, refer: Callable, judge: Callable) -> int:
    """What each rank runs. `judge(world, program, want)` has a method `run`, which says what is wrong."""
    faulthandler.enable()
    world = comm.start("cpu")
    ms.runtime.launch_blocking()
    np.seterr(all="ignore")
    began, seeds, wanted = time.monotonic(), job["seeds"], dict[int, Any]()
    for number, seed in enumerate(seeds):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        if agreed(world, "stop" if time.monotonic() - began > job["seconds"] else "")[0]:
            break
        program = generate(seed, world.size)
        said = {"seed": seed, "program": str(program)}
        report({**said, "begins": True})
        try:
            if seed not in wanted:
                some = seeds[number:number + world.size]
                wanted = dict(zip(some, each_once(*(partial(referred, refer, generate(s, world.size)) for s in some))))
            if isinstance(wanted[seed], str):
                raise ValueError(f"on one device: {wanted[seed]}")
            report({**said, "wrong": judge(world, program, wanted[seed]).run()})
            agreed(world, "")
        except Exception as e:
            lost = isinstance(e, CommError)
            report({**said, "lost" if lost else "raised": f"{type(e).__name__}: {str(e).split(ENDS)[0][:1500]}\n" +
                    "".join(traceback.format_tb(e.__traceback__)[-5:])})
            if lost:
                return LOST_STEP
            ms.common.api._pynative_executor.clear_res()
            try:
                agreed(world, "")  # where all ranks raised, they go on together
            except CommError:
                return LOST_STEP
    return 0


def main(doc: str | None, module: str, ranks: int, programs: int, *how: Callable) -> int:
    """Command line of the fuzzer in this module; returns the exit code. `how`: as for `run_ranks`."""
    parser = parser_of(doc, ranks, programs)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return run_ranks(json.loads(options.job), *how)
    seeds: Sequence[int] = seeds_of(options)
    done, found, limit = 0, Counter[str](), time.monotonic() + 60 * options.minutes
    while seeds and (left := limit - time.monotonic()) > 0:
        job = json.dumps({"seeds": seeds, "seconds": left})
        outcome = launch(module, options.ranks, ["--job", job], left + 120, env={"MS_DTENSOR_TIMEOUT": "20"})
        told: dict[int, list[dict]] = {}
        for line in (line for lines in outcome.reports for line in lines):
            told.setdefault(line["seed"], []).append(line)
        before = found.total()
        for seed, lines in told.items():
            worst = next((k for k in ("raised", "wrong", "lost") if any(line.get(k) for line in lines)), None)
            if worst is None and 2 * sum("begins" in line for line in lines) > len(lines):  # no verdict of some rank
                worst, lines = "ended", [{**lines[0], "ended": outcome.failure}]
            if worst is not None:
                found[worst] += 1
                line = next(line for line in lines if line.get(worst))
                print(f"{worst}, seed {seed}: {line[worst]}\n  {line['program']}\n", flush=True)
        if not told or outcome.failure is not None and found.total() == before:
            print(outcome.failure)
            found["ended"] += 1
            break
        done += len(told)
        seeds = [s for s in seeds if s not in told]
        if outcome.failure is None:
            break
    print(json.dumps({"ranks": options.ranks, "programs": done, **found}))
    return 1 if found or not done else 0
