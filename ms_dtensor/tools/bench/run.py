# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of a cluster, in the columns of the field; results are JSON files and one HTML page.

    python -m ms_dtensor bench                                 two ranks here; on a CPU the suite `toy`: does it run?
    python -m ms_dtensor bench --ranks 8                       the devices of this machine
    python -m ms_dtensor bench --hostfile hosts --budget-minutes 60 [--out DIR] [--only collectives,checkpoint]
    msrun --worker_num=16 ... python -m ms_dtensor bench       ranks that somebody else starts, as a batch system does
    python -m ms_dtensor bench report DIR DIR2 ... --out page.html          compares runs

A hostfile has a line `worker-1 slots=8` for each node; say the command on the first. ssh to every other node must work
without a password, and the same Python and folder be at the same path there; `localhost` needs no ssh. Every piece that is
done is a JSON file in DIR/pieces; started again with the same DIR, only what is missing runs, so a budget may be spent in
parts. A piece that fails is written down with its reason, and the rest goes on. At the end, and after an interruption,
DIR/report.html is written. `llama` and `scaling` are steps of the recipe, `model_zoo`: they are measured where Python finds
a checkout.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...core.version import __version__
from ...errors import ConfigError
from ..ranks import guarded
from . import report, suites
from .hosts import PACKAGE, Host, Nodes, read_hosts, reason
from .pieces import FACTS, PIECE, read, write

START_SECONDS = 300.0  # a launch may take so long before its first piece


def versions() -> dict[str, str]:
    """Of what is installed here."""
    out = {"python": platform.python_version(), "ms_dtensor": __version__}
    for name in ("mindspore", "numpy"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def commit() -> str | None:
    """Of a checkout, with "+" when files differ from it."""
    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=PACKAGE, capture_output=True, text=True, check=False).stdout.strip()
    if not (PACKAGE / ".git").exists():
        return None
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "ms_dtensor", "model_zoo") else "")


def describe(options: argparse.Namespace, nodes: int, slots: int) -> None:
    """What ran where, for the page; of the first time. ConfigError when this is another cluster than it was then."""
    out = options.out
    file, where = out / "run.json", {"nodes": nodes, "slots": slots, "suite": options.suite, "algorithms": options.algorithm}
    if not file.exists():
        write(file, {"label": out.name, "date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit(), "versions": versions(),
                     **where, "peaks": options.peak, "command": options.command})
    before = read(file, FACTS)
    if unlike := {key: before[key] for key in where if before[key] != where[key]}:
        now = {key: where[key] for key in unlike}
        raise ConfigError(f"For '--out', {out} has a run of {unlike}; this is one of {now}.", str(file),
                          "What is done is skipped, so a folder is of one cluster.", "another --out")


def put_damaged_aside(pieces: Path) -> list[str]:
    """They are missing from now on; what to say of them."""
    told = []
    for file in sorted(pieces.glob("*.json")):
        try:
            read(file, PIECE)
        except ConfigError as error:
            file.replace(file.with_suffix(".damaged"))
            told.append(f"{str(error).splitlines()[0]} It counts as missing, and is {file.stem}.damaged now.")
    return told


