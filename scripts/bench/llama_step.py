# SPDX-License-Identifier: Apache-2.0
"""A Llama training step: one rank, and two in all the library's ways, by hand, and in PyTorch, in turns; peak memory.

    python scripts/bench/llama_step.py [--size small|medium|large|toy] [--rounds 6] [--variants single,tp,dp,...] [--no-save]

"small" is 21 M parameters (dim 512, 4 layers, 8192 words, 4 x 256 tokens), "experts" 47 M with 8 experts of 704 in the
place of each feed-forward, 2 for a token ("ep": experts and batch over two ranks; PyTorch's is torch_experts.py), "rows"
and "long" those of "small" with 2 x 2048 and 1 x 4096 tokens (for cp: beside dp at equal tokens, and beside PyTorch's
ring), "medium" 98 M (dim 768, 12 layers, 4 x 128 tokens), "toy" 0.66 M. Each variant has processes of its own, so that
peaks of resident memory are its own, too; one thread and one core a process. In every round each variant makes one step
while the others wait, so what else runs on the machine hits all alike, and every other round goes backwards; figures
are medians over rounds after the first two. "processor" is the time that all ranks together used of processors in a
step, which load of others changes less than a step's time; waiting ranks use some, too. All variants but "half at once"
begin with the same weights and make the same steps, which their losses show. "two at once" is the single-rank step on
both ranks at the same time, without communication: how far two ranks that never wait for each other hinder each other;
"half at once" the same on half a batch each: a data-parallel step whose reduction takes no time, the bound of data
parallelism on this machine. "hand" is the same model with Megatron's collectives written out in plain MindSpore
(megatron.py), without DTensors. "pp" is two stages, 1F1B, a microbatch each row of a rank; "pp4" four, "pptp" and "ppfsdp"
two beside two ranks each, "zbv" four in a V on two ranks, its backward in two parts. Stages are cut where the recipe cuts
by itself, PyTorch's at the same places. All of MindSpore's variants have `train.compile`.

All variants of "medium" or "large" (325 M, 2 x 64 tokens) at once want more memory than 24 GB: those behind a ";" start when
those before it have ended.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import finish, one_thread

one_thread()
import numpy as np  # noqa: E402  after the number of threads is set

from model_zoo.llama.config import (  # noqa: E402
    Config,
    ExpertsConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

SIZES = {
    "small": (ModelConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1408, vocab_size=8192), 4, 256),
    "rows": (ModelConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1408, vocab_size=8192), 2, 2048),
    "long": (ModelConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1408, vocab_size=8192), 1, 4096),
    "medium": (ModelConfig(dim=768, n_layers=12, n_heads=12, n_kv_heads=12, ffn_dim=2048, vocab_size=8192), 4, 128),
    "large": (ModelConfig(dim=1024, n_layers=24, n_heads=16, n_kv_heads=16, ffn_dim=2816, vocab_size=8192), 2, 64),
    "experts": (ModelConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=704, vocab_size=8192,
                            experts=ExpertsConfig(8, 2, balance=0.0)), 4, 256),
    "toy": (ModelConfig(dim=128, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=352, vocab_size=1024), 4, 64),
}


WAYS = {"tp": ParallelConfig(tp=2), "dp": ParallelConfig(dp=2), "fsdp": ParallelConfig(dp=2, fsdp=True),
        "zero1": ParallelConfig(dp=2, zero1=True), "pp": ParallelConfig(pp=2), "cp": ParallelConfig(cp=2),
        "ring": ParallelConfig(cp=2, cp_algorithm="ring"), "ep": ParallelConfig(dp=2, ep=2),
        "pp4": ParallelConfig(pp=4), "pptp": ParallelConfig(pp=2, tp=2), "ppfsdp": ParallelConfig(pp=2, dp=2, fsdp=True),
        "zbv": ParallelConfig(pp=2, pp_schedule="zbv", pp_stages_per_rank=2)}
STAGED = tuple(way for way, parallel in WAYS.items() if parallel.pp > 1)
CORES = sorted(os.sched_getaffinity(0))
OF_EXPERTS = ("single", "two at once", "half at once", "ours ep", "ours dp", "torch single", "torch ep")
ALONE = ("single", "two at once", "half at once")  # without a mesh
VARIANTS = (*ALONE, *(f"ours {way}" for way in WAYS if way not in ("ep", *STAGED[1:])), "hand tp", "hand dp",
            *(f"torch {way}" for way in ("single", "tp", "dp", "fsdp", "cp", "pp")))
MORE = ("ours ep", "torch ep", *(f"{whose} {way}" for way in STAGED[1:] for whose in ("ours", "torch")))


def config(size: str, parallel: ParallelConfig = ParallelConfig()) -> Config:  # noqa: B008  frozen
    model, batch, seq = SIZES[size]
    micro = batch // parallel.dp if parallel.pp > 1 else 1
    return Config(model=model, parallel=parallel,
                  train=TrainConfig(batch=batch, seq=seq, compile=parallel.cp == 1, micro_batches=micro),
                  optim=OptimConfig(clip_norm=0.0))


def data(cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """A global batch, skewed like words."""
    draw = np.random.default_rng(0).random((cfg.train.batch, cfg.train.seq + 1)) ** 4
    tokens = (draw * cfg.model.vocab_size).astype(np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


class Turns:
    """Whose turn it is, told through a folder: processes of several libraries have nothing else in common."""

    def __init__(self, folder: str):
        self.folder, self.seen = Path(folder), ""

    def wait(self, who: str) -> bool:
        """Returns True when it is `who`'s turn, False when all is over."""
        while True:
            try:
                turn = (self.folder / "turn").read_text()
            except FileNotFoundError:
                turn = ""
            if turn == "end":
                return False
            if turn != self.seen and turn.startswith(who + " "):
                self.seen = turn
                return True
            time.sleep(0.02)

    def done(self, answer_of_rank_0: dict) -> None:
        answer = self.folder / "answer.new"
        answer.write_text(json.dumps([self.seen, answer_of_rank_0]))
        answer.rename(self.folder / "answer")

    def ask(self, who: str, number: int, processes, limit: float = 200) -> dict:
        """The parent's side: gives the turn, and waits for the answer."""
        turn, until = f"{who} {number}", time.monotonic() + limit
        self._say(turn)
        while time.monotonic() < until:
            if any(p.poll() is not None for p in processes):
                raise RuntimeError(f"{who}: a process ended; see {self.folder}")
            try:
                name, answer = json.loads((self.folder / "answer").read_text())
                if name == turn:
                    print(f"{turn}: {answer['seconds']:.2f} s, peak {answer['peak_mib']} MiB", file=sys.stderr, flush=True)
                    return answer
            except FileNotFoundError:
                pass
            time.sleep(0.005)
        raise TimeoutError(f"{who} took more than {limit} s")

    def end(self) -> None:
        self._say("end")

    def _say(self, turn: str) -> None:
        (self.folder / "turn.new").write_text(turn)
        (self.folder / "turn.new").rename(self.folder / "turn")


