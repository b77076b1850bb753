# SPDX-License-Identifier: Apache-2.0
"""Proves the rules behind every public call form of the corpus; prints one JSON object, fails on any wrong case.

    python -m ms_dtensor verify                    everything, two processes
    python -m ms_dtensor verify linalg loss        only the files forms_linalg.py and forms_loss.py of tools/forms
    python -m ms_dtensor verify --form mint.add    only forms of this function, else those whose name contains it
    python -m ms_dtensor verify --missed           legal single-axis cases that no rule lists (first arguments only)
    python -m ms_dtensor verify --dtypes           each form with each dtype that plain MindSpore takes, and by keyword

Each form runs with all its sample arguments on meshes (2,) and (3,), the first arguments also on (2, 2): every case
of every rule it reaches, forward and backward. Forms that reach the same primitive with the same arguments and shapes
share one check: `compared` counts each once. `table` and `rules` are what docs/op_coverage.md shows. See
`ms_dtensor.verify`.
"""
from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FAMILIES = sorted(p.stem.removeprefix("forms_") for p in (Path(__file__).parent / "forms").glob("forms_*.py"))


def main(arguments: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor verify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names behind forms_; default all")
    parser.add_argument("--form", help="only forms of this function; if there are none, those whose name contains it")
    parser.add_argument("--missed", action="store_true", help="look for legal cases that no rule lists")
    parser.add_argument("--dtypes", action="store_true", help="ask each form for each dtype, see forms/dtypes.py")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="this always prints JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.families) - set(FAMILIES)):
        parser.error(f"{', '.join(unknown)}: no such family; known are {', '.join(FAMILIES)}")
    if options.part:
        print(json.dumps(run(options, *map(int, options.part.split("/")))))
        return 0
    started = time.time()
    total = merge(spawn(options))
    if not total["forms"] and not total.get("refusals"):
        print(f"no form has {options.form!r} in its name", file=sys.stderr)
        return 2
    if options.dtypes and not (options.families or options.form):
        from .forms.dtypes import unused
        total["wrong"] += [f"reason {letter!r} explains no hole" for letter in unused(total["dtypes"])]
    total["seconds"] = round(time.time() - started, 1)
    print(json.dumps(total, indent=1))
    return 1 if total["wrong"] or total.get("missed") else 0


def spawn(options) -> list[dict]:
    """So many processes at a time, each with a part of the forms: MindSpore uses one core in this work.

    More parts than processes, as parts are not equally long.
    """
    command = [sys.executable, "-m", "ms_dtensor", "verify", *options.families,
               *(["--form", options.form] if options.form else []),
               *(["--missed"] if options.missed else []), *(["--dtypes"] if options.dtypes else [])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "4"}
    parts = 1 if options.form or options.jobs == 1 else 4 * options.jobs

    def part(i: int) -> subprocess.CompletedProcess:
        ran = subprocess.run([*command, "--part", f"{i}/{parts}"], stdout=subprocess.PIPE, text=True, env=env, check=False)
        if parts > 1:  # of a few minutes each
            print(f"part {i + 1} of {parts} is done", file=sys.stderr, flush=True)
        return ran
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(part, range(parts)))
    if any(d.returncode for d in done):
        raise SystemExit("a verifying process failed; see above")
    return [json.loads(d.stdout.splitlines()[-1]) for d in done]


def merge(parts: list[dict]) -> dict:
    """The parts' counts added, their lists joined."""
    total: dict = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, int | list):
                total[key] = total.get(key, type(value)()) + value
            else:
                merged = total.setdefault(key, {})
                for name, item in value.items():
                    merged[name] = merged.get(name, type(item)()) + item
    rules: dict = {}
    for op, seen in total.pop("rules", ()):
        into = rules.setdefault(op, {})
        for key, values in seen.items():
            into[key] = sorted({*into.get(key, ()), *values})
    return {**total, "table": sorted(total.get("table", ())), "rules": dict(sorted(rules.items()))}


def corpus(families=(), part: int = 0, parts: int = 1, name: str | None = None) -> list:
    """(family, form) pairs of one part; spellings of one function come in the same part, as they share checks."""
    found = []
    for family in FAMILIES:
        if not families or family in families:
            module = importlib.import_module(f"{__package__}.forms.forms_{family}")
            found += [(family, form) for form in module.FORMS if name is None or name in form.name]
    found = [(family, form) for family, form in found if form.name.split("(")[0] == name] or found
    return [(family, form) for family, form in found
            if zlib.crc32(re.sub(r"\W", "", form.name.split("(")[0].split(".")[-1]).encode()) % parts == part]


def run(options, part: int, parts: int) -> dict:
    """Verifies one part of the corpus in this process."""
    import mindspore as ms
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    ms.device_context.cpu.op_tuning.threads_num(1)  # threads that wait for work would take the other process's core
    if options.dtypes:
        from ..dispatch import patches
        patches.install()  # before the forms keep functions of MindSpore's
    forms = corpus(options.families, part, parts, options.form)
    from ..debug.verify import Report
    from .forms.run import refuses, verify_form
    if options.dtypes:
        return matrix(forms)

    out: dict = {"forms": 0, "refusals": 0, "calls": 0, "compared": 0, "slowest": {}, "wrong": [], "missed": [],
                 "table": [], "rules": []}
    seen: dict = {}
    told = time.time()
    if options.form and forms:
        print(f"{len(forms)} forms have {options.form!r} in their names", file=sys.stderr, flush=True)
    for i, (family, form) in enumerate(forms):
        started = time.time()
        if options.form and started - told > 10:  # a short text is in many names
            print(f"{i} of them are done", file=sys.stderr, flush=True)
            told = started
        report = Report(seen=seen)
        if form.raises is None:
            verify_form(form, report, missed=options.missed, quick=options.missed)
            out["forms"] += 1
        else:
            out["refusals"] += 1
            report.wrong += refuses(form)
        out["calls"] += report.calls
        out["compared"] += report.compared
        out["table"].append([family, form.name, sorted(report.ops), report.samples])
        out["wrong"] += [f"{form.name}: {text}" for text in report.wrong]
        out["missed"] += sorted({f"{form.name}: {text}" for text in getattr(report, "missed", ())})
        out["rules"] += [(op, {"cases": sorted(s.cases), "how": sorted(s.how)}) for op, s in report.ops.items()]
        if time.time() - started > 3:
            out["slowest"][form.name] = round(time.time() - started, 1)
    return out


def matrix(forms) -> dict:
    """Row of the matrix -> its marks, a letter for a hole with a reason; what is wrong; kinds of calls made by keyword."""
    from ..debug.verify import Report
    from .forms import dtypes
    out: dict = {"forms": 0, "dtypes": {}, "wrong": [], "keywords": 0}
    seen: dict = {}
    known: set = set()
    for family, form in forms:
        if form.raises is not None:
            continue
        out["forms"] += 1
        for row, (group, each) in dtypes.rows(form).items():
            marks = []
            for dtype in each:
                mark = dtypes.ask(form, group, dtype, family != "random", Report(seen=seen))
                why = dtypes.reason(row, dtype)
                if len(mark) > 1 and why is None:
                    out["wrong"].append(f"{row}: {dtype}: {mark}")
                marks.append(mark if len(mark) == 1 else why or "!")
            out["dtypes"][row] = "".join(marks)
        out["wrong"] += [f"{form.name}: {text}" for text in dtypes.by_keyword(form, known)]
    out["keywords"] = sum(len(key) > 4 for key in known)
    return out
