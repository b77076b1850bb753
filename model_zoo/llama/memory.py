# SPDX-License-Identifier: Apache-2.0
"""Device memory of one rank by formula: what a configuration needs before anybody borrows a node for it.

    python -m model_zoo.llama.memory --config model_zoo/llama/configs/llama3_8b.yaml [--section.key value ...]

Not measured on hardware. What is counted are tensors; `tests/zoo/test_llama_memory.py` compares with what autograd saves
of a small model on a fake mesh. MindSpore's and CANN's own memory, and what lies between tensors, come on top.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.config import Config
from model_zoo.llama.configio import load

MIB = 2**20
USABLE = 59392 * MIB  # of the 64 GB of a 910B, as MindSpore's page on dry runs says
BUFFERS = 400 * MIB  # of a communicator: twice HCCL_BUFFSIZE, 200 MB unless set


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one rank holds of everything, in elements; the first rank's, whose chunks are the largest."""

    cfg: Config

    def _cut(self, n: int) -> int:
        return -(-n // self.cfg.parallel.tp)

    @property
    def block_parameters(self) -> int:
        m = self.cfg.model
        heads, keys = self._cut(m.n_heads) * m.head_dim, self._cut(m.n_kv_heads) * m.head_dim
        biases = m.qkv_bias * (heads + 2 * keys) + m.out_bias * m.dim + m.qk_norm * 2 * m.head_dim
        return m.dim * (2 * heads + 2 * keys + 3 * self._cut(m.ffn_dim) + 2) + biases

    @property
    def other_parameters(self) -> int:
        m = self.cfg.model
        return m.dim * ((1 if m.tied_head else 2) * self._cut(m.vocab_size) + 1)

    @property
    def parameters(self) -> int:
        return self.cfg.model.n_layers * self.block_parameters + self.other_parameters

    @property
    def sequences(self) -> int:
        """In a micro-batch."""
        return self.cfg.train.batch // (self.cfg.parallel.dp * self.cfg.train.micro_batches)

    @property
    def tokens(self) -> int:
        return self.sequences * self.cfg.train.seq

    @property
    def own_tokens(self) -> int:
        """Between blocks: sequence parallelism cuts the list."""
        return self._cut(self.tokens) if self.cfg.parallel.sequence_parallel else self.tokens


def saved_by_block(cfg: Config, dtype_bytes: int) -> int:
    """Bytes that one block keeps for its backward, copies of weights apart."""
    m, s = cfg.model, Sizes(cfg)
    heads, keys = s._cut(m.n_heads), s._cut(m.n_kv_heads)
    norms = 2 * s.own_tokens * m.dim  # what they read; the first is the block's input
    doors = 2 * s.tokens * m.dim  # what q, k, v and w1, w3 read
    # before they are turned, and after; values and results
    qkv = s.tokens * m.head_dim * (2 * (heads + keys) + keys + heads)
    swiglu = 3 * s.tokens * s._cut(m.ffn_dim)  # gate and up, and their product
    statistics = 2 * s.own_tokens + 2 * s.sequences * heads * cfg.train.seq * 8  # float32: of norms, and of softmax
    return dtype_bytes * (norms + doors + qkv + swiglu) + 4 * statistics


def per_rank(cfg: Config) -> dict[str, int]:
    """Bytes by what they are for, at the step's peak: when the backward of the last block begins."""
    m, t, s = cfg.model, cfg.train, Sizes(cfg)
    wide = {"float32": 4, "bfloat16": 2}[t.dtype]
    kept_blocks = 1 if t.recompute else m.n_layers  # whose insides are there at a time
    vocab = s._cut(m.vocab_size) if cfg.parallel.loss_parallel else m.vocab_size
    copies = 0 if wide == 4 else wide * (s.other_parameters + kept_blocks * s.block_parameters)
    largest = max(s.tokens * max(m.dim, 2 * s._cut(m.ffn_dim)) * wide, s._cut(m.vocab_size) * m.dim * 4)
    groups = sum(n > 1 for n in (cfg.parallel.dp, cfg.parallel.tp)) + (cfg.parallel.dp * cfg.parallel.tp > 1)
    return {
        "parameters, float32": 4 * s.parameters,
        "their copies in 16 bits": copies,
        "gradients, float32": 4 * s.parameters * (2 if t.micro_batches > 1 else 1),
        "moments of AdamW": 8 * s.parameters,
        "saved by blocks": kept_blocks * saved_by_block(cfg, wide),
        "inputs of recomputed blocks": m.n_layers * s.own_tokens * m.dim * wide if t.recompute else 0,
        # themselves and their gradient; relative to the row's greatest, their exponentials and the gradient of these
        "logits and loss": s.tokens * vocab * (2 * wide + 3 * 4),
        "two cotangents or temporaries": 2 * largest,
        "communication buffers": groups * BUFFERS,
    }


def report(cfg: Config) -> str:
    """A table in MiB."""
    rows = per_rank(cfg)
    total = sum(rows.values())
    lines = [f"{name:<32}{value / MIB:>10,.0f} MiB" for name, value in rows.items()]
    return "\n".join([*lines, f"{'all':<32}{total / MIB:>10,.0f} MiB of {USABLE / MIB:,.0f}"])


if __name__ == "__main__":
    print(report(load(sys.argv[1:])[0]))
