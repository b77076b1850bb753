# SPDX-License-Identifier: Apache-2.0
"""The quickstart in bfloat16 with float32 masters: against our float32, and against PyTorch's bfloat16, step by step.

    python model_zoo/llama/tools/bf16_losses.py [--steps 200] [--seeds 0,1] [--no-torch] [--write quickstart_losses.json]

One rank, the recipe of `configs/quickstart.yaml` but for the number of steps, the same initial weights and batches
everywhere. PyTorch computes with bfloat16 copies of float32 parameters, as its FSDP does with
`MixedPrecisionPolicy(bfloat16, float32)`. Prints JSON; exits non-zero if the mean loss of all seeds' runs is off by more
than 1 %. Single steps, means of ten and single seeds are printed and not judged: they are a matter of chance.
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from model_zoo.llama.config import Config, ParallelConfig  # noqa: E402
from model_zoo.llama.configio import load  # noqa: E402
from model_zoo.llama.data import load_text  # noqa: E402
from model_zoo.llama.rope import angles  # noqa: E402
from model_zoo.llama.trainer import schedule  # noqa: E402
from ms_dtensor.tools.ranks import start_device  # noqa: E402

TEXT = ROOT / "scripts/quickstart_text.txt"  # the recipe's own, Python's sources, differs from version to version
BOUND = 0.01  # of the mean loss


def config(steps: int, dtype: str, seed: int = 0) -> Config:
    cfg, _ = load(["--config", str(ROOT / "model_zoo/llama/configs/quickstart.yaml")])
    return replace(cfg, parallel=ParallelConfig(), data=replace(cfg.data, path=str(TEXT)),
                   train=replace(cfg.train, steps=steps, dtype=dtype, seed=seed))


def ours(cfg: Config, text) -> list[float]:
    """Losses of all steps, on a mesh of one rank."""
    device = start_device()

    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import init_device_mesh

    trainer = Trainer(cfg, text, init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "tp")))
    return [trainer.step(step).loss for step in range(cfg.train.steps)]


def theirs(cfg: Config, text) -> list[float]:
    """The same recipe in PyTorch."""
    import torch
    import torch.nn.functional as F  # noqa: N812  PyTorch's habit

    from model_zoo.llama.model import Llama, init_weights

    cells = Llama(cfg.model)
    init_weights(cells, cfg.train.seed)
    weights = {name: torch.nn.Parameter(torch.from_numpy(p.asnumpy().copy())) for name, p in cells.parameters_and_names()}
    m, t, o = cfg.model, cfg.train, cfg.optim
    dtype = getattr(torch, t.dtype)
    cos, sin = (torch.from_numpy(f(angles(m, t.seq))).to(dtype) for f in (np.cos, np.sin))

    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def loss_of(ids, labels):
        w = {name: p.to(dtype) for name, p in weights.items()}
        b = len(ids)

        def norm(x, name):
            return F.rms_norm(x, (m.dim,), w[f"{name}.weight"], m.norm_eps)

        def heads(x, name):
            return F.linear(x, w[f"{name}.weight"]).view(b, t.seq, -1, m.head_dim).transpose(1, 2)
        x = F.embedding(ids, w["tok_embeddings.weight"])
        for at in (f"layers.{i}" for i in range(m.n_layers)):
            y = norm(x, f"{at}.attention_norm")
            q, k, v = (heads(y, f"{at}.attention.{name}") for name in ("wq", "wk", "wv"))
            y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
            x = x + F.linear(y.transpose(1, 2).reshape(b, t.seq, -1), w[f"{at}.attention.wo.weight"])
            y = norm(x, f"{at}.ffn_norm")
            y = F.silu(F.linear(y, w[f"{at}.feed_forward.w1.weight"])) * F.linear(y, w[f"{at}.feed_forward.w3.weight"])
            x = x + F.linear(y, w[f"{at}.feed_forward.w2.weight"])
        logits = F.linear(norm(x, "norm"), w["output.weight"])
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(weights.values(), o.lr, o.betas, o.eps, o.weight_decay)
    losses = []
    for step in range(t.steps):
        loss = loss_of(*(torch.from_numpy(a).long() for a in text.batch(t.seed, step, t.batch, t.seq)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), o.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = o.lr * schedule(o, t.steps)(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(losses, others) -> dict:
    """How far runs are apart, relative to the second: signed in the mean, and at worst in that of ten steps and in one."""
    a, b = (np.asarray(x) for x in (losses, others))  # (seeds, steps)
    out = {"mean": a.mean() / b.mean() - 1, "mean of each seed": a.mean(1) / b.mean(1) - 1}
    for steps in (10, 1):
        window = np.ones(steps) / steps
        out[f"worst_of_{steps}"] = max(np.abs(np.convolve(x, window, "valid") / np.convolve(y, window, "valid") - 1).max()
                                       for x, y in zip(a, b, strict=True))
    return {name: np.round(value, 5).tolist() for name, value in out.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0,1", help="separated by commas")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--write", type=Path, help="a file for our losses in bfloat16, of the first seed")
    options = parser.parse_args()
    names = ("bfloat16", "float32") if options.no_torch else ("bfloat16", "float32", "torch_bfloat16")
    runs: dict[str, list[list[float]]] = {name: [] for name in names}
    for seed in map(int, options.seeds.split(",")):
        low, full = (config(options.steps, dtype, seed) for dtype in ("bfloat16", "float32"))
        text = load_text(low.data, low.model.vocab_size, low.train.seq)
        for name, losses in runs.items():
            losses.append(theirs(low, text) if name.startswith("torch") else ours(full if name == "float32" else low, text))
    judged = {f"bfloat16 / {name}": apart(runs["bfloat16"], losses) for name, losses in runs.items() if name != "bfloat16"}
    if options.write:
        options.write.write_text(json.dumps([round(x, 5) for x in runs["bfloat16"][0]]) + "\n")
    ok = all(abs(value["mean"]) <= BOUND for value in judged.values())
    shown = {name: [round(x, 4) for x in of[0][:5] + of[0][9::10]] for name, of in runs.items()}
    report = {"steps": options.steps, "seeds": options.seeds,
              "losses of steps 1 to 5, 10, 20, ... of the first": shown, **judged, "bound": BOUND, "ok": ok}
    print("{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in report.items()) + "}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
