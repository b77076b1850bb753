# SPDX-License-Identifier: Apache-2.0
"""Our SGD, AdamW, Adafactor and Muon against PyTorch's, step by step on equal gradients. Torch is needed.

    python docs/tools/parity_of_optimizers.py [--steps 50]

One process, plain parameters: `tests/optim/cases_optimizers.py` shows that layouts change nothing. Prints JSON, per row the
largest difference of a parameter, relative to how far PyTorch moved it; exits non-zero if one is larger than its bound.
PyTorch's Muon orthogonalises in bfloat16, ours in float32: three digits are what bfloat16 leaves.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

SHAPES = ((64, 48), (48, 96), (32,), (3, 8, 5))
FLOAT32, BFLOAT16 = 1e-5, 1e-2
EPS = (1e-30, 1e-3)  # PyTorch's first is by default the dtype's resolution, the paper's is 1e-30
# name, our options, PyTorch's where they differ, shapes, bound
ROWS = [
    ("SGD", {"lr": 0.1}, {}, SHAPES, FLOAT32),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, {}, SHAPES, FLOAT32),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {}, SHAPES, FLOAT32),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, {}, SHAPES, FLOAT32),
    ("Adafactor", {}, {"eps": EPS}, SHAPES, FLOAT32),
    ("Adafactor", {"lr": 0.3, "weight_decay": 0.1, "d": 1.5}, {"eps": EPS}, SHAPES, FLOAT32),
    ("Muon", {"lr": 0.02}, {}, SHAPES[:2], BFLOAT16),
    ("Muon", {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, {}, SHAPES[:2], BFLOAT16),
]


def compare(name: str, options: dict, theirs: dict, shapes, steps: int) -> float:
    """The largest relative difference after `steps` steps."""
    import torch
    from mindspore import Parameter, Tensor

    from ms_dtensor import optim

    draw = np.random.default_rng(0)
    start = [draw.normal(size=s).astype(np.float32) for s in shapes]
    ours = [Parameter(Tensor(v), name=f"p{i}") for i, v in enumerate(start)]
    others = [torch.nn.Parameter(torch.tensor(v)) for v in start]
    mine, its = getattr(optim, name)(ours, **options), getattr(torch.optim, name)(others, **{**options, **theirs})
    for _ in range(steps):
        grads = [draw.normal(size=s).astype(np.float32) for s in shapes]
        mine([Tensor(g) for g in grads])
        for p, g in zip(others, grads, strict=True):
            p.grad = torch.tensor(g)
        its.step()
    pairs = [(p.asnumpy(), q.detach().numpy(), v) for p, q, v in zip(ours, others, start, strict=True)]
    return max(float(np.abs(p - q).max() / np.abs(q - v).max()) for p, q, v in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    import mindspore

    mindspore.runtime.launch_blocking()
    rows = [{"optimizer": name, **options, "off": compare(name, options, theirs, shapes, args.steps), "bound": bound}
            for name, options, theirs, shapes, bound in ROWS]
    for row in rows:
        print(json.dumps(row))
    sys.exit(any(row["off"] > row["bound"] for row in rows))


if __name__ == "__main__":
    main()
