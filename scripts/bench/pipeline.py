# SPDX-License-Identifier: Apache-2.0
"""Pipelines: spans against the simulated ones, what the runtime costs, what is held; and PyTorch's with the same orders.

    python scripts/bench/pipeline.py [span] [cost] [memory] [torch] [--ranks 8] [--micro 16] [--sleep 20] [--steps 5]
                                     [--torch-python PYTHON] [--svg FOLDER] [--no-save]

span    each action sleeps for its share of --sleep milliseconds (F, I and W each, of all stages of a rank) beside a product
        of 4 x 4, so that many ranks run on few cores: the span of a traced step over the simulated one. Sleeps do not hide
        that 2 cores run 8 ranks; `busy` is how many cores the ranks themselves used
cost    without sleeps: processor time of an action of one rank, messages included, less that of the same recordings alone
memory  how much resident memory grows within a step with each forward that the simulation says is held more, over what one
        recording alone adds; and of orders that hold as many for any number of microbatches, how much they grow with it
torch   the same orders and sleeps with torch.distributed.pipelining over gloo: wall time of a step, beside ours

PyTorch runs in --torch-python (default: this one); where it cannot be loaded the part says so. Prints JSON. Ranks are forks.
"""
from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import finish, one_thread  # noqa: E402

one_thread()

import mindspore as ms  # noqa: E402
from mindspore import mint, nn  # noqa: E402

import ms_dtensor as md  # noqa: E402
from ms_dtensor.dispatch.recording import HeldRecording, Recording  # noqa: E402
from ms_dtensor.pipeline import draw, simulate  # noqa: E402
from ms_dtensor.pipeline.schedule import (  # noqa: E402
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
)
from ms_dtensor.pipeline.split import pipeline  # noqa: E402
from ms_dtensor.pipeline.step import Step  # noqa: E402
from tests.long.forked import world  # noqa: E402

KINDS = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
         "zbh1": (ScheduleZBH1, 1), "zbv": (ScheduleZBVZeroBubble, 2), "dualpipev": (ScheduleDualPipeV, 2)}


