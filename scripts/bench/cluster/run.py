# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of a cluster from a hostfile: start this on the first host, and read one HTML page.

    python scripts/bench/cluster/run.py --hostfile hosts --budget-minutes 60 [--out DIR] [--only collectives,llama]
    python scripts/bench/cluster/run.py --hostfile hosts --suite toy        on CPUs: does it run? (figures mean nothing)

A hostfile has a line `worker-1 slots=8` for each node. ssh to every other node must work without a password, and the same
checkout and environment be at the same path there; `localhost` needs no ssh. Every piece that is done is a JSON file in
DIR/pieces; started again with the same DIR, only what is missing runs, so a budget may be spent in parts. A piece that fails
is written down with its reason, and the rest goes on. At the end, and after an interruption, DIR/report.html is written; to
compare runs:
`python scripts/bench/cluster/report.py DIR DIR2 ... --out page.html`.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __package__ in (None, ""):
    sys.path[0] = str(ROOT)

from scripts.bench.cluster import report, suites  # noqa: E402
from scripts.bench.cluster.hosts import Host, Nodes, read_hosts, reason  # noqa: E402
from scripts.bench.cluster.pieces import FACTS, PIECE, read  # noqa: E402
from scripts.bench.cluster.ranks import write  # noqa: E402
from scripts.bench.common import commit, versions  # noqa: E402

START_SECONDS = 300.0  # a launch may take so long before its first piece


class Run:
    """The state of a run is its folder."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out.resolve()
        self.pieces_dir = self.out / "pieces"
        self.pieces_dir.mkdir(parents=True, exist_ok=True)
        try:
            self.hosts = read_hosts(options.hostfile.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"For '--hostfile', {options.hostfile} is no text: {error}.\n  rule:     A line is a host and "
                             "its number of devices.\n  fix:      write `worker-1 slots=8`") from None
        self.until = time.time() + 60 * options.budget_minutes
        self.pieces = suites.plan(options.suite, len(self.hosts), self.hosts[0].slots, str(self.out), options.only,
                                  options.algorithm)
        self.tried: set[str] = set()

    def describe(self) -> None:
        """What ran where, for the page; of the first time. ValueError when this is another cluster than it was then."""
        file, where = self.out / "run.json", {"nodes": len(self.hosts), "slots": self.hosts[0].slots,
                                              "suite": self.options.suite, "algorithms": self.options.algorithm}
        if not file.exists():
            write(file, {"label": self.out.name, "date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit(),
                         "versions": versions(), **where, "peaks": self.options.peak, "command": " ".join(sys.argv)})
        before = read(file, FACTS)
        if unlike := {key: before[key] for key in where if before[key] != where[key]}:
            now = {key: where[key] for key in unlike}
            raise ValueError(f"For '--out', {self.out} has a run of {unlike}; this is one of {now}.\n  rule:     What is "
                             "done is skipped, so a folder is of one cluster.\n  fix:      another --out")

    def put_damaged_aside(self) -> None:
        """They are missing from now on."""
        for file in sorted(self.pieces_dir.glob("*.json")):
            try:
                read(file, PIECE)
            except ValueError as error:
                file.replace(file.with_suffix(".damaged"))
                print(f"{str(error).splitlines()[0]} It counts as missing, and is {file.stem}.damaged now.", flush=True)

    def left(self) -> list[suites.Piece]:
        return [p for p in self.pieces if not (self.pieces_dir / f"{p.name}.json").exists() and p.name not in self.tried]

    def all(self) -> None:
        """Launches, until nothing is left or the time is up."""
        self.put_damaged_aside()
        while left := self.left():
            if time.time() > self.until:
                print(f"the budget is spent; {len(left)} pieces are left: the same command goes on with them", flush=True)
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
        print(f"{len(pieces)} pieces on {len(hosts)} x {first.slots}: {', '.join(p.name for p in pieces)}", flush=True)
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
        print(f"  {len(pieces) - len(missing)} done in {time.time() - began:.0f} s", flush=True)
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
                print(f"  {piece.name} FAILED: {why.splitlines()[-1][:200]}  (logs: {logs})", flush=True)
        if guilty not in {p.name for p in missing}:  # what was at work is done, yet the launch failed
            self.tried.update(p.name for p in missing)


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def names(text: str) -> set[str]:
    found = set(text.split(","))
    if unknown := found - set(suites.BENCHMARKS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} are none of {', '.join(suites.BENCHMARKS)}")
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hostfile", type=Path, required=True)
    parser.add_argument("--budget-minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path(f"runs/cluster/{time.strftime('%Y-%m-%d')}"),
                        help="on a file system that all hosts share, if the checkpoint benchmark is to mean anything")
    parser.add_argument("--suite", choices=suites.SUITES, default="full")
    parser.add_argument("--only", type=names, default=set(suites.BENCHMARKS), metavar="NAMES",
                        help=", ".join(suites.BENCHMARKS))
    parser.add_argument("--peak", type=pair, action="append", default=[], metavar="DTYPE=TFLOPS",
                        help="what shares and MFU are of, e.g. bfloat16=376; without it the table's for this device, or n/a")
    parser.add_argument("--algorithm", action="append", default=[], metavar="HCCL_ALGO",
                        help="collectives once more with this HCCL_ALGO; may be given several times")
    parser.add_argument("--env", type=pair, action="append", default=[], metavar="KEY=VALUE", help="for all ranks")
    parser.add_argument("--setup", default="", help="a shell command before msrun on the other nodes: source .../set_env.sh")
    parser.add_argument("--ssh", default="ssh -tt -o BatchMode=yes", help="how to reach them")
    parser.add_argument("--cpu-backend", choices=("mccl", "shm"), default="mccl",
                        help="on CPUs: MindSpore's own, under both interfaces, or this library's for one host")
    options = parser.parse_args(argv)
    options.peak = {dtype: float(value) for dtype, value in options.peak}
    options.env = {**({"OMP_NUM_THREADS": "1"} if options.suite == "toy" else {}), **dict(options.env)}
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        run = Run(options)
        run.describe()
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    interrupted = False
    try:
        run.all()
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; the same command goes on")
    page = run.out / "report.html"
    page.write_text(report.page([run.out]), encoding="utf-8")
    failed = sorted(p.stem for p in run.pieces_dir.glob("*.failed"))
    print(f"{len(run.pieces) - len(run.left()) - len(run.tried)} of {len(run.pieces)} pieces are done"
          f"{f', {len(failed)} failed: ' + ', '.join(failed) if failed else ''}\nreport: {page}", flush=True)
    return 130 if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
