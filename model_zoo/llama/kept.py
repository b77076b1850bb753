# SPDX-License-Identifier: Apache-2.0
"""What recomputed blocks keep for their backward: the results that are dearest to compute again, byte for byte, in a budget.

A result's worth is its operations divided by its bytes, on the rank that has most of them. The best ones are kept in all
blocks, then the next; one for which not all is left is kept in the first blocks. It follows from the configuration alone,
so it is the same on every rank and in every run. The last product of a dense block is not run again in any case: nothing
behind it saves what it gave.

No import of MindSpore but in `install`. Read next: `ms_dtensor/dispatch/patches/recomputed.py`, which does it.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .config import Config, joins
from .flops import seen

if TYPE_CHECKING:
    from mindspore import nn

GIB = 2**30


class Result(NamedTuple):
    """What an op of a block gives, of a micro-batch on one rank."""

    flops: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What is kept.

    Attributes:
        layers: in how many of the layers, the first ones that have it, by the name of the cell, or "attention".
        bytes: of a rank, by the same names.
        again: share of a block's operations that run a second time, on the average over layers.
    """

    layers: dict[str, int]
    bytes: dict[str, int]
    again: float

    def __str__(self) -> str:
        told = [f"{name} in {n} layers: {self.bytes[name] / GIB:.2f} GiB" for name, n in self.layers.items()]
        return f"recomputed blocks keep {', '.join(told) or 'their inputs'}; {self.again:.0%} of their operations run again"


def results(cfg: Config) -> dict[str, Result]:
    """What of a block could be kept: attention (with its softmax's statistics) and products, of dense blocks all."""
    from .memory import Sizes  # it asks what is chosen here
    m, s, wide = cfg.model, Sizes(cfg), {"float32": 4, "bfloat16": 2}[cfg.train.dtype]
    heads, keys = s._cut(m.n_heads), s._cut(m.n_kv_heads)
    width, n = heads * m.head_dim, s.tokens

    def product(inner: int, columns: int) -> Result:
        return Result(2 * n * inner * columns, n * columns * wide)
    out = {"attention": Result(4 * n * seen(m, cfg.train.seq) * width, n * (width * wide + 2 * heads * 8 * 4))}
    qkv = {"attention.wq": width} | dict.fromkeys(("attention.wk", "attention.wv"), keys * m.head_dim)
    products = [("attention.wqkv", m.dim, qkv), ("attention.wo", width, {"attention.wo": m.dim})]
    if dense_layers(cfg):
        gated = dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), s._cut(m.ffn_dim))
        products.append(("feed_forward.w13", m.dim, gated))
    for together, inner, parts in products:
        of = {together: sum(parts.values())} if joins(cfg) and len(parts) > 1 else parts
        out |= {name: product(inner, columns) for name, columns in of.items()}
    return out


def dense_layers(cfg: Config) -> int:
    """How many layers have no experts."""
    return cfg.model.n_layers if cfg.model.experts is None else cfg.model.experts.dense_layers


def choose(cfg: Config) -> Choice:
    """The best that fits into train.recompute_gib.

    Example:
        >>> from model_zoo.llama.configio import load
        >>> options = ["--config", "model_zoo/llama/configs/llama3_8b.yaml", "--parallel.dp", "8", "--parallel.tp", "1",
        ...            "--parallel.sequence_parallel", "false", "--parallel.fsdp", "true", "--train.micro_batches", "1",
        ...            "--train.recompute", "true", "--train.recompute_gib", "4"]
        >>> print(choose(load(options, 8)[0]))
        recomputed blocks keep attention.wqkv in 32 layers: 1.50 GiB, attention.wo in 32 layers: 1.00 GiB, \
feed_forward.w13 in 6 layers: 1.31 GiB, attention in 4 layers: 0.16 GiB; 47% of their operations run again
    """
    from .memory import Sizes, shares
    m, possible = cfg.model, results(cfg)
    left, layers, sizes = cfg.train.recompute_gib * GIB, dict[str, int](), dict[str, int]()
    waiting = max(share.blocks / share.layers for share in shares(cfg) if share.layers)  # micro-batches of a layer at once
    whole = max(share.blocks for share in shares(cfg))
    for name, one in sorted(possible.items(), key=lambda item: -item[1].flops / item[1].bytes):
        have = dense_layers(cfg) if name.startswith("feed_forward") else m.n_layers
        most = whole * have // m.n_layers if have < m.n_layers else whole
        count = have if one.bytes * most <= left else 0
        if not count and cfg.parallel.pp == 1:  # stages hold different numbers of micro-batches: there all layers, or none
            count = int(left // (one.bytes * waiting))
        if count:
            layers[name], sizes[name] = count, int(one.bytes * (most if count == have else count * waiting))
            left -= sizes[name]
    dense, n = dense_layers(cfg), Sizes(cfg).tokens
    total = m.n_layers * sum(one.flops for name, one in possible.items() if not name.startswith("feed_forward"))
    w2 = dense * 2 * n * m.dim * Sizes(cfg)._cut(m.ffn_dim)
    if m.experts is not None:
        width = Sizes(cfg).ffn * m.experts.per_token + Sizes(cfg)._cut(m.experts.shared * (m.experts.width or m.ffn_dim))
        total += (m.n_layers - dense) * 2 * n * 3 * m.dim * width
    once = w2 * last_is_left_out(cfg) + sum(count * possible[name].flops for name, count in layers.items())
    return Choice(layers, sizes, 1 - once / (total + 3 * w2))


def last_is_left_out(cfg: Config) -> bool:
    """Whether a dense block's w2 needs no second run: what stands there else has parts of its own."""
    return cfg.lora is None and cfg.parallel.tp_overlap == 1


def install(cfg: Config, layers: list[nn.Cell]) -> None:
    """Lets blocks recompute, all but what is kept; `layers` are all of the model, some of them in other stages."""
    from ms_dtensor import checkpoint_wrapper
    from ms_dtensor.dispatch.patches.recomputed import excluded
    from ms_dtensor.internals.target import on_cpu
    from ms_dtensor.parallel.layouts import around_construct

    from .parallelize import here
    chosen = choose(cfg).layers
    for number, layer in enumerate(layers):
        if not here([layer]):
            continue
        kept = {name for name, count in chosen.items() if number < count}
        for name, cell in layer.cells_and_names():
            last = name == "feed_forward.w2" and not layer.mixed and last_is_left_out(cfg)
            if name in kept - {"attention"} or last:
                around_construct(cell, partial(excluded, reads=partial(weights, cell), needed=not last))
        save = None
        if "attention" in kept and on_cpu():  # its kernel is no op that is seen
            layer.attention.core = excluded(layer.attention.core, reads=tuple)
        elif "attention" in kept:
            save = ["flash_attention"]
        checkpoint_wrapper(layer, save=save)


def weights(cell: nn.Cell) -> list:
    """What stands in the places of a cell's parameters."""
    return [x for x in cell._params.values() if x is not None]