def peaks() -> dict:
    """MiB: the most that this process ever held, and since `forget_peak`."""
    kb = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    return {"peak_mib": round(kb / 1024), "ever_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def take_turns(turns: Turns, who: str, rank: int, step, barrier) -> None:
    """A rank's side: a step whenever it is asked for one."""
    number = 0
    while turns.wait(who):
        if number == 1:
            forget_peak()  # building the model, and what is made once, is over
        number += 1
        barrier()
        start, used = time.perf_counter(), time.process_time()
        loss = step()
        processor = turns.folder / f"{who} {rank}.processor"
        processor.write_text(str(time.process_time() - used))
        barrier()  # a step takes as long as its slowest rank
        seconds = time.perf_counter() - start
        if rank == 0:
            of_all = sum(float(path.read_text()) for path in turns.folder.glob(f"{who} *.processor"))
            turns.done({"seconds": seconds, "processor": of_all, "loss": loss, **peaks()})


def rank_main(who: str, size: str, folder: str) -> None:
    """What each MindSpore rank of a variant runs."""
    import megatron

    from model_zoo.llama.parallelize import make_mesh
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import init_device_mesh

    library, _, way = who.partition(" ")
    ranks = ranks_of(who)
    cfg = config(size, WAYS.get(way, ParallelConfig()))
    mesh = make_mesh("cpu", cfg.parallel) if way in WAYS else None
    group = init_device_mesh("cpu", (ranks,)).get_group()
    rank = group.rank_index
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    batch = tuple(x[:len(x) // 2] for x in data(cfg)) if who == "half at once" else data(cfg)
    if library == "hand":
        by_hand = megatron.Step(cfg, group, rank)
        step = lambda: by_hand.step(*batch)  # noqa: E731
    else:
        trainer = Trainer(cfg, None, mesh)

        def step():
            loss, grads = trainer.gradients(*batch)
            trainer.optimizer(grads)
            return float(loss)
    take_turns(Turns(folder), who, rank, step, group.barrier)


def torch_main(rank: str, who: str, size: str, folder: str) -> None:
    import torch_llama
    import torch_stages

    os.sched_setaffinity(0, {CORES[int(rank) % len(CORES)]})  # as ours
    way = who.removeprefix("torch ")
    cfg, store = config(size, WAYS[way] if way in STAGED else ParallelConfig()), f"{folder}/store_{way}"
    if way in STAGED:
        cells = json.loads((Path(folder) / f"{way}.cells").read_text())
        step, barrier = torch_stages.prepare(WAYS[way], int(rank), ranks_of(who), cfg, data(cfg), store, cells)
    else:
        step, barrier = torch_llama.prepare(way, int(rank), ranks_of(who), cfg, data(cfg), store)
    take_turns(Turns(folder), who, int(rank), step, barrier)


def ranks_of(who: str) -> int:
    way = who.rpartition(" ")[2]
    return 1 if way == "single" else WAYS[way].pp * WAYS[way].dp * WAYS[way].tp if way in STAGED else 2


def start(who: str, size: str, folder: str) -> list[subprocess.Popen]:
    """The processes of a variant."""
    from model_zoo.llama.launch import environment, msrun_command

    script, ranks = Path(__file__).resolve(), ranks_of(who)
    name, way = who.replace(" ", "_"), who.removeprefix("torch ")
    if way in STAGED:  # asked of a process of its own: MindSpore's threads would take time here
        tell = "import json, llama_step as l, model_zoo.llama.memory as m; " \
            f"print(json.dumps(m.cells_of_stages(l.config({size!r}, l.WAYS[{way!r}]))))"
        told = subprocess.run([sys.executable, "-c", tell], cwd=script.parent, capture_output=True, text=True, check=True)
        (Path(folder) / f"{way}.cells").write_text(told.stdout)
    if not who.startswith("torch "):
        logs = Path(folder) / name
        logs.mkdir()
        return [subprocess.Popen(msrun_command(script, ranks, logs, ["--rank", who, size, folder]), env=environment(),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)]
    processes = []
    for rank in range(ranks):
        with open(f"{folder}/{name}_{rank}.log", "wb") as log:
            processes.append(subprocess.Popen([sys.executable, str(script), "--torch", str(rank), who, size, folder],
                                              stdout=log, stderr=subprocess.STDOUT, env=environment()))
    return processes


def measure(variants, size: str, rounds: int) -> dict[str, list[dict]]:
    """Each variant's answers, round by round."""
    folder = tempfile.mkdtemp(prefix="ms_dtensor_llama_step_")
    processes, turns, seen = [], Turns(folder), {who: [] for who in variants}
    try:
        for who in variants:
            processes += start(who, size, folder)
            seen[who].append(turns.ask(who, 0, processes))  # one after the other: starting takes both cores
        for number in range(1, rounds + 2):
            for who in variants[::-1 if number % 2 else 1]:  # what ran before leaves its traces in the caches
                seen[who].append(turns.ask(who, number, processes))
    finally:
        turns.end()
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--variants", help=", ".join((*VARIANTS, *MORE)))
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--rank", nargs=3, metavar=("VARIANT", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--torch", nargs=4, metavar=("RANK", "VARIANT", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(*args.rank)
        return
    if args.torch:
        torch_main(*args.torch)
        return
    wanted = [some.split(",") for some in
              (args.variants or ",".join(OF_EXPERTS if args.size == "experts" else VARIANTS)).split(";")]
    if unknown := {who for some in wanted for who in some} - {*VARIANTS, *MORE}:  # "pp" would run as "single"
        parser.error(f"no variants: {', '.join(sorted(unknown))}; there are {', '.join((*VARIANTS, *MORE))}")
    seen: dict[str, list[dict]] = {}
    for together in wanted:
        seen |= measure(together, args.size, args.rounds)
    cfg = config(args.size)
    tokens = cfg.train.batch * cfg.train.seq
    times = {who: [answer["seconds"] for answer in answers[2:]] for who, answers in seen.items()}
    result, table = {}, [("", "ms", "least", "tokens/s", "speed-up", "processor ms", "peak MiB", "with start", "last loss")]
    for who, values in times.items():
        base = times.get("torch single" if who.startswith("torch") else "single", values)
        gain = statistics.median(b / v for b, v in zip(base, values))
        last = seen[who][-1]
        result[who] = {"ms": round(statistics.median(values) * 1e3, 1), "least": round(min(values) * 1e3, 1),
                       "tokens_per_s": round(tokens / statistics.median(values)), "speedup": round(gain, 2),
                       "processor": round(statistics.median(a["processor"] for a in seen[who][2:]) * 1e3, 1),
                       "peak_mib": last["peak_mib"], "ever_mib": last["ever_mib"], "loss": round(last["loss"], 4),
                       "all_ms": [round(v * 1e3, 1) for v in values]}
        table.append((who, *list(result[who].values())[:-1]))
    for way in (*STAGED, "ep", "single"):
        ours, torch = f"ours {way}".replace("ours single", "single"), f"torch {way}"
        if {ours, torch} <= times.keys():
            ratio = statistics.median(a / b for a, b in zip(times[torch], times[ours]))
            used = statistics.median(b["processor"] / a["processor"] for a, b in zip(seen[torch][2:], seen[ours][2:]))
            result[ours] |= {"tokens_over_torch": round(ratio, 3), "processor_over_torch": round(used, 3)}
            table.append((f"{ours} / {torch}, tokens/s; processor time", f"{ratio:.3f}", f"{used:.3f}", *[""] * 6))
    for way in ("tp", "dp"):
        if {f"ours {way}", f"hand {way}"} <= times.keys():
            ratio = statistics.median(a / b for a, b in zip(times[f"ours {way}"], times[f"hand {way}"]))
            result[f"ours {way}"]["over_hand"] = round(ratio, 3)
            table.append((f"ours / hand {way}", f"{ratio:.3f}", *[""] * 7))
    losses = [{who: answers[at]["loss"] for who, answers in seen.items()} for at in (0, -1)]
    finish(f"llama_{args.size}", {"unit": "ms", "rounds": args.rounds, "tokens": tokens, "rows": result, "losses": losses},
           table, not args.no_save)


if __name__ == "__main__":
    main()
