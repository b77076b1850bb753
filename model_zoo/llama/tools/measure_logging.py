# SPDX-License-Identifier: Apache-2.0
"""What all logging adds to a step: steps with it and without it in one run, in turn.

    python model_zoo/llama/tools/measure_logging.py [--workers 2] [--steps 200] [--out FILE] [--section.key value ...]

Logging is the line, `metrics.jsonl`, TensorBoard if it is installed, and the tally of communication. Two answers: the
medians of steps with and without, and the time that is spent in it, measured inside, which no other load of the machine
blurs. The second is held to 1 %.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama.configio import dump, load  # noqa: E402
from model_zoo.llama.data import load_text  # noqa: E402
from model_zoo.llama.launch import Run, first_failure  # noqa: E402
from ms_dtensor.tools.ranks import guarded, start_device, world_size  # noqa: E402

BOUND = 0.01
CONFIG = ROOT / "model_zoo/llama/configs/quickstart.yaml"


def measure(out: str, steps: int, words: list[str]) -> None:
    """What a rank does."""
    cfg, _ = load([*words, "--train.log_dir", str(Path(out).parent / "run")], world_size())
    text = load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq)
    device = start_device()
    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.report import Reporter
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor.comm import tally as tallies

    mesh = make_mesh(device, cfg.parallel)
    report = Reporter(cfg, world_size(), mesh.get_rank() == 0, None, device)
    report.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(cfg, text, mesh)
    report.begin(0, dump(cfg))
    tally, times, inside, calls = tallies.running, {True: [], False: []}, [], 0
    for step in range(steps + 4):
        on = step % 4 in (0, 3)  # on off off on: a drift falls on both alike
        tallies.running = tally if on else None
        started = time.perf_counter()
        if on:
            report.start_step()
            begun = time.perf_counter()
        result = trainer.step(step)
        if on:
            ended = time.perf_counter()
            calls = 0 if tally is None else sum(line.calls for line in tally.lines.values())
            report.step(step, result)
            inside.append(time.perf_counter() - ended + begun - started)
        times[on].append(time.perf_counter() - started)
    tallies.running = tally
    report.close()
    if report.speaks:
        told = summary({on: t[2:] for on, t in times.items()}, inside[2:], calls, cost_of_a_call())
        told |= {"workers": world_size(), "steps": steps, "trackers": list(cfg.metrics.trackers), "config": words}
        Path(out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def cost_of_a_call() -> float:
    """Seconds that a tally adds to one collective."""
    from mindspore import ops

    from ms_dtensor.comm import fake_world, group
    from ms_dtensor.comm.tally import Tally
    x, best = ops.ones((8, 8)), {}
    with fake_world(2):
        reduced = group((0, 1), ("tp",))
        for on in (False, True) * 3:
            tally = Tally()
            if on:
                tally.__enter__()
            started = time.perf_counter()
            for _ in range(2000):
                reduced.all_reduce(x)
            seconds = (time.perf_counter() - started) / 2000
            if on:
                tally.__exit__()
            best[on] = min(best.get(on, seconds), seconds)
    return best[True] - best[False]


def summary(times: dict[bool, list[float]], inside: list[float], calls: int, a_call: float) -> dict:
    """Milliseconds, and shares of a step without logging."""
    on, off = (statistics.median(times[which]) for which in (True, False))
    spent = statistics.median(inside) + calls * a_call
    return {"ms_without": off * 1e3, "ms_with": on * 1e3, "difference": on / off - 1, "collectives": calls,
            "us_spent": spent * 1e6, "us_of_lines": statistics.median(inside) * 1e6, "us_a_collective": a_call * 1e6,
            "share": spent / off}


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.rank_of:
        return guarded(lambda: measure(options.rank_of, options.steps, rest))
    trackers = ["--metrics.trackers", "tensorboard"] if importlib.util.find_spec("tensorboard") else []
    words = ["--config", str(CONFIG), "--parallel.dp", "1", "--parallel.tp", str(options.workers), *trackers, *rest]
    with tempfile.TemporaryDirectory(prefix="ms_dtensor_logging_") as folder:
        out = Path(folder) / "told.json"
        arguments = ["--rank-of", str(out), "--steps", str(options.steps), *words]
        if Run(Path(__file__).resolve(), options.workers, Path(folder), arguments, show=False).wait():
            print(first_failure(Path(folder)), file=sys.stderr)
            return 1
        told = json.loads(out.read_text())
    print(json.dumps(told, indent=1))
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"logging takes {told['us_spent']:.0f} us of a step of {told['ms_without']:.1f} ms: {told['share']:.2%}")
    return 0 if told["share"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
