# SPDX-License-Identifier: Apache-2.0
"""What a pipeline says when a rank is killed at any point of a step.

    python -m tests.long.check_pipeline [--runs 50] [--ranks 4] [--seed 0] [--limit 0.2]

In a forward, in a backward (whole, or one of its parts), at a send, at a receive, at the step's end; of a random rank and
microbatch, all schedules: every other rank gets PeerLost that names rank and pid.

Prints JSON with the seconds from the signal to the last rank's error; exits non-zero if anything is missing, or if more than
the limit passed (give a busy machine more). Ranks are forked from one process that has loaded MindSpore and run nothing.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "4")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mindspore as ms  # noqa: E402
from mindspore import Tensor, mint, nn  # noqa: E402

import ms_dtensor as md  # noqa: E402
from ms_dtensor.dispatch import recording  # noqa: E402
from ms_dtensor.pipeline import Action, Overlap, Recv, Send  # noqa: E402
from ms_dtensor.pipeline.schedule import Schedule  # noqa: E402
from ms_dtensor.pipeline.split import pipeline  # noqa: E402
from ms_dtensor.pipeline.step import Step  # noqa: E402
from ms_dtensor.pipeline.transfer import Edge  # noqa: E402
from tests.long.forked import world  # noqa: E402
from tests.pipeline import cases_run  # noqa: E402

KINDS = tuple(cases_run.KINDS.values())
MICRO, ROWS, WIDTH = 8, 16, 8


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, WIDTH)

    def construct(self, x):
        return x + mint.tanh(self.up(x))


def schedule_of(kind: type[Schedule], v: int, size: int) -> Schedule:
    ms.set_seed(1)
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    net = nn.SequentialCell(*(Block() for _ in range(2 * size)))
    style = "v" if kind in [cases_run.KINDS[name][0] for name in cases_run.VEES] else "loop"
    return kind(pipeline(net, mesh, n_stages=v * size, style=style), MICRO, lambda y, t: ((y - t) ** 2).mean())


def batch() -> tuple[Tensor, Tensor]:
    x = Tensor([[((7 * i + 3 * j) % 11) / 11 for j in range(WIDTH)] for i in range(ROWS)], ms.float32)
    return x, x * 0.5 + 0.1


class Strike:
    """Kills this rank at a point of a step, an event's text and the part of it, or the step's end; writes when to `note`."""

    def __init__(self, note: int):
        self.note, self.event, self.part, self.step = note, "", "", None
        for owner, name, part, before in ((Edge, "_post", "send", True), (Edge, "_take", "receive", True),
                                          (Step, "loss", "end", True), (recording, "run_backward", "backward", False)):
            given = getattr(owner, name)

            def around(*args, given=given, part=part, before=before, **kwargs):
                if before:
                    self.come(part)
                out = given(*args, **kwargs)
                if not before:  # the engine has run: what was recorded is used up
                    self.come(part)
                return out
            setattr(owner, name, around)
        run = Step.run

        def noted(step):
            self.step = step
            return run(step)
        Step.run = noted

    def watch(self, schedule: Schedule) -> None:
        for stage in schedule.stages.values():
            stage.module.register_forward_pre_hook(lambda cell, args: self.come("forward"))

    def come(self, part: str) -> None:
        if part == self.part and (part == "end" or self.step.at == f"in {self.event}"):
            os.write(self.note, f"{time.time()} {self.event}".encode())
            os.kill(os.getpid(), signal.SIGKILL)


def points(schedule: Schedule, rank: int) -> dict[str, list[str]]:
    """Where a rank can be struck, by part."""
    events, owner = schedule._lowered.ranks[rank], schedule.actions.owner
    actions = [part for e in events if isinstance(e, Action | Overlap) for part in e.parts]
    return {"forward": [str(a) for a in actions if a.kind == "F"], "backward": [str(a) for a in actions if a.kind != "F"],
            "send": [str(e) for e in events if isinstance(e, Send)],
            "receive": [str(a) for a in actions if any(owner[s] != rank for _, s, _ in a.inputs(len(owner)))]
            if any(isinstance(e, Recv) for e in events) else [], "end": [""]}


PARTS = ("forward", "backward", "send", "receive", "end")


def step_of(schedule: Schedule) -> None:
    x, t = batch()
    schedule.step(x, target=t)


def kills(args) -> tuple[dict[str, str], list[float]]:
    """What was wrong, by run and rank; and how long the news took."""
    rng, bad, seconds = random.Random(args.seed), dict[str, str](), []
    for i in range(args.runs):
        kind, v = KINDS[i % len(KINDS)]
        victim, part, number = rng.randrange(args.ranks), PARTS[i % len(PARTS)], rng.random()

        read, note = os.pipe()

        def run(rank: int, kind=kind, v=v, victim=victim, part=part, number=number, note=note) -> None:
            strike = Strike(note)
            schedule = schedule_of(kind, v, args.ranks)
            strike.watch(schedule)
            step_of(schedule)
            if rank == victim:
                found = points(schedule, victim)[part]
                strike.event, strike.part = found[int(number * len(found))], part
            step_of(schedule)
        reports = world(args.ranks, run)
        os.close(note)
        with os.fdopen(read) as f:
            killed, _, event = f.read().partition(" ")
        what = f"{i}: {kind.__name__} {part} {event} of rank {victim}"
        name = f"rank {victim} (pid {reports[victim]['pid']}) died"
        for rank, r in reports.items():
            if rank != victim and (r.get("error") != "PeerLost" or name not in r["text"]):
                bad[f"{what}, rank {rank}"] = f"{r.get('error')}: {r.get('text')}"
        if killed:
            seconds.append(max(r.get("at", float("inf")) for rank, r in reports.items() if rank != victim) - float(killed))
        else:
            bad[what] = "nobody was killed"
    return bad, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8), help="interleaved wants them to divide 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0.2)
    args = parser.parse_args()
    bad, seconds = kills(args)
    slow, seconds = sum(s > args.limit for s in seconds), sorted(seconds) or [-1.0]
    print(json.dumps({
        "ranks": args.ranks, "seed": args.seed, "limit": args.limit, "load": round(os.getloadavg()[0], 1), "runs": args.runs,
        "wrong": len(bad), "over_limit": slow, "median_seconds": round(seconds[len(seconds) // 2], 3),
        "slowest_seconds": round(seconds[-1], 3), "failures": dict(list(bad.items())[:4])}, indent=1))
    return int(bool(bad or slow))


if __name__ == "__main__":
    sys.exit(main())
