# SPDX-License-Identifier: Apache-2.0
"""Device memory of one rank by formula: what a configuration needs before anybody borrows a node for it.

    python -m model_zoo.llama.memory --config model_zoo/llama/configs/llama3_8b.yaml [--section.key value ...]
    python -m model_zoo.llama.memory --layouts model_zoo/llama/configs/llama3_8b.yaml

The second form shows the layouts that the file's own table names, beside what the formula says of each; `--write` for
`--layouts` writes the table again. The formula is the library's (`ms_dtensor/debug/predict/peak.py`): `python -m ms_dtensor
memory` has the same. Here are the sizes that it is given.

Of a pipeline it is the rank that needs most; its stages and what they hold at once are those of the schedule. With experts
cut over ranks each rank's are taken to be chosen equally often; with context parallelism a rank is taken to fetch all keys
and to keep them, but for a ring's.

Not measured on hardware. What is counted are tensors; `tests/zoo/test_llama_memory.py` compares with what dry runs hold,
`tests/debug/test_dry_run.py` these with what autograd saves. MindSpore's and CANN's own memory, and what lies between
tensors, come on top.
"""
from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.config import Config, ParallelConfig, mesh_axes
from model_zoo.llama.configio import USAGE, load
from model_zoo.llama.flops import attention_weights
from model_zoo.llama.kept import choose
from model_zoo.llama.ranks import script
from ms_dtensor.comm.buffers import communicator_bytes
from ms_dtensor.core.files import replacing
from ms_dtensor.debug.predict.peak import ROWS, Held, peak
from ms_dtensor.pipeline.builders import BUILDERS
from ms_dtensor.pipeline.order import simulate
from ms_dtensor.pipeline.split import balanced