class Run:
    """The state of a run is its folder."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out
        self.pieces_dir = self.out / "pieces"
        self.hosts = read_hosts(text_of(options.hostfile) if options.hostfile else f"localhost slots={options.ranks}")
        self.until = time.time() + 60 * options.budget_minutes
        self.pieces = suites.plan(options.suite, len(self.hosts), self.hosts[0].slots, str(self.out), options.only,
                                  options.algorithm)
        self.pieces_dir.mkdir(parents=True, exist_ok=True)  # what was refused leaves no folder
        self.tried: set[str] = set()

    def say(self, line: str) -> None:
        print(line, file=sys.stderr if self.options.json else sys.stdout, flush=True)

    def left(self) -> list[suites.Piece]:
        return [p for p in self.pieces if not (self.pieces_dir / f"{p.name}.json").exists() and p.name not in self.tried]

    def all(self) -> None:
        """Launches, until nothing is left or the time is up."""
        for line in put_damaged_aside(self.pieces_dir):
            self.say(line)
        while left := self.left():
            if time.time() > self.until:
                self.say(f"the budget is spent; {len(left)} pieces are left: the same command goes on with them")
                return
            self.launch([p for p in left if p.key() == left[0].key()])

    def launch(self, pieces: list[suites.Piece]) -> None:
        first = pieces[0]
        hosts = [Host(h.name, first.slots) for h in self.hosts[:first.hosts]]
        name = f"{first.launch}_{first.hosts * first.slots}" if first.launch != pieces[0].name else first.launch
        logs = self.out / "logs" / f"{name}_{time.strftime('%H%M%S')}"
        argument = {"name": first.launch, "out": str(self.out), "slots": first.slots, "peaks": self.options.peak,
                    "cpu_backend": self.options.cpu_backend, "called": time.time(),
                    "pieces": [{"name": p.name, "benchmark": p.benchmark, "options": p.options} for p in pieces]}
        at_work, limits = self.out / "at_work", {p.name: p.limit for p in pieces}
        at_work.unlink(missing_ok=True)
        self.say(f"{len(pieces)} pieces on {len(hosts)} x {first.slots} ranks: {', '.join(p.name for p in pieces)}")
        began = time.time()

        def deadline() -> float:
            """Of the piece at work, or of the start; the budget's end in any case."""
            if not at_work.exists():
                return min(self.until, began + START_SECONDS)
            return min(self.until, at_work.stat().st_mtime + limits.get(at_work.read_text(encoding="utf-8"), START_SECONDS))
        nodes = Nodes(hosts, first.slots, json.dumps(argument), logs, {**self.options.env, **first.env}, self.options.ssh,
                      self.options.setup)
        wrong = nodes.wait(deadline)
        missing = [p for p in pieces if not (self.pieces_dir / f"{p.name}.json").exists()]
        self.say(f"  {len(pieces) - len(missing)} done in {time.time() - began:.0f} s")
        for piece in pieces:
            if piece not in missing:  # this time
                (self.pieces_dir / f"{piece.name}.failed").unlink(missing_ok=True)
        if not wrong and not missing:
            return
        if time.time() > self.until and wrong.startswith("not done"):
            return  # the budget ended it
        guilty = at_work.read_text(encoding="utf-8") if at_work.exists() else ""
        for piece in missing:  # the one at work; without one, the start failed, and so it would again
            if not guilty or piece.name == guilty:
                self.tried.add(piece.name)
                why = f"{wrong or 'ended early'}\n{reason(logs)}"
                (self.pieces_dir / f"{piece.name}.failed").write_text(why + "\n", encoding="utf-8")
                self.say(f"  {piece.name} FAILED: {why.splitlines()[-1][:200]}  (logs: {logs})")
        if guilty not in {p.name for p in missing}:  # what was at work is done, yet the launch failed
            self.tried.update(p.name for p in missing)


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks, 1 or more")
    return int(text)


def peak(text: str) -> tuple[str, float]:
    dtype, value = pair(text)
    if dtype not in suites.PRODUCTS:
        raise argparse.ArgumentTypeError(f"{dtype!r} is none of {', '.join(suites.PRODUCTS)}")
    return dtype, positive(value)


def names(text: str) -> set[str]:
    found = set(text.split(","))
    if unknown := found - set(suites.BENCHMARKS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are none of {', '.join(suites.BENCHMARKS)}")
    return found


def text_of(hostfile: Path) -> str:
    try:
        return hostfile.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"For '--hostfile', {hostfile} is no text.", str(error),
                          "A line is a host and its number of devices.", "write `worker-1 slots=8`") from None


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", type=Path)
    where.add_argument("--ranks", type=count, default=2, help="on this machine, without a hostfile; default: 2")
    parser.add_argument("--budget-minutes", type=positive, default=60.0)
    parser.add_argument("--out", type=Path, default=Path(f"runs/cluster/{time.strftime('%Y-%m-%d')}"),
                        help="on a file system that all hosts share, if the checkpoint benchmark is to mean anything")
    parser.add_argument("--suite", choices=suites.SUITES,
                        help="default: full where this machine has NPUs or GPUs; else toy, as full is too large for a CPU")
    parser.add_argument("--only", type=names, metavar="NAMES", help=", ".join(suites.BENCHMARKS))
    parser.add_argument("--peak", type=peak, action="append", default=[], metavar="DTYPE=TFLOPS",
                        help="what shares and MFU are of, e.g. bfloat16=376; without it the table's for this device, or n/a")
    parser.add_argument("--algorithm", action="append", default=[], metavar="HCCL_ALGO",
                        help="collectives once more with this HCCL_ALGO; may be given several times")
    parser.add_argument("--env", type=pair, action="append", default=[], metavar="KEY=VALUE", help="for all ranks")
    parser.add_argument("--setup", default="", help="a shell command before msrun on the other nodes: source .../set_env.sh")
    parser.add_argument("--ssh", default="ssh -tt -o BatchMode=yes", help="how to reach them")
    parser.add_argument("--cpu-backend", choices=("mccl", "shm"), default="mccl",
                        help="on CPUs: MindSpore's own, under both interfaces, or this library's for one host")
    parser.add_argument("--json", action="store_true", help="print JSON of what is done at the end; the rest goes to stderr")
    options = parser.parse_args(argv)
    if len(options.peak) != len({dtype for dtype, _ in options.peak}):
        parser.error("argument --peak: a dtype is given twice")
    options.peak = dict(options.peak)
    options.suite = options.suite or suites.default()
    options.env = {**({"OMP_NUM_THREADS": "1"} if options.suite == "toy" else {}), **dict(options.env)}
    options.out = options.out.resolve()
    options.command = f"python -m ms_dtensor bench {shlex.join(argv)}"
    return options


