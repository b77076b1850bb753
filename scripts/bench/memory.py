# SPDX-License-Identifier: Apache-2.0
"""What a rank of a fully sharded Llama holds in a step, measured, beside the formula: its share, and the groups it gathers.

    python scripts/bench/memory.py [--size 40m|300m|3b] [--ranks 2,4] [--optimizer adamw|sgd] [--dtype float32|bfloat16]
                                   [--no-save]

The model is built with deferred parameters (`no_init_parameters`), cut block by block, and never exists whole. Resident
memory (anonymous and shared pages, which MindSpore's own count on CPU does not know) is read wherever `fully_shard` gathers,
reduces or gives back, and twenty times a second in between; what the process held before the model is taken off.

The formula, in bytes of P parameters, of which R are the model's own and B the largest block's, over N ranks:
    share   (parameters + gradients + optimizer state) / N
    groups  2 R: the model's own stay gathered from forward to backward, and their gradients come whole
            3 B: of a block that is reduced the gradients, whole and packed, and what was gathered ahead of the next one
"in_step" is the same of what comes after building.
In bfloat16 a CPU computes in float32: casts of a block's weights come on top, twice 4 bytes of each.
"""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import finish, one_thread

one_thread()
import numpy as np  # noqa: E402  after the number of threads is set

from model_zoo.llama.config import ModelConfig  # noqa: E402

SIZES = {"4m": ModelConfig(dim=256, n_layers=5, n_heads=4, n_kv_heads=4, ffn_dim=704, vocab_size=256),
         "40m": ModelConfig(dim=512, n_layers=13, n_heads=8, n_kv_heads=8, ffn_dim=1408, vocab_size=256),
         "300m": ModelConfig(dim=1024, n_layers=24, n_heads=16, n_kv_heads=16, ffn_dim=2816, vocab_size=256),
         # deep rather than wide: eight ranks on one machine hold eight groups at once
         "3b": ModelConfig(dim=1024, n_layers=236, n_heads=16, n_kv_heads=16, ffn_dim=2816, vocab_size=256)}
TOKENS = 8  # of a sequence; each rank has one
STATES = {"adamw": 2, "sgd": 0}  # float32 numbers a parameter


def resident() -> int:
    """Bytes of this process's own and shared pages, less what files give."""
    status = Path("/proc/self/status").read_text()
    return sum(int(re.search(rf"{kind}:\s+(\d+)", status)[1]) for kind in ("RssAnon", "RssShmem")) * 1024


