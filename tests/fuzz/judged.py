# SPDX-License-Identifier: Apache-2.0
"""What all fuzzers of programs have in common: the launches, what ranks report, what is printed.

References are made by turns, each rank those of every so-many-th seed. A `Judge` has what one device made of a program and a
method `run`, which runs it on the ranks and says what is wrong; what it counts beside is `noted`. A launch that ends early
costs the program that it was in; the next one goes on behind it. Where right programs may end ranks, a judge has `ends`.
"""
import argparse
import faulthandler
import json
import pickle
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np

from ms_dtensor import comm
from ms_dtensor.errors import CommError
from tests.msrun import launch, report
from tests.support import each_once

LIMIT = 240  # seconds for one program and making it small; then every thread's stack is printed
LOST_STEP = 3  # exit code
ENDS = "\n\n---"  # from here on MindSpore tells of its own code


def differing(got, right, what: str, bar: float) -> list[str]:
    """What to say of values that are not the right ones, relative to the largest of these, or to 1."""
    got, right = np.asarray(got), np.asarray(right)
    off = np.abs(got - right).max(initial=0) if got.shape == right.shape else np.inf
    return [] if off <= bar * max(1, np.abs(right).max(initial=0)) else [f"{what}: off by {off}"]


def agreed(world, text: str) -> list[str]:
    """Every rank's text."""
    return list(comm.group(tuple(range(world.size))).all_gather_object(text))


def _referred(refer: Callable, program: Any) -> bytes:
    """What one device makes of it, or what it raised, so that all ranks are told."""
    try:
        return pickle.dumps(refer(program))
    except Exception:
        ms.common.api._pynative_executor.clear_res()
        return pickle.dumps(traceback.format_exc()[:3000])


def references(refer: Callable, programs: Iterable) -> list:
    """Of each program what one device makes of it, on every rank. Pickled: this is our own, from a moment ago."""
    return [pickle.loads(made) for made in each_once(*(partial(_referred, refer, program) for program in programs))]


def all_right(world, programs: list, refer: Callable, judge: Callable) -> None:
    """Asserts that the ranks make of each program what one device does."""
    with np.errstate(all="ignore"):
        wants = references(refer, programs)
        assert not (ended := [want for want in wants if isinstance(want, str)]), ended[0]
        failed = [f"{program}\n  -> {off}" for program, want in zip(programs, wants)
                  if (off := judge(world, program, want).run())]
    assert not failed, f"{len(failed)} of {len(programs)}:\n\n" + "\n\n".join(failed)


def run_ranks(job: dict, generate: Callable, refer: Callable, judge: Callable) -> int:
    """What each rank runs, until the time is over; it is rank 0's time."""
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
                wanted = dict(zip(some, references(refer, (generate(s, world.size) for s in some))))
            if isinstance(wanted[seed], str):
                raise ValueError(f"on one device: {wanted[seed]}")
            one = judge(world, program, wanted[seed])
            report({**said, "wrong": one.run(), "noted": getattr(one, "noted", {})})
            try:
                agreed(world, "")
            except CommError:
                if hasattr(judge, "ends"):
                    return LOST_STEP
                raise
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
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", help="comma-separated; instead of a range")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return run_ranks(json.loads(options.job), *how)
    seeds = [int(s) for s in options.seeds.split(",")] if options.seeds else list(
        range(options.first, options.first + options.programs))
    done, found, noted, limit = 0, Counter[str](), Counter[str](), time.monotonic() + 60 * options.minutes
    while seeds and (left := limit - time.monotonic()) > 0:
        job = json.dumps({"seeds": seeds, "seconds": left})
        outcome = launch(module, options.ranks, ["--job", job], left + 120, env={"MS_DTENSOR_TIMEOUT": "20"})
        told: dict[int, list[dict]] = {}
        for line in (line for lines in outcome.reports for line in lines):
            told.setdefault(line["seed"], []).append(line)
        before = found.total()
        for line in outcome.reports[0]:
            noted.update(line.get("noted", {}))
        for seed, lines in told.items():
            worst = next((k for k in ("raised", "wrong", "lost") if any(line.get(k) for line in lines)), None)
            if worst is None and 2 * sum("begins" in line for line in lines) > len(lines):  # no verdict of some rank
                worst, lines = "ended", [{**lines[0], "ended": outcome.failure}]
            if worst is not None:
                found[worst] += 1
                line = next(line for line in lines if line.get(worst))
                print(f"{worst}, seed {seed}: {line[worst]}\n  {line['program']}\n", flush=True)
        if not told or outcome.failure is not None and found.total() == before and not hasattr(how[-1], "ends"):
            print(outcome.failure)
            found["ended"] += 1
            break
        done += len(told)
        seeds = [s for s in seeds if s not in told]
        if outcome.failure is None:
            break
    print(json.dumps({"ranks": options.ranks, "programs": done, **noted, **found}))
    return 1 if found or not done else 0
