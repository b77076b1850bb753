# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts beside the same in one: processor time of Llama blocks, bits, and what is held between.

    python scripts/bench/held.py [--sizes tiny,small,large] [--rounds 40] [--plain]

B is a `Recording`'s backward, I and W those of a `HeldRecording`; F of each its forward. The two take turns in one process
of one thread on one core, which of them comes first changes with every round, and times are of the processor. Ratios are of
medians and of minima; B beside itself, measured in the same way, says how far from 1 a ratio is by chance. `a_product_us`
is what I and W take longer than B, over the number of held products; at "tiny" that is all that a held product adds. Held
are the tensors that autograd has saved, counted by `saved_tensors_hooks`, and what products have taken out of there for W;
those of NumPy's attention (`train.compile`), which keeps its own, are left out. Layers run as the recipe runs them on a CPU;
`--plain` without the compiled attention.
"""
from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import weakref
from collections.abc import Callable

from common import finish, one_thread

one_thread()
import mindspore as ms  # noqa: E402  after the number of threads is set
import numpy as np  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402

import ms_dtensor as md  # noqa: E402
from model_zoo.llama.config import ModelConfig  # noqa: E402
from model_zoo.llama.cpu import compile_attention  # noqa: E402
from model_zoo.llama.model import Llama, init_weights  # noqa: E402
from ms_dtensor.pipeline import PipelineStage  # noqa: E402

SIZES = {"tiny": (16, 16), "small": (256, 256), "large": (512, 512)}  # width, and tokens
WARM = 4  # rounds that are not counted


class Blocks(nn.Cell):
    def __init__(self, model: Llama, length: int) -> None:
        super().__init__()
        self.layers, self.length = model.layers, length

    def construct(self, x):
        for layer in self.layers:
            x = layer(x, self.length)
        return x


def made(width: int, tokens: int, compiled: bool) -> tuple[PipelineStage, Tensor, Tensor]:
    """A stage of two blocks, its input, and the cotangent of its output."""
    cfg = ModelConfig(dim=width, n_layers=2, n_heads=max(1, width // 64), n_kv_heads=max(1, width // 64),
                      ffn_dim=width * 11 // 4, vocab_size=8)
    model = Llama(cfg)
    init_weights(model, 1)
    if compiled:
        compile_attention(model, cfg)
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    rng = np.random.default_rng(0)
    x, dy = (Tensor(rng.normal(size=(tokens, width)).astype(np.float32)) for _ in range(2))
    return PipelineStage(Blocks(model, min(tokens, 256)), 0, 1, mesh["pp"]), x, dy


def one_part(stage, x, dy, spent: list[tuple[float, ...]]) -> list[Tensor]:
    params = stage.params()
    start = time.process_time()
    recording = stage.record((x,), {}, None)
    forward = time.process_time()
    dx, grads = recording.backward([dy], params)
    spent.append((forward - start, time.process_time() - forward))
    return [*dx, *grads]


def two_parts(stage, x, dy, spent: list[tuple[float, ...]]) -> list[Tensor]:
    params = stage.params()
    start = time.process_time()
    recording = stage.record((x,), {}, None, in_parts=True)
    forward = time.process_time()
    dx = recording.backward_inputs([dy], params)
    inputs = time.process_time()
    grads = recording.backward_weights(params)
    end = time.process_time()
    spent.append((forward - start, end - forward, inputs - forward, end - inputs))
    return [*dx, *grads]


def alternated(calls: tuple[Callable, Callable], given: tuple, rounds: int) -> tuple[list, list]:
    """What each spent, a tuple a round; they begin the rounds by turns."""
    spent: tuple[list, list] = [], []
    for i in range(rounds + WARM):
        for k in (i % 2, 1 - i % 2):
            calls[k](*given, spent[k])
    return spent[0][WARM:], spent[1][WARM:]


class Place:
    """What is saved in place of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def held(stage, x, dy) -> dict:
    """Tensors, and their MiB, that are saved of a forward, and of these between the two parts and after them."""
    saved: list = []

    def pack(t):
        place = Place(t)
        saved.append(weakref.ref(place))
        return place

    def living() -> list[Tensor]:
        gc.collect()
        taken = [x for late in recording._store.products for x in getattr(late, "args", ())]  # out of places, for later
        return [place.x for ref in saved if (place := ref()) is not None] + [x for x in taken if type(x) is Tensor]

    def told() -> dict:
        there = {(t.data_ptr(), tuple(t._shape)): int(t.nbytes) for t in living()}
        return {"tensors": len(living()), "distinct": len(there), "MiB": round(sum(there.values()) / 2**20, 3)}
    with ms.saved_tensors_hooks(pack, lambda place: place.x):
        recording = stage.record((x,), {}, None, in_parts=True)
        out = {"after F": told()}
        recording.backward_inputs([dy], stage.params())
        out["products"] = len(recording._store.products)
        out["between I and W"] = told()
        recording.backward_weights(stage.params())
        out["after W"] = told()
    return out


def measure(size: str, rounds: int, compiled: bool) -> dict:
    given = made(*SIZES[size], compiled)
    first, second = (run(*given, []) for run in (one_part, two_parts))
    bits = [np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in zip(first, second, strict=True)]
    between = held(*given)
    whole, parts = alternated((one_part, two_parts), given, rounds)
    first, second = alternated((one_part, one_part), given, rounds)
    out: dict = {"bit_equal": all(bits), "held": between}
    for name, of in (("median", statistics.median), ("least", min)):
        b, i_w, i, w = of([s[1] for s in whole]), of([s[1] for s in parts]), of([s[2] for s in parts]), of(
            [s[3] for s in parts])
        f, f_held = of([s[0] for s in whole]), of([s[0] for s in parts])
        out[name] = {"B_ms": round(b * 1e3, 3), "I_ms": round(i * 1e3, 3), "W_ms": round(w * 1e3, 3),
                     "I+W_over_B": round(i_w / b, 4), "F+I+W_over_F+B": round((f_held + i_w) / (f + b), 4),
                     "F_ms": round(f * 1e3, 3), "F_held_ms": round(f_held * 1e3, 3),
                     "a_product_us": round((i_w - b) / between["products"] * 1e6, 1),
                     "a_product_us_with_F": round((f_held + i_w - f - b) / between["products"] * 1e6, 1),
                     "B_over_itself": round(of([s[1] for s in first]) / of([s[1] for s in second]), 4)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    ms.runtime.launch_blocking()
    out = {size: measure(size, args.rounds, not args.plain) for size in args.sizes.split(",")}
    finish("held", {"rounds": args.rounds, "of": out}, save=False)


if __name__ == "__main__":
    main()