class Curve:
    """Resident memory over time, and the most of it.

    Args:
        base: bytes to take off.
    """

    def __init__(self, base: int):
        self.base, self.start, self.most = base, time.monotonic(), 0
        self.points: list[tuple[float, str, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def mark(self, what: str) -> None:
        held = resident() - self.base
        self.most = max(self.most, held)
        if what or len(self.points) < 2000:
            self.points.append((round(time.monotonic() - self.start, 2), what, round(held / 2**20)))

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, resident() - self.base)

    def hooked(self, kind, name: str, what: str) -> None:
        """Marks after every call of a method."""
        original = getattr(kind, name)

        def method(this, *args, **kwargs):
            out = original(this, *args, **kwargs)
            self.mark(what)
            return out
        setattr(kind, name, method)


def built(cfg: ModelConfig, mesh, dtype):
    """The model as shards; nothing of it was ever whole but a parameter at a time."""
    from mindspore.nn.utils import no_init_parameters

    from model_zoo.llama.model import Llama
    from model_zoo.llama.parallelize import attention_on_heads
    from ms_dtensor import checkpoint_wrapper, fully_shard, init

    with no_init_parameters():
        model = Llama(cfg)
    for p in model.get_parameters():
        p.set_dtype(dtype)
    checkpoint_wrapper(model.layers)
    for layer in model.layers:
        layer.attention.core = attention_on_heads(layer.attention.core, mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for p in model.get_parameters():
        if p.ndim > 1:
            init.normal_(p, 0.0, 0.02)
    return model


def rank_main(size: str, optimizer: str, dtype: str, out: str) -> None:
    import mindspore as ms
    from mindspore import Tensor

    from model_zoo.llama.model import cross_entropy
    from ms_dtensor import DTensor, Shard, comm, init_device_mesh, optim, value_and_grad
    from ms_dtensor.parallel.sharding import block

    world = comm.start("cpu")
    mesh, kind = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp",)), getattr(ms, dtype)
    text = np.random.default_rng(world.rank).integers(0, 256, (1, TOKENS + 1)).astype(np.int32)
    ids, labels = (DTensor.from_local(Tensor(x.copy()), mesh, [Shard(0)]) for x in (text[:, :-1], text[:, 1:]))

    def step(model):
        params = model.trainable_params()
        loss, grads = value_and_grad(lambda: cross_entropy(model(ids), labels), None, params)()
        return loss, params, grads
    step(built(SIZES["4m"], mesh, kind))  # code and pools
    curve = Curve(resident())
    for name in ("finish", "reduce", "release"):
        curve.hooked(block.Block, name, name)
    model = built(SIZES[size], mesh, kind)
    curve.mark("built")
    built_now = curve.points[-1][2] * 2**20
    params = model.trainable_params()
    steps = optim.AdamW(params) if optimizer == "adamw" else None
    curve.mark("optimizer made")
    before = float(np.abs(params[0].to_local().float().asnumpy()).sum())
    loss, params, grads = step(model)
    curve.mark("gradients")
    if steps is not None:
        steps(grads)
    else:
        for p, g in zip(params, grads, strict=True):
            p.set_data(p - g * 0.1)
    curve.mark("stepped")
    curve.end()
    units = [c.__dict__["_ms_dtensor_unit"] for c in (model, *model.layers)]
    counts = [sum(int(np.prod(p.shape)) for block in u.blocks for p in block.params) for u in units]
    total, wide = sum(counts), 4 if dtype == "float32" else 2
    share = total * (2 * wide + 4 * STATES[optimizer]) // world.size
    groups = wide * (2 * counts[0] + 3 * max(counts[1:])) + (8 * max(counts[1:]) if wide == 2 else 0)
    moved = abs(float(np.abs(params[0].to_local().float().asnumpy()).sum()) - before)
    Path(out, f"{world.rank}.json").write_text(json.dumps({
        "parameters": total, "loss": round(float(loss), 4), "moved": moved > 0, "share": share, "groups": groups,
        "most": curve.most, "ratio": round(curve.most / (share + groups), 3), "built": built_now,
        "in_step": round((curve.most - built_now) / (share - total * wide // world.size + groups), 3),
        "curve": curve.points}))


def measured(size: str, ranks: int, optimizer: str, dtype: str, limit: float = 1500) -> list[dict]:
    """What each rank tells."""
    from model_zoo.llama.launch import environment, msrun_command

    with tempfile.TemporaryDirectory(prefix="ms_dtensor_memory_") as folder:
        command = msrun_command(Path(__file__).resolve(), ranks, Path(folder), ["--rank", size, optimizer, dtype, folder])
        done = subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False,
                              timeout=limit)
        answers = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if done.returncode or not all(a.exists() for a in answers):
            raise RuntimeError("\n".join(p.read_text(errors="replace")[-3000:] for p in sorted(Path(folder).glob("*.log"))))
        return [json.loads(a.read_text()) for a in answers]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return rank_main(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="300m")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--optimizer", choices=STATES, default="adamw")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    rows, table = {}, [("", "share MiB", "groups MiB", "measured MiB", "ratio")]
    for ranks in map(int, args.ranks.split(",")):
        answers = measured(args.size, ranks, args.optimizer, args.dtype)
        most = max(answers, key=lambda a: a["most"])
        rows[ranks] = {"ranks": [{k: v for k, v in a.items() if k != "curve"} for a in answers], "curve": most["curve"]}
        table.append((f"{args.size} {args.dtype} {args.optimizer}, {ranks} ranks",
                      *(round(most[k] / 2**20) for k in ("share", "groups", "most")), most["ratio"]))
    finish("memory", {"size": args.size, "optimizer": args.optimizer, "dtype": args.dtype, "rows": rows}, table,
           not args.no_save)


if __name__ == "__main__":
    main()
