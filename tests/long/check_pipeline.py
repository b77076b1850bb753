# SPDX-License-Identifier: Apache-2.0
"""What a pipeline says when a rank is killed or raises at any point of a step, and whether the next step is right.

    python -m tests.long.check_pipeline [exceptions] [kills] [orders] [steps] [--runs 50] [--ranks 4]
        [--seed 0] [--limit 0.2]

exceptions  in a forward, in a backward (whole, or one of its parts), at a send, at a receive, at the step's end; of a
            random rank and microbatch, all schedules: every other rank gets PeerLost that names exception, action and
            rank; caught on all, the next step gives the bits of the steps before
kills       SIGKILL at the same points: every other rank gets PeerLost that names rank and pid
orders      two actions swapped on one rank: CollectiveMismatch on all at the first step, with the first differing action
steps       1000 steps without an error

Prints JSON with the seconds from the event to the last rank's error; exits non-zero if anything is missing, or if more than
the limit passed (give a busy machine more). Ranks are forked from one process that has loaded MindSpore and run nothing.
"""
import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_v", "4")

import mindspore as ms  # noqa: E402
from mindspore import Tensor, mint, nn  # noqa: E402

import ms_dtensor as md  # noqa: E402
from ms_dtensor.dispatch import recording  # noqa: E402
from ms_dtensor.errors import CollectiveMismatch, PeerLost  # noqa: E402
from ms_dtensor.pipeline import Action, Actions, Overlap, Recv, Send, check  # noqa: E402
from ms_dtensor.pipeline.schedule import Schedule  # noqa: E402
from ms_dtensor.pipeline.split import pipeline  # noqa: E402
from ms_dtensor.pipeline.step import Step  # noqa: E402
from ms_dtensor.pipeline.transfer import Edge  # noqa: E402
from tests.long.forked import world  # noqa: E402
from tests.pipeline import cases_run  # noqa: E402

KINDS = tuple(cases_run.KINDS.values())
MICRO, ROWS, WIDTH = 8, 16, 8


class Boom(Exception):
    pass


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, WIDTH)

    def construct(self, x):
        return x + mint.tanh(self.up(x))


def schedule_of(kind: type[Schedule], v: int, size: int, actions: Actions | None = None) -> Schedule:
    ms.set_seed(1)
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    net = nn.SequentialCell(*(Block() for _ in range(2 * size)))
    style = "v" if kind in [cases_run.KINDS[name][0] for name in cases_run.VEES] else "loop"
    return kind(pipeline(net, mesh, n_stages=v * size, style=style), MICRO, lambda y, t: ((y - t) ** 2).mean(),
                actions=actions)


def batch() -> tuple[Tensor, Tensor]:
    x = Tensor([[((7 * i + 3 * j) % 11) / 11 for j in range(WIDTH)] for i in range(ROWS)], ms.float32)
    return x, x * 0.5 + 0.1


class Strike:
    """Does something, once, at a point of a step: `where` is an event's text and the part of it, or the step's end."""

    def __init__(self, what: Callable[[], None]):
        self.what, self.event, self.part, self.step = what, "", "", None
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
            self.part = ""
            self.what()


def points(schedule: Schedule, rank: int) -> dict[str, list[str]]:
    """Where a rank can be struck, by part."""
    events, owner = schedule._lowered.ranks[rank], schedule.actions.owner
    actions = [part for e in events if isinstance(e, Action | Overlap) for part in e.parts]
    return {"forward": [str(a) for a in actions if a.kind == "F"], "backward": [str(a) for a in actions if a.kind != "F"],
            "send": [str(e) for e in events if isinstance(e, Send)],
            "receive": [str(a) for a in actions if any(owner[s] != rank for _, s, _ in a.inputs(len(owner)))]
            if any(isinstance(e, Recv) for e in events) else [], "end": [""]}


PARTS = ("forward", "backward", "send", "receive", "end")


def step_of(schedule: Schedule) -> list:
    x, t = batch()
    loss, grads = schedule.step(x, target=t)
    return [loss.asnumpy().tobytes(), *(g.asnumpy().tobytes() for g in grads)]


# -- exceptions ----------------------------------------------------------------------------------------------------------
def exceptions(args) -> dict:
    """All in one world: it goes on after each."""
    def run(rank: int) -> list[dict]:
        when: list[float] = []

        def strike_now() -> None:
            when.append(time.time())
            raise Boom("struck")
        strike, out, rng = Strike(strike_now), [], random.Random(args.seed)
        made = []
        for kind, v in KINDS:
            schedule = schedule_of(kind, v, args.ranks)
            strike.watch(schedule)
            step_of(schedule)
            made.append((schedule, step_of(schedule)))
        for i in range(args.runs):
            schedule, want = made[i % len(made)]
            victim, part = rng.randrange(args.ranks), PARTS[i % len(PARTS)]
            event = rng.choice(points(schedule, victim)[part])
            if rank == victim:
                strike.event, strike.part = event, part
            one = {"what": f"{type(schedule).__name__} {part} {event} of rank {victim}", "wrong": ""}
            try:
                step_of(schedule)
                one["wrong"] = "nothing raised"
            except (Boom, PeerLost) as error:
                one["at"] = time.time()
                place = f"{f'in {event}' if event else 'at the step'}"
                said = str(error) + "".join(getattr(error, "__notes__", ()))
                named = f"on rank {victim} of the pipeline" in said and place in said and (rank == victim or "Boom" in said)
                named = named and isinstance(error, Boom) == (rank == victim)
                if not named and hasattr(error, "__notes__"):  # notes are of Python 3.11
                    one["wrong"] = f"not named: {said}"
            except BaseException as error:
                one["wrong"] = f"{type(error).__name__}: {error}"
            if rank == victim and when:
                one["struck"] = when.pop()
            if step_of(schedule) != want:
                one["wrong"] = one["wrong"] or "the next step has other bits"
            out.append(one)
        return out
    reports = world(args.ranks, run, limit=30 + 3 * args.runs)
    bad = {f"rank {r}": report["text"] for r, report in reports.items() if "error" in report}
    lists = [report.get("result", []) for report in reports.values()]
    seconds = []
    for ones in zip(*lists):
        struck = next((one["struck"] for one in ones if "struck" in one), None)
        for rank, one in enumerate(ones):
            if one["wrong"]:
                bad[f"{one['what']}, rank {rank}"] = one["wrong"]
        if struck is not None and all("at" in one for one in ones):
            seconds.append(max(one["at"] for one in ones) - struck)
    return figures(args, args.runs, bad, seconds)