class Block(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Dense(width, width, has_bias=False)  # as PyTorch's beside it

    def construct(self, x):
        return mint.tanh(self.up(x))


def made(name: str, ranks: int, micro: int, width: int = 4):
    kind, v = KINDS[name]
    mesh = md.init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    net = nn.SequentialCell(*(Block(width) for _ in range(v * ranks)))
    stages = pipeline(net, mesh, n_stages=v * ranks, style="v" if name in ("zbv", "dualpipev") else "loop")
    return kind(stages, micro, lambda y, t: ((y - t) ** 2).mean())


def order(name: str, ranks: int, micro: int):
    kind, v = KINDS[name]
    return kind.build(ranks, micro, v)


def of_all(reports: dict[int, dict]) -> list:
    """What the ranks returned."""
    wrong = {rank: one for rank, one in reports.items() if "result" not in one}
    if wrong:
        raise SystemExit(f"ranks ended: {wrong}")
    return [one["result"] for one in reports.values()]


# -- spans ---------------------------------------------------------------------------------------------------------------
def span(args) -> dict:
    """Of each order: median span of traced steps, over the simulated."""
    shares = {"F": 1, "I": 1, "W": 1, "B": 2}

    def run(rank: int) -> dict:
        out = {}
        compute = {"F": Step.forward, "B": Step.backward}
        sleep = [0.0]

        def slow(kind):
            def action(step, action):
                compute["F" if kind == "F" else "B"](step, action)
                time.sleep(sleep[0] * shares[action.kind])
            return action
        Step.forward, Step.backward = slow("F"), slow("B")
        for name in KINDS:
            schedule = made(name, args.ranks, args.micro)
            sleep[0] = args.sleep / 1000 / KINDS[name][1]
            x = ms.ops.ones((args.micro, 4))
            schedule.step(x, target=x)
            spans, walls, used = [], [], time.process_time()
            for _ in range(args.steps):
                start = time.time()
                schedule.step(x, target=x, trace=True)
                walls.append(time.time() - start)
                spans.append(schedule.timeline.span)
            if rank == 0 and args.svg:
                args.svg.mkdir(parents=True, exist_ok=True)
                for what, timeline in (("measured", schedule.timeline), ("simulated", simulate(schedule.actions, {
                        kind: args.sleep / 1000 for kind in "FIW"}))):
                    (args.svg / f"{name}_{what}.svg").write_text(draw(timeline, "svg"), "utf-8")
            out[name] = spans, walls, (time.process_time() - used) / sum(walls)
        return out
    results = of_all(world(args.ranks, run, 3600))
    out = {}
    for name in KINDS:
        simulated = simulate(order(name, args.ranks, args.micro)).span * args.sleep / 1000
        spans, walls, _ = results[0][name]
        out[name] = {"simulated": round(simulated, 4), "measured": round(statistics.median(spans), 4),
                     "least": round(min(spans), 4), "over": round(statistics.median(spans) / simulated, 3),
                     "wall": round(statistics.median(walls), 4), "busy": round(sum(r[name][2] for r in results), 2)}
    by = {key: sorted(KINDS, key=lambda n, key=key: (out[n][key], n)) for key in ("simulated", "measured")}
    return {"orders": out, "ranking": by["measured"], "ranking_simulated": by["simulated"], "sleep_ms": args.sleep,
            "ranks": args.ranks, "micro": args.micro}


# -- what the runtime costs ----------------------------------------------------------------------------------------------
def cost(args) -> dict:
    """Microseconds of processor time an action, of rank 1 of 2, least of several steps."""
    def run(rank: int) -> dict:
        out = {}
        for name in KINDS:
            schedule = made(name, 2, 16)
            x = ms.ops.ones((16, 4))
            times = []
            for _ in range(12):
                start = time.process_time()
                schedule.step(x, target=x)
                times.append(time.process_time() - start)
            actions = [a for e in schedule.actions.ranks[rank] for a in e.parts]
            parts = {a.stage for a in actions if a.kind == "I"}
            alone = []
            for _ in range(12):
                start = time.process_time()
                for s, stage in schedule.stages.items():
                    for _ in range(16):
                        last = stage.is_last

                        def forward(x, stage=stage, last=last):
                            return ((stage.module(x) - x) ** 2).mean() if last else stage.module(x)
                        rec = (HeldRecording if s in parts else Recording).of(forward, x[:1])
                        if s in parts:
                            rec.backward_inputs(None if last else [x[:1]], stage.params())
                            rec.backward_weights(stage.params())
                        else:
                            rec.backward(None if last else [x[:1]], stage.params())
                alone.append(time.process_time() - start)
            out[name] = {"action_us": round(min(times) / len(actions) * 1e6, 1),
                         "recordings_us": round(min(alone) / len(actions) * 1e6, 1),
                         "runtime_us": round((min(times) - min(alone)) / len(actions) * 1e6, 1)}
        return out
    return of_all(world(2, run, 600))[1]


# -- memory --------------------------------------------------------------------------------------------------------------
def resident() -> int:
    with open("/proc/self/statm", "rb") as f:
        return int(f.read().split()[1]) * 4096


def memory(args) -> dict:
    """Growth of rank 0 of 2 within a step, its blocks' saved tensors being all that is large."""
    width, rows, deep = 512, 2048, 4
    one = width * rows * 4

    def growth(name: str, micro: int) -> tuple[float, float]:
        """Of a step, and of one recording more; in tensors."""
        def run(rank: int) -> tuple[float, float]:
            class Deep(nn.Cell):
                def __init__(self) -> None:
                    super().__init__()
                    self.blocks = nn.CellList([Block(width) for _ in range(deep)])

                def construct(self, x):
                    for block in self.blocks:
                        x = block(x)
                    return x
            kind, v = KINDS[name]
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
            net = nn.SequentialCell(*(Deep() for _ in range(2 * v)))
            schedule = kind(pipeline(net, mesh, split=[[str(i)] for i in range(2 * v)],
                                     style="v" if name in ("zbv", "dualpipev") else "loop"), micro,
                            lambda y, t: ((y - t) ** 2).mean())
            made_there, most, compute = ms.ops.ones((micro * rows, width)), [0], Step._compute

            def watched(step, action):
                compute(step, action)
                most[0] = max(most[0], resident())
            Step._compute = watched
            gc.collect()
            before = resident()
            schedule.step(made_there, target=made_there)
            step, Step._compute = (most[0] - before) / one, compute
            stage, kept = next(iter(schedule.stages.values())), []
            in_parts = any(a.kind == "I" for e in schedule.actions.ranks[rank] for a in e.parts)
            x, sizes = made_there[:rows], []
            for _ in range(4 * micro):  # more than what the step has left for reuse
                kept.append(stage.record((x,), {}, None, in_parts))
                sizes.append(resident())
            return step, (sizes[-1] - sizes[2 * micro - 1]) / (2 * micro) / one
        return of_all(world(2, run, 600))[0]
    out: dict = {"unit": f"MiB-sized tensors of {one / 2**20:g} MiB, on rank 0", "of": {}}
    for name in ("gpipe", "1f1b", "zbh1"):
        points = []
        for micro in (2, 4, 8, 12):
            held = simulate(order(name, 2, micro)).held[0]
            points.append((micro, held, *(round(x, 2) for x in growth(name, micro))))
        out["of"][name] = {"micro, held, growth, one alone": points}
        (_, h0, g0, _), (_, h1, g1, unit) = points[0], points[-1]
        if h1 > h0:
            out["of"][name]["per_held_over_one_alone"] = round((g1 - g0) / (h1 - h0) / unit, 3)
        else:
            out["of"][name]["growth_with_micro_over_one_alone"] = round((g1 - points[1][2]) / unit, 3)
    return out


# -- PyTorch -------------------------------------------------------------------------------------------------------------
def torch(args) -> dict:
    run = subprocess.run([args.torch_python, str(Path(__file__).with_name("torch_pipeline.py")), str(args.ranks),
                          str(args.micro), str(args.sleep), str(args.steps)], capture_output=True, text=True, check=False,
                         timeout=1800)
    if run.returncode:
        return {"skipped": f"{args.torch_python}: {(run.stderr.strip().splitlines() or ['no word'])[-1][:300]}"}
    return json.loads(run.stdout.strip().splitlines()[-1])


def main() -> None:
    parts = {"span": span, "cost": cost, "memory": memory, "torch": torch}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=(*parts, []), default=[])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--sleep", type=float, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    out = {name: part(args) for name, part in parts.items() if not args.parts or name in args.parts}
    finish("pipeline", out, save=not args.no_save)


if __name__ == "__main__":
    main()