def joined(options: argparse.Namespace) -> None:
    """This process is a rank of an msrun that somebody else started: pieces of this world, in this job."""
    from .ranks import begin, measure
    only, pieces_dir = suites.chosen(options.only), options.out / "pieces"
    pieces_dir.mkdir(parents=True, exist_ok=True)
    bench = begin({"name": "msrun", "out": str(options.out), "slots": None, "peaks": options.peak,
                   "cpu_backend": options.cpu_backend})
    hosts = bench.size // bench.ranks_a_node
    pieces = [p for p in suites.plan(options.suite, hosts, bench.ranks_a_node, str(options.out), only, options.algorithm)
              if (p.hosts, p.slots, p.env) == (hosts, bench.ranks_a_node, {}) and p.benchmark != "startup"]
    refused = None
    if bench.rank == 0:
        try:
            describe(options, hosts, bench.ranks_a_node)
        except ConfigError as error:
            refused = error
        print(*put_damaged_aside(pieces_dir), sep="\n", end="")
    refused, done = bench.everybody.broadcast_object((refused, [p.stem for p in pieces_dir.glob("*.json")]), 0)
    if refused:
        raise refused
    for piece in pieces:
        if piece.name not in done:
            measure(bench, options.out, piece.name, piece.benchmark, piece.options)
    bench.everybody.barrier()
    if bench.rank == 0:
        page = finished(options.out)
        told = {"report": str(page), "done": [p.name for p in pieces]}
        print(json.dumps(told) if options.json else f"report: {page}", flush=True)


def finished(out: Path) -> Path:
    """Its page; nothing is at work any more."""
    (out / "at_work").unlink(missing_ok=True)
    page = out / "report.html"
    page.write_text(report.page([out]), encoding="utf-8")
    return page


def main(argv: Sequence[str]) -> int:
    """The command; exit code 1 if a piece failed, 2 if nothing could be begun, 130 if it was interrupted."""
    if argv[:1] == ["report"]:
        return report.main(argv[1:])
    options = parse(argv)
    if os.environ.get("MS_ROLE"):
        return guarded(lambda: joined(options))
    try:
        options.only = suites.chosen(options.only)
        run = Run(options)
        describe(options, len(run.hosts), run.hosts[0].slots)
    except (OSError, ConfigError) as problem:
        error = problem if isinstance(problem, ConfigError) else ConfigError(
            f"For 'bench', {problem.filename} cannot be used.", str(problem),
            "A hostfile is read, and the folder --out is written in.", "name a file that is there, or a folder of yours")
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}",
              file=sys.stdout if options.json else sys.stderr)
        return 2
    if lacking := suites.OF_RECIPE - options.only - ({*suites.OF_RECIPE} if suites.recipe() else set()):
        run.say(f"left out, as they are measured in a checkout only: {', '.join(sorted(lacking))}")
    interrupted = False
    try:
        run.all()
    except KeyboardInterrupt:
        interrupted = True
        run.say("interrupted; the same command goes on")
    page = finished(run.out)
    failed = sorted(p.stem for p in run.pieces_dir.glob("*.failed"))
    left = [p.name for p in run.left()]
    done = len(run.pieces) - len(left) - len(run.tried)
    which = f", {len(failed)} failed: {', '.join(failed)}" if failed else ""
    run.say(f"{done} of {len(run.pieces)} pieces are done{which}\nreport: {page}")
    if options.json:
        told: dict[str, Any] = {"pieces": len(run.pieces), "done": done, "failed": failed, "left": left, "report": str(page)}
        print(json.dumps(told, indent=1))
    return 130 if interrupted else 1 if failed else 0