MIB = 2**20
USABLE = 59392 * MIB  # of the 64 GB of a 910B, as MindSpore's page on dry runs says
ROW = re.compile(r"^# +(\d+) +((?:as it stands|--\S+ \S+)(?: --\S+ \S+)*) +([\d.]+) *$", re.M)  # of a file's table


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of the model, and how much of it is on its way at once."""

    layers: int
    ends: tuple[bool, bool]
    """Whether it has the embedding; whether it has the head."""
    blocks: int
    """Blocks whose backward is still to come, each counted once for every micro-batch that it waits for."""
    heads: int
    """Micro-batches whose logits wait."""
    dense: int = 0
    """Of a mixture of experts, its layers that have none."""


def shares(cfg: Config) -> list[Share]:
    """Of each rank of a pipeline; without one there is one share, all of it."""
    m, p = cfg.model, cfg.parallel
    dense = 0 if m.experts is None else m.experts.dense_layers
    if p.pp == 1:
        return [Share(m.n_layers, (True, True), m.n_layers, 1, dense)]
    parts = cells_of_stages(cfg)
    more = (p.pp_stages_per_rank,) if p.pp_schedule == "interleaved" else ()
    timeline = simulate(BUILDERS[p.pp_schedule](p.pp, cfg.train.micro_batches, *more))
    blocks = [sum(cell.startswith("layers.") for cell in part) for part in parts]
    out = []
    for rank, slots in enumerate(timeline.slots):
        own = [s for s, owner in enumerate(timeline.actions.owner) if owner == rank]
        has = {cell for s in own for cell in parts[s]}
        held = most = heads = most_heads = 0
        for slot in slots:  # what a forward holds goes with the gradients of its weights
            change = (slot.action.kind == "F") - (slot.action.kind in "BW")
            held += change * blocks[slot.action.stage]
            heads += change * ("output" in parts[slot.action.stage])
            most, most_heads = max(most, held), max(most_heads, heads)
        out.append(Share(sum(blocks[s] for s in own), ("tok_embeddings" in has, "output" in has), most, most_heads,
                         sum(f"layers.{i}" in has for i in range(dense))))
    return out


def cells_of_stages(cfg: Config) -> list[list[str]]:
    """The cells of each stage, by their paths, as `pipeline` cuts them by time if the configuration does not say where."""
    m, p = cfg.model, cfg.parallel
    cells = m.cells
    block = Sizes(replace(cfg, parallel=ParallelConfig())).block_matrices  # stages are cut before anything else is
    ends = m.vocab_size * m.dim
    if p.pp_split is None:
        times, sizes = [0, *[block] * m.n_layers, 0, ends], [ends, *[block] * m.n_layers, 0, ends]
        return balanced(list(zip(cells, times, sizes)), p.stages)
    starts = [0, *map(cells.index, p.pp_split), len(cells)]
    return [cells[a:b] for a, b in zip(starts, starts[1:])]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one rank holds of everything, in elements; the first rank's, whose chunks are the largest.

    Of parameters: over tp and ep only, as the model computes with them. Cutting over dp divides them further; see `own`.
    """

    cfg: Config

    def _cut(self, n: int) -> int:
        return -(-n // self.cfg.parallel.tp)

    @property
    def ffn(self) -> int:
        """Width of a feed-forward, or of an expert, on this rank."""
        m = self.cfg.model
        if m.experts is None:
            return self._cut(m.ffn_dim)
        width = m.experts.width or m.ffn_dim
        return self._cut(width) if self.cfg.parallel.expert_tp else width

    @property
    def block_matrices(self) -> int:
        """A block's parameters that are matrices, but for experts."""
        m = self.cfg.model
        if m.experts is None:
            return self.dense_matrices
        shared = 3 * self._cut(m.experts.shared * (m.experts.width or m.ffn_dim))
        return attention_weights(m, self.cfg.parallel.tp) + m.dim * (m.experts.count + shared)

    @property
    def dense_matrices(self) -> int:
        """Those of a block without experts."""
        m = self.cfg.model
        return attention_weights(m, self.cfg.parallel.tp) + 3 * m.dim * self._cut(m.ffn_dim)

    @property
    def block_experts(self) -> int:
        m = self.cfg.model
        return 0 if m.experts is None else -(-m.experts.count // self.cfg.parallel.ep) * 3 * self.ffn * m.dim

    @property
    def block_vectors(self) -> int:
        """Norms and biases of a block."""
        m = self.cfg.model
        heads, keys = self._cut(m.n_heads) * m.head_dim, self._cut(m.n_kv_heads) * m.head_dim
        normed = 2 * m.head_dim if m.qk_norm_over == "head" else (m.n_heads + m.n_kv_heads) * m.head_dim
        short = 0 if m.latent is None else m.latent.kv_rank + (m.latent.q_rank or 0)
        return 2 * m.dim + m.qkv_bias * (heads + 2 * keys) + m.out_bias * m.dim + m.qk_norm * normed + short

    @property
    def block_parameters(self) -> int:
        m = self.cfg.model
        bias = m.experts.count if m.experts is not None and m.experts.bias_rate is not None else 0
        return self.block_matrices + self.block_experts + self.block_vectors + bias

    def other_parameters(self, share: Share) -> int:
        m = self.cfg.model
        embedding, head = share.ends
        tables = 1 if m.tied_head and embedding and head else embedding + head
        return m.dim * (tables * self._cut(m.vocab_size) + head)

    def parameters(self, share: Share) -> int:
        dense = share.dense * (self.dense_matrices + self.block_vectors)
        return (share.layers - share.dense) * self.block_parameters + dense + self.other_parameters(share)

    def own(self, share: Share) -> int:
        """What lies on this rank between steps, if parameters are cut over the ranks of data parallelism."""
        p = self.cfg.parallel
        experts = (share.layers - share.dense) * self.block_experts
        ranks = p.dp * p.cp // p.hsdp
        return -(-(self.parameters(share) - experts) // ranks) + -(-experts // (ranks // p.ep))

    @property
    def sequences(self) -> int:
        """In a micro-batch."""
        return self.cfg.train.batch // (self.cfg.parallel.dp * self.cfg.train.micro_batches)

    @property
    def tokens(self) -> int:
        return self.sequences * self.cfg.train.seq // self.cfg.parallel.cp

    @property
    def own_tokens(self) -> int:
        """Between blocks: sequence parallelism cuts the list."""
        return self._cut(self.tokens) if self.cfg.parallel.sequence_parallel else self.tokens


def saved_by_block(cfg: Config, dtype_bytes: int) -> int:
    """Bytes that one block keeps for its backward, copies of weights apart; of a mixture, one that has experts."""
    m, s = cfg.model, Sizes(cfg)
    heads, keys = s._cut(m.n_heads), s._cut(m.n_kv_heads)
    norms = 2 * s.own_tokens * m.dim  # what they read; the first is the block's input
    doors = 2 * s.tokens * m.dim  # what q, k, v and w1, w3 read
    # before they are turned, and after; values and results
    qkv = s.tokens * m.head_dim * (2 * (heads + keys) + keys + heads)
    if m.latent is not None:  # q and keys, before they are turned and after; what keys and values are made of; results
        latent = m.latent
        qkv = s.tokens * (heads * (4 * m.head_dim + latent.plain + 3 * latent.value) + latent.turned
                          + 2 * (latent.kv_rank + (latent.q_rank or 0)))
    if cfg.parallel.cp > cfg.parallel.ulysses and cfg.parallel.cp_algorithm == "gather":
        # those of other ranks, if all are fetched, of the heads that it has then; an early run has its own once more
        u, early = cfg.parallel.ulysses, 0 if cfg.parallel.cp_order == "in_order" else s.tokens * cfg.parallel.ulysses // 2
        qkv += (s.sequences * cfg.train.seq - s.tokens * u + early) * m.head_dim * 2 * (keys // u)
    if m.experts is None:
        ffn, router = 3 * s.tokens * s.ffn, 0  # gate and up, and their product
    else:  # the same of each choice; its row before the experts and after; of the router its scores, and which were chosen
        chosen = s.tokens * m.experts.per_token
        ffn, router = chosen * (3 * s.ffn + 2 * m.dim), s.tokens * 3 * m.experts.count + 5 * chosen
        ffn += s.tokens * 3 * s._cut(m.experts.shared * (m.experts.width or m.ffn_dim))
    statistics = 2 * s.own_tokens + 2 * s.tokens * heads * 8  # float32: of norms, and of softmax
    return dtype_bytes * (norms + doors + qkv + ffn) + 4 * (statistics + router)


def communicators(p: ParallelConfig) -> int:
    """Of a rank: of all ranks, of each axis, and of the axes of data together; those of the same ranks are one."""
    axes = mesh_axes(p)
    ranks = np.arange(math.prod(axes.values())).reshape(*axes.values())
    data = [name for name in axes if name not in ("pp", "tp")]

    def of_first(names: Sequence[str]) -> frozenset[int]:
        return frozenset(ranks[tuple(slice(None) if name in names else 0 for name in axes)].ravel().tolist())
    made = {of_first(names) for names in ([*axes], data, *([name] for name in axes))}
    return sum(len(group) > 1 for group in made)


def per_rank(cfg: Config) -> dict[str, int]:
    """Bytes by what they are for, at the step's peak, of the rank that needs most."""
    return max((of_share(cfg, share) for share in shares(cfg)), key=lambda rows: sum(rows.values()))


def held(cfg: Config, share: Share) -> Held:
    """What one stage's rank has, as the formula takes it."""
    m, t, p, s = cfg.model, cfg.train, cfg.parallel, Sizes(cfg)
    wide = {"float32": 4, "bfloat16": 2}[t.dtype]
    parameters, others = s.parameters(share), s.other_parameters(share)
    vocab = s._cut(m.vocab_size) if p.loss_parallel else m.vocab_size
    rows = 0 if p.ep == 1 else ROWS * s.tokens * m.experts.per_token * m.dim
    return Held(
        parameters, s.own(share) if p.fsdp or p.zero1 else parameters, others, s.block_parameters, share.layers,
        share.blocks, saved_by_block(cfg, wide), s.own_tokens * m.dim * wide,
        sum(choose(cfg).bytes.values()) if t.recompute else 0, share.heads * s.tokens * vocab,
        share.heads * (s.own_tokens + s.tokens) * m.dim * wide, max(s.tokens * max(m.dim, 2 * s.ffn) * wide, rows), wide,
        "fsdp" if p.fsdp else "zero1" if p.zero1 else "none", t.recompute, t.micro_batches - 1, p.dp * p.cp > 1,
        4 if p.cp > 1 or p.ep > 1 else wide,  # of units over several axes each gradient is one in float32
        cfg.optim.offload, p.loss_parallel and p.tp > 1, p.tp == 1, p.pp > 1)


def of_share(cfg: Config, share: Share) -> dict[str, int]:
    """Bytes by what they are for, of one stage's rank."""
    rows = {what: int(size) for what, size in peak(held(cfg, share)).items()}
    return rows | {"communication buffers": communicators(cfg.parallel) * communicator_bytes()}


def report(cfg: Config) -> str:
    """A table in MiB."""
    rows = per_rank(cfg)
    total = sum(rows.values())
    lines = [f"{name:<32}{value / MIB:>10,.0f} MiB" for name, value in rows.items()]
    lines.append(f"{'all':<32}{total / MIB:>10,.0f} MiB of {USABLE / MIB:,.0f}")
    return "\n".join([*lines, str(choose(cfg))] if cfg.train.recompute else lines)


def documented(file: Path) -> Iterator[tuple[int, list[str], float]]:
    """World size, options and GiB a rank of each layout that a configuration's own table names."""
    for npus, options, gib in ROW.findall(file.read_text("utf-8")):
        yield int(npus), [] if options == "as it stands" else options.split(), float(gib)


def rewritten(file: Path) -> str:
    """The file's text, with the formula's figures in its table."""
    def again(row: re.Match) -> str:
        options = [] if row[2] == "as it stands" else row[2].split()
        total = sum(per_rank(load(["--config", str(file), *options], int(row[1]))[0]).values())
        at = row.start(3) - row.start()
        return f"{row[0][:at + len(row[3]) - 4]}{total / 2**30:4.1f}".rstrip()
    return ROW.sub(again, file.read_text("utf-8"))


def layouts(file: Path) -> str:
    """That table again: by the formula, and as the file says it."""
    lines = [f"{'NPUs':>6}  {'GiB':>6}  {'of':>4}  {'in file':>7}  options"]
    for npus, options, said in documented(file):
        total = sum(per_rank(load(["--config", str(file), *options], npus)[0]).values())
        lines.append(f"{npus:>6}  {total / 2**30:>6.1f}  {USABLE / 2**30:>4.0f}  {said:>7.1f}  {' '.join(options)}")
    return "\n".join(lines)


def run(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(f"usage: memory.py {USAGE}\n       memory.py --layouts FILE.yaml ...\n       memory.py --write "
              f"FILE.yaml ...\n\n{__doc__}")
    elif argv[:1] == ["--write"]:
        for file in map(Path, argv[1:]):
            text = rewritten(file)
            with replacing(file) as new:
                new.write(text.encode())
    elif argv[:1] == ["--layouts"]:
        print("\n".join(f"{file}\n{layouts(Path(file))}" for file in argv[1:]))
    else:
        print(report(load(argv)[0]))


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
