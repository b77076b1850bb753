# SPDX-License-Identifier: Apache-2.0
"""Ten training losses of a 21 M parameter Llama against PyTorch's, on one rank and on tp=2. Torch is not needed.

    python model_zoo/llama/tools/parity_with_torch.py [--only one|tp2]

Weights and tokens come from a hash computed with NumPy (splitmix64 in counter form), so any framework can make them.
The losses below were printed by PyTorch 2 on CPU, in float32, for the same numbers. Prints JSON; exits non-zero if a
loss is off by more than 2e-4.

Recipe: dim 512, 4 layers, 8 heads, ffn 1408, vocabulary 8192, batch 4 x 256 tokens; matrices uniform with standard
deviation 0.02, norms 1; rotary base 10000; AdamW lr 1e-3, betas (0.9, 0.95), eps 1e-8, weight decay 0.1 on everything.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama.launch import Run, first_failure  # noqa: E402
from ms_dtensor.tools.ranks import guarded, rank, start_device, world_size  # noqa: E402

TORCH = (9.107531, 8.592206, 8.408304, 8.111174, 8.004798, 8.009192, 8.012710, 7.771837, 7.790035, 7.866086)
TOLERANCE = 2e-4  # six decimals of loss after ten steps of another framework's float32 kernels
DIM, LAYERS, HEADS, FFN, VOCAB, BATCH, SEQ, STD = 512, 4, 8, 1408, 8192, 4, 256, 0.02
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def scramble(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, on uint64."""
    for shift, factor in zip((30, 27), MULTIPLIERS, strict=True):
        z = (z ^ (z >> np.uint64(shift))) * factor
    return z ^ (z >> np.uint64(31))


def uniform(seed: int, start: int, count: int) -> np.ndarray:
    """Elements start .. start + count - 1 of stream `seed`: f64 in [0, 1) with 24 random bits."""
    with np.errstate(over="ignore"):
        origin = scramble(np.array([seed], np.uint64) * GOLDEN)
        index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        return (scramble(origin + index * GOLDEN) >> np.uint64(40)) / 2.0**24


def matrix(seed: int, rows: int, columns: int) -> np.ndarray:
    """f32[rows, columns], uniform around 0 with standard deviation STD."""
    flat = (uniform(seed, 0, rows * columns) - 0.5) * (2 * np.sqrt(3.0) * STD)
    return flat.astype(np.float32).reshape(rows, columns)


def weights() -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of every matrix; norms keep their ones."""
    yield "tok_embeddings.weight", matrix(1, VOCAB, DIM)
    yield "output.weight", matrix(2, VOCAB, DIM)
    inside = (("attention.wq", DIM, DIM), ("attention.wk", DIM, DIM), ("attention.wv", DIM, DIM),
              ("attention.wo", DIM, DIM),
              ("feed_forward.w1", FFN, DIM), ("feed_forward.w3", FFN, DIM), ("feed_forward.w2", DIM, FFN))
    for layer in range(LAYERS):
        for number, (name, rows, columns) in enumerate(inside, 1):
            yield f"layers.{layer}.{name}.weight", matrix(100 * (layer + 1) + number, rows, columns)


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels i32[BATCH, SEQ] of a step, from a fixed skewed distribution of tokens."""
    rows = [np.floor(VOCAB * (uniform(7777, (step * BATCH + j) * SEQ, SEQ + 1) ** 2) ** 2) for j in range(BATCH)]
    both = np.stack(rows).astype(np.int32)
    return np.ascontiguousarray(both[:, :-1]), np.ascontiguousarray(both[:, 1:])


def train(tp: int, sequence_parallel: bool = True) -> dict:
    """Ten steps on this process's ranks; losses and the median time of a step."""
    device = start_device()

    from mindspore import Tensor

    from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import init_device_mesh

    cfg = Config(model=ModelConfig(dim=DIM, n_layers=LAYERS, n_heads=HEADS, n_kv_heads=HEADS, ffn_dim=FFN,
                                   vocab_size=VOCAB, rope_theta=10000.0),
                 parallel=ParallelConfig(tp=tp, sequence_parallel=sequence_parallel),
                 optim=OptimConfig(lr=1e-3, warmup=0, schedule="constant", clip_norm=0.0),
                 train=TrainConfig(steps=len(TORCH), batch=BATCH, seq=SEQ))

    def load(model) -> None:
        params = dict(model.parameters_and_names())
        for name, value in weights():
            params[name].set_data(Tensor(value))

    mesh = init_device_mesh(device, (1, tp), mesh_dim_names=("dp", "tp")) if tp > 1 else None
    trainer = Trainer(cfg, None, mesh, initialize=load)
    losses, times = [], []
    for step in range(len(TORCH)):
        start = time.perf_counter()
        loss, grads = trainer.gradients(*batch_of(step))
        trainer.update(grads, step)
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
    return {"losses": [round(x, 6) for x in losses], "step_s_median": round(float(np.median(times[2:])), 3)}


def on_ranks() -> dict:
    """`train` with tp=2 under msrun."""
    with tempfile.TemporaryDirectory(prefix="ms_dtensor_parity_") as folder:
        answer = Path(folder, "answer.json")
        if Run(Path(__file__).resolve(), 2, Path(folder), ["--answer", str(answer)], show=False).wait():
            raise SystemExit(first_failure(Path(folder)))
        return json.loads(answer.read_text())


def rank_side(answer: Path) -> None:
    result = train(world_size())
    if rank() == 0:
        answer.write_text(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("one", "tp2"), help="run one of the two")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.answer:
        return guarded(lambda: rank_side(options.answer))
    runs = {}
    if options.only != "tp2":
        runs["one_rank"] = train(1)
    if options.only != "one":
        runs["tp2"] = on_ranks()
    worst = max(abs(a - b) for run in runs.values() for a, b in zip(run["losses"], TORCH, strict=True))
    report = {"torch": TORCH, **runs, "max_abs_difference": round(worst, 7), "tolerance": TOLERANCE,
              "ok": worst <= TOLERANCE}
    print("{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in report.items()) + "}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
