# SPDX-License-Identifier: Apache-2.0
"""Device memory of one rank by formula: what a configuration needs before anybody borrows a node for it.

    python -m model_zoo.llama.memory --config model_zoo/llama/configs/llama3_8b.yaml [--section.key value ...]
    python -m model_zoo.llama.memory --layouts model_zoo/llama/configs/llama3_8b.yaml

The second form shows the layouts that the file's own table names, beside what the formula says of each.

Not measured on hardware. What is counted are tensors; `tests/zoo/test_llama_memory.py` compares with what autograd saves
of a small model on a fake mesh. MindSpore's and CANN's own memory, and what lies between tensors, come on top.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.config import Config
from model_zoo.llama.configio import USAGE, load
from model_zoo.llama.ranks import script
from ms_dtensor.errors import ConfigError

MIB = 2**20
USABLE = 59392 * MIB  # of the 64 GB of a 910B, as MindSpore's page on dry runs says
BUFFERS = 400 * MIB  # of a communicator: twice HCCL_BUFFSIZE, 200 MB unless set
ROW = re.compile(r"^# +(\d+) +((?:as it stands|--\S+ \S+)(?: --\S+ \S+)*) +([\d.]+) *$", re.M)  # of a file's table


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one rank holds of everything, in elements; the first rank's, whose chunks are the largest.

    Of parameters: over tp only, as the model computes with them. Cutting over dp divides them further; see `per_rank`.
    """

    cfg: Config

    def _cut(self, n: int) -> int:
        return -(-n // self.cfg.parallel.tp)

    @property
    def ffn(self) -> int:
        """Width of a feed-forward, or of an expert, on this rank."""
        m = self.cfg.model
        return m.ffn_dim if m.experts is not None and not self.cfg.parallel.expert_tp else self._cut(m.ffn_dim)

    @property
    def block_parameters(self) -> int:
        m = self.cfg.model
        heads, keys = self._cut(m.n_heads) * m.head_dim, self._cut(m.n_kv_heads) * m.head_dim
        biases = m.qkv_bias * (heads + 2 * keys) + m.out_bias * m.dim + m.qk_norm * 2 * m.head_dim
        ffn = 3 * self.ffn if m.experts is None else m.experts.count * (3 * self.ffn + 1)
        return m.dim * (2 * heads + 2 * keys + ffn + 2) + biases

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
    if m.experts is None:
        ffn, router = 3 * s.tokens * s.ffn, 0  # gate and up, and their product
    else:  # the same of each choice; its row before the experts and after; of the router its scores, and which were chosen
        chosen = s.tokens * m.experts.per_token
        ffn, router = chosen * (3 * s.ffn + 2 * m.dim), s.tokens * 3 * m.experts.count + 5 * chosen
    statistics = 2 * s.own_tokens + 2 * s.sequences * heads * cfg.train.seq * 8  # float32: of norms, and of softmax
    return dtype_bytes * (norms + doors + qkv + ffn) + 4 * (statistics + router)


def per_rank(cfg: Config) -> dict[str, int]:
    """Bytes by what they are for, at the step's peak: when the backward of the last block begins."""
    m, t, p, s = cfg.model, cfg.train, cfg.parallel, Sizes(cfg)
    if p.cp > 1:
        raise ConfigError("For 'memory.py', there is no formula for context parallelism.", f"parallel.cp = {p.cp}",
                          "What a rank fetches depends on the documents.", "--parallel.cp 1")
    if p.pp > 1:
        raise ConfigError("For 'memory.py', there is no formula for a pipeline.", f"parallel.pp = {p.pp}",
                          "What a rank holds depends on its stage and on the schedule.", "--parallel.pp 1")
    if p.ep > 1:
        raise ConfigError("For 'memory.py', there is no formula for expert parallelism.", f"parallel.ep = {p.ep}",
                          "How many tokens a rank's experts get depends on the router.", "--parallel.ep 1")
    wide = {"float32": 4, "bfloat16": 2}[t.dtype]
    kept_blocks = 1 if t.recompute else m.n_layers  # whose insides are there at a time
    vocab = s._cut(m.vocab_size) if p.loss_parallel else m.vocab_size
    cut = p.fsdp or p.zero1
    own = -(-s.parameters // (p.dp // p.hsdp)) if cut else s.parameters  # what lies on this rank between steps
    largest = max(s.tokens * max(m.dim, 2 * s.ffn) * wide, s._cut(m.vocab_size) * m.dim * 4)
    groups = (p.hsdp > 1) + (p.dp > p.hsdp) + (p.tp > 1) + (p.dp * p.tp > 1)
    if cut:  # gathered: the model's own, the block at work, the next one, and what comes in from the others
        blocks = s.block_parameters * (1 if p.fsdp else m.n_layers)  # that are gathered and reduced together
        copies = wide * (s.other_parameters + 3 * blocks if p.fsdp else 2 * s.parameters)
        # as they come and as they are sent; of the head until the embedding has its own
        whole = 4 * (2 * blocks + s.other_parameters * (1 if p.fsdp else 2))
        gradients = 4 * own + max(whole, 4 * s.parameters * (t.micro_batches > 1))  # added up before they are reduced
    else:
        copies = 0 if wide == 4 else wide * (s.other_parameters + kept_blocks * s.block_parameters)
        gradients = 4 * s.parameters * (2 if t.micro_batches > 1 else 1)
    return {
        "parameters, float32": 4 * own,
        "gathered parameters" if cut else "their copies in 16 bits": copies,
        "gradients, float32": gradients,
        "moments of AdamW": 8 * own,
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


def documented(file: Path) -> Iterator[tuple[int, list[str], float]]:
    """World size, options and GiB a rank of each layout that a configuration's own table names."""
    for npus, options, gib in ROW.findall(file.read_text("utf-8")):
        yield int(npus), [] if options == "as it stands" else options.split(), float(gib)


def layouts(file: Path) -> str:
    """That table again: by the formula, and as the file says it."""
    lines = [f"{'NPUs':>6}  {'GiB':>6}  {'of':>4}  {'in file':>7}  options"]
    for npus, options, said in documented(file):
        total = sum(per_rank(load(["--config", str(file), *options], npus)[0]).values())
        lines.append(f"{npus:>6}  {total / 2**30:>6.1f}  {USABLE / 2**30:>4.0f}  {said:>7.1f}  {' '.join(options)}")
    return "\n".join(lines)


def run(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(f"usage: memory.py {USAGE}\n       memory.py --layouts FILE.yaml ...\n\n{__doc__}")
    elif argv[:1] == ["--layouts"]:
        print("\n".join(f"{file}\n{layouts(Path(file))}" for file in argv[1:]))
    else:
        print(report(load(argv)[0]))


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