def figures(args, runs: int, bad: dict[str, str], seconds: list[float]) -> dict:
    slow = sum(s > args.limit for s in seconds)
    seconds = sorted(seconds) or [-1.0]
    return {"runs": runs, "measured": len(seconds), "wrong": len(bad), "over_limit": slow,
            "median_seconds": round(seconds[len(seconds) // 2], 3), "slowest_seconds": round(seconds[-1], 3),
            "failures": dict(list(bad.items())[:4])}


# -- kills ---------------------------------------------------------------------------------------------------------------
def kills(args) -> dict:
    rng, bad, seconds = random.Random(args.seed), {}, []
    for i in range(args.runs):
        kind, v = KINDS[i % len(KINDS)]
        victim, part, number = rng.randrange(args.ranks), PARTS[i % len(PARTS)], rng.random()

        read, note = os.pipe()

        def run(rank: int, kind=kind, v=v, victim=victim, part=part, number=number, note=note) -> None:
            strike = Strike(lambda: None)
            schedule = schedule_of(kind, v, args.ranks)
            strike.watch(schedule)
            step_of(schedule)
            if rank == victim:
                found = points(schedule, victim)[part]
                strike.event, strike.part = found[int(number * len(found))], part
                strike.what = lambda: (os.write(note, f"{time.time()} {strike.event}".encode()),
                                       os.kill(os.getpid(), signal.SIGKILL))
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
    return figures(args, args.runs, bad, seconds)


# -- other orders --------------------------------------------------------------------------------------------------------
def swapped(order: Actions, rng: random.Random) -> tuple[Actions, int]:
    """Two actions of one rank in each other's place, in an order that is right by itself."""
    while True:
        rank = rng.randrange(len(order.ranks))
        mine = list(order.ranks[rank])
        i, j = sorted(rng.sample(range(len(mine)), 2))
        mine[i], mine[j] = mine[j], mine[i]
        other = Actions((*order.ranks[:rank], tuple(mine), *order.ranks[rank + 1:]), order.owner)
        if not check(other):
            return other, rank


def orders(args) -> dict:
    rng, bad, runs = random.Random(args.seed), {}, max(1, args.runs // 5)
    for i in range(runs):
        kind, v = KINDS[i % len(KINDS)]
        odd, seed = rng.randrange(args.ranks), rng.random()

        def run(rank: int, kind=kind, v=v, odd=odd, seed=seed) -> None:
            order = kind.build(args.ranks, MICRO, v)
            other, _ = swapped(order, random.Random(seed))
            step_of(schedule_of(kind, v, args.ranks, other if rank == odd else order))
        order = kind.build(args.ranks, MICRO, v)
        other, at = swapped(order, random.Random(seed))
        place = next(p for p, (a, b) in enumerate(zip(order.ranks[at], other.ranks[at])) if a != b)
        for rank, r in world(args.ranks, run).items():
            text = r.get("text", "")
            if r.get("error") != CollectiveMismatch.__name__ or f"rank {at}, place {place} is" not in text or \
                    f"rank {odd}: {other.ranks[at][place]}\n" not in text + "\n":
                bad[f"{i}: {kind.__name__}, rank {rank}"] = f"{r.get('error')}: {text}"
    return {"runs": runs, "wrong": len(bad), "failures": dict(list(bad.items())[:4])}


# -- many steps ----------------------------------------------------------------------------------------------------------
def steps(args) -> dict:
    def run(rank: int) -> int:
        made = [schedule_of(kind, v, args.ranks) for kind, v in KINDS]
        wants = [step_of(one) for one in made]
        return sum(step_of(made[i % len(made)]) == wants[i % len(made)] for i in range(1000))
    start = time.time()
    reports = world(args.ranks, run, limit=1200)
    bad = {f"rank {r}": f"{one.get('text', one)}" for r, one in reports.items() if one.get("result") != 1000}
    return {"steps": 1000, "seconds": round(time.time() - start, 1), "wrong": len(bad), "failures": bad}


def main() -> int:
    parts = {"exceptions": exceptions, "kills": kills, "orders": orders, "steps": steps}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=(*parts, []), default=[])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8), help="interleaved wants them to divide 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=0.2)
    args = parser.parse_args()
    out: dict = {"ranks": args.ranks, "seed": args.seed, "limit": args.limit, "load": round(os.getloadavg()[0], 1)}
    for name, part in parts.items():
        if not args.parts or name in args.parts:
            out[name] = part(args)
    print(json.dumps(out, indent=1))
    return int(any(p.get("failures") or p.get("over_limit") for p in out.values() if isinstance(p, dict)))


if __name__ == "__main__":
    sys.exit(main())
