# SPDX-License-Identifier: Apache-2.0
"""A Llama training step: one rank, tensor parallel and data parallel over two, by hand, and in PyTorch, in turns.

    python scripts/bench/llama_step.py [--size small|toy] [--rounds 6] [--no-torch] [--no-save]

"small" is 21 M parameters (dim 512, 4 layers, 8192 words, 4 x 256 tokens), "toy" 0.66 M. One thread and one core a
process. In every round each variant makes one step while the others wait, so what else runs on the machine hits all
alike, and every other round goes backwards; figures are medians over rounds after the first two. "two at once" is the
single-rank step on both ranks at the same time, without communication: how far two ranks that never wait for each other
hinder each other; "half at once" the same on half a batch each: a data-parallel step whose reduction takes no time,
the bound of data parallelism on this machine. "hand" is the same model with Megatron's collectives written out
in plain MindSpore (megatron.py), without DTensors. The core of attention is compiled in all of MindSpore's variants.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import finish, one_thread

one_thread()
import numpy as np  # noqa: E402  after the number of threads is set

from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig  # noqa: E402

SIZES = {
    "small": (ModelConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1408, vocab_size=8192), 4, 256),
    "toy": (ModelConfig(dim=128, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=352, vocab_size=1024), 4, 64),
}


def config(size: str, dp: int = 1, tp: int = 1) -> Config:
    model, batch, seq = SIZES[size]
    return Config(model=model, parallel=ParallelConfig(dp=dp, tp=tp), train=TrainConfig(batch=batch, seq=seq, compile=True),
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
            time.sleep(0.005)

    def done(self, seconds: dict) -> None:
        answer = self.folder / "answer.new"
        answer.write_text(json.dumps([self.seen, seconds]))
        answer.rename(self.folder / "answer")

    def ask(self, who: str, number: int, processes, limit: float = 200) -> dict:
        """The parent's side: gives the turn, and waits for the seconds."""
        turn, until = f"{who} {number}", time.monotonic() + limit
        self._say(turn)
        while time.monotonic() < until:
            if any(p.poll() is not None for p in processes):
                raise RuntimeError(f"{who}: a process ended; see {self.folder}")
            try:
                name, seconds = json.loads((self.folder / "answer").read_text())
                if name == turn:
                    return seconds
            except FileNotFoundError:
                pass
            time.sleep(0.005)
        raise TimeoutError(f"{who} took more than {limit} s")

    def end(self) -> None:
        self._say("end")

    def _say(self, turn: str) -> None:
        (self.folder / "turn.new").write_text(turn)
        (self.folder / "turn.new").rename(self.folder / "turn")


def rank_main(size: str, folder: str) -> None:
    """What each of the two MindSpore ranks runs."""
    import megatron

    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import init_device_mesh

    meshes = {"tp": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")),
              "dp": init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))}
    rank, group = meshes["tp"].get_rank(), meshes["tp"].get_group()
    configs = {"tp": config(size, tp=2), "dp": config(size, dp=2), "single": config(size)}
    batch = data(configs["single"])

    def ours(kind, mesh, rows=slice(None)):
        trainer = Trainer(configs[kind], None, mesh)

        def step():
            loss, grads = trainer.gradients(*(x[rows] for x in batch))
            trainer.optimizer(grads)
            return float(loss)
        return step
    half = slice(0, len(batch[0]) // 2)
    steps = {"single": ours("single", None) if rank == 0 else None, "two at once": ours("single", None),
             "half at once": ours("single", None, half)}
    for kind, mesh in meshes.items():
        steps[f"ours {kind}"] = ours(kind, mesh)
        by_hand = megatron.Step(configs[kind], group, rank)
        steps[f"hand {kind}"] = lambda by_hand=by_hand: by_hand.step(*batch)
    turns = Turns(folder)
    while turns.wait("mindspore"):
        seconds, losses = {}, {}
        backwards = int(turns.seen.split()[1]) % 2  # what ran before leaves its traces in the caches
        for name, step in list(steps.items())[::-1 if backwards else 1]:
            group.barrier()
            if step is not None:
                start = time.perf_counter()
                losses[name] = step()
                if name != "single":
                    group.barrier()  # a step takes as long as its slowest rank
                seconds[name] = time.perf_counter() - start
        if rank == 0:
            turns.done({**seconds, "losses": losses})


def torch_main(rank: str, size: str, folder: str) -> None:
    import torch_llama

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(rank)]})  # as ours
    cfg = config(size)
    torch_llama.worker(int(rank), cfg, data(cfg), Turns(folder), f"{folder}/store")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--rank", nargs=2, metavar=("SIZE", "FOLDER"))
    parser.add_argument("--torch", nargs=3, metavar=("RANK", "SIZE", "FOLDER"))
    args = parser.parse_args()
    if args.rank:
        rank_main(*args.rank)
        return
    if args.torch:
        torch_main(*args.torch)
        return
    from model_zoo.llama.launch import environment, msrun_command

    folder = tempfile.mkdtemp(prefix="ms_dtensor_llama_step_")
    script = Path(__file__).resolve()
    processes = [subprocess.Popen(msrun_command(script, 2, Path(folder), ["--rank", args.size, folder]),
                                  env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)]
    who = ["mindspore"]
    if not args.no_torch:
        who.append("torch")
        for rank in "01":
            with open(f"{folder}/torch_{rank}.log", "wb") as log:
                processes.append(subprocess.Popen([sys.executable, str(script), "--torch", rank, args.size, folder],
                                                  stdout=log, stderr=subprocess.STDOUT, env=environment()))
    turns, seen, losses = Turns(folder), {}, []
    try:
        for number in range(args.rounds + 2):
            for library in who:
                answer = turns.ask(library, number, processes)
                if "losses" in answer:
                    losses.append(answer.pop("losses"))
                for name, seconds in answer.items():
                    seen.setdefault(name, []).append(seconds)
    finally:
        turns.end()
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    cfg = config(args.size)
    tokens = cfg.train.batch * cfg.train.seq
    result, table = {}, [("", "ms", "least", "tokens/s", "speed-up")]
    for name, values in seen.items():
        values = values[2:]
        base = seen["torch single" if name.startswith("torch") else "single"][2:]
        gain = statistics.median(b / v for b, v in zip(base, values))
        result[name] = {"ms": round(statistics.median(values) * 1e3, 1), "least": round(min(values) * 1e3, 1),
                        "tokens_per_s": round(tokens / statistics.median(values)), "speedup": round(gain, 2),
                        "all_ms": [round(v * 1e3, 1) for v in values]}
        table.append((name, *(result[name][k] for k in ("ms", "least", "tokens_per_s", "speedup"))))
    for kind in ("tp", "dp"):
        ratio = statistics.median(a / b for a, b in zip(seen[f"ours {kind}"][2:], seen[f"hand {kind}"][2:]))
        result[f"ours {kind}"]["over_hand"] = round(ratio, 3)
        table.append((f"ours / hand {kind}", f"{ratio:.3f}", "", "", ""))
    finish(f"llama_{args.size}", {"unit": "ms", "rounds": args.rounds, "tokens": tokens, "rows": result,
                                  "losses": [losses[0], losses[-1]]}, table, not args.no_save)


if __name__ == "__main__":
    main()
