# SPDX-License-Identifier: Apache-2.0
"""The work of a transformer on one rank, op by op: what each part computes, exchanges, and keeps for its backward.

One list serves time and memory alike. With every part of it summed up, what a block keeps is the formula of Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2205.05198): for `dropout=True, gated=False,
fused_attention=False`, s b h (10 + 24/t + 5 a s / (h t)) bytes, and (34 + 5 a s / h) / t with sequence parallelism.
Pure arithmetic. Read next: `step.py`, which makes a training step of it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import ConfigError
from .cost import Collective, Op, Work


def counts(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number, and not too small."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_counts(who: str, told: Mapping[str, Any], least: int = 1) -> None:
    """Refuses what is no number of things.

    Raises:
        ConfigError: it names them.
    """
    wrong = [f"{name} = {value!r}" for name, value in told.items() if not counts(value, least)]
    if wrong:
        raise ConfigError(f"For '{who}', a number is none.", ", ".join(wrong),
                          f"Each is an integer, {least} or more.", "numbers as a configuration has them")


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a model.

    Attributes:
        layers, dim, heads, kv_heads, head_size, ffn, vocab: as in its configuration; `ffn` is an expert's width if any.
        gated: three matrices in the feed-forward (Llama), not two (GPT).
        dropout: after attention, the projection and the feed-forward.
        fused_attention: one kernel, causal, that keeps no scores.
        experts: how many share the feed-forward's place; 0: it is no mixture.
        per_token: experts that a token is given to.
        tied: head and embedding are one matrix.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    gated: bool = True
    dropout: bool = False
    fused_attention: bool = True
    experts: int = 0
    per_token: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "dim", "heads", "kv_heads", "head_size", "ffn", "vocab")
        check_counts("Transformer", {name: getattr(self, name) for name in sizes})
        check_counts("Transformer", {"experts": self.experts, "per_token": self.per_token}, 0)
        if self.heads % self.kv_heads or self.per_token > self.experts or (self.experts > 0) > self.per_token:
            raise ConfigError("For 'Transformer', sizes do not fit together.",
                              f"heads = {self.heads}, kv_heads = {self.kv_heads}, experts = {self.experts}, "
                              f"per_token = {self.per_token}", "Equally many query heads share each key head; a token goes "
                              "to one expert at least, and at most to all.",
                              ("kv_heads that divides heads", "per_token from 1 to experts"))

    @property
    def attention_weights(self) -> int:
        """Elements of q, k, v and the projection of a block."""
        return 2 * self.dim * self.head_size * (self.heads + self.kv_heads)

    @property
    def ffn_weights(self) -> int:
        """Elements of a block's feed-forward, of one expert."""
        return (3 if self.gated else 2) * self.dim * self.ffn

    @property
    def parameters(self) -> int:
        """Elements of all matrices; norms and biases are not counted."""
        block = self.attention_weights + self.ffn_weights * max(1, self.experts) + self.dim * self.experts
        return self.layers * block + self.dim * self.vocab * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model lies over ranks. Rank numbers count tp first, then cp, dp and pp.

    Attributes:
        dp, cp, tp, pp, ep: ranks of each axis; ep divides dp * cp.
        micro_batches: of a step, on each rank.
        stages_per_rank: of an interleaved pipeline.
        sequence_parallel: between blocks tokens are cut over tp.
        recompute: what of a block runs again in the backward.
        sharded: what dp (with cp) divides: nothing, the optimizer (ZeRO-1), or everything (FSDP).
        hsdp: copies of what is divided, over parts of dp.
        gathered_again: with sequence parallelism, what was gathered is not kept for the backward (Megatron).
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    micro_batches: int = 1
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    recompute: Literal["none", "attention", "full"] = "none"
    sharded: Literal["none", "zero1", "fsdp"] = "none"
    hsdp: int = 1
    gathered_again: bool = False

    def __post_init__(self) -> None:
        degrees = ("dp", "cp", "tp", "pp", "ep", "micro_batches", "stages_per_rank", "hsdp")
        check_counts("Plan", {name: getattr(self, name) for name in degrees})
        for name, known in (("recompute", ("none", "attention", "full")), ("sharded", ("none", "zero1", "fsdp"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"For 'Plan', {name} is {getattr(self, name)!r}.", "", f"It is one of {', '.join(known)}.",
                                  f'{name}="{known[0]}"')

    @property
    def world(self) -> int:
        """Ranks."""
        return self.dp * self.cp * self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model on one rank, for one micro-batch.

    Attributes:
        forward, backward: its work, in order.
        saved: bytes kept for the backward.
        core: between the products of attention, what `recompute="attention"` runs again.
    """

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    saved: float = 0.0
    core: bool = False


def product(name: str, rows: float, inner: float, columns: float, itemsize: int, accumulated: bool,
            saved: float) -> Part:
    """rows x inner by inner x columns, of a weight whose gradient is float32, added to if `accumulated`."""
    flops = 2 * rows * inner * columns
    traffic = itemsize * (rows * inner + inner * columns + rows * columns)
    weight = itemsize * rows * (inner + columns) + (8 if accumulated else 4) * inner * columns
    one = Op(name, flops, traffic, True)
    back = replace(one, name=f"{name}, of its input"), Op(f"{name}, of its weight", flops, weight, True)
    return Part((one,), back, saved)


def elementwise(name: str, elements: float, flops: float, traffic: float, saved: float = 0.0, again: float = 1.5,
                core: bool = False) -> Part:
    """`flops` and `traffic` (bytes) are of one element; its backward reads `again` times as much."""
    return Part((Op(name, flops * elements, traffic * elements),),
                (Op(f"{name}, backward", flops * elements, again * traffic * elements),), saved, core)


def block(model: Transformer, plan: Plan, sequences: float, length: int, itemsize: int = 2) -> list[Part]:
    """The parts of one block.

    Args:
        model: its sizes.
        plan: where it lies.
        sequences: of a micro-batch on one rank of dp.
        length: tokens of a sequence, before cp cuts it.
        itemsize: bytes of an activation's element.
    """
    b, t, d, e = itemsize, plan.tp, model.dim, model.head_size
    tokens = sequences * length / plan.cp
    between = tokens / t if plan.sequence_parallel else tokens
    q, kv, more = model.heads * e / t, model.kv_heads * e / t, plan.micro_batches > 1
    read = b * d * (between if plan.gathered_again else tokens)  # by the products behind a norm
    statistics = 4 if model.fused_attention else 0  # a number a token that the fused norm of a Llama keeps
    parts = [_norm(between, d, b, statistics), _enter(model, plan, tokens, b),
             product("q, k, v", tokens, d, q + 2 * kv, b, more, read)]
    if plan.cp > 1:
        parts.append(_keys(plan, tokens * kv * 2, b))
    parts += _attention(model, sequences, length, q, kv, plan.cp, b)
    parts += [product("projection", tokens, q, d, b, more, b * tokens * q), _leave(plan, tokens * d, b),
              _residual(model, between, d, b), _norm(between, d, b, statistics)]
    if model.experts:
        parts += _experts(model, plan, tokens, between, b, more)
    else:
        parts += [_enter(model, plan, tokens, b), *_ffn(model, tokens, model.ffn / t, b, more, read),
                  _leave(plan, tokens * d, b)]
    return [*parts, _residual(model, between, d, b)]


def ends(model: Transformer, plan: Plan, sequences: float, length: int, itemsize: int = 2) -> list[Part]:
    """What the last stage has besides blocks: norm, head and loss, logits cut over tp."""
    tokens = sequences * length / plan.cp
    between = tokens / plan.tp if plan.sequence_parallel else tokens
    columns, more = model.vocab / plan.tp, plan.micro_batches > 1
    return [_norm(between, model.dim, itemsize), _enter(model, plan, tokens, itemsize),
            product("head", tokens, model.dim, columns, itemsize, more, itemsize * between * model.dim),
            elementwise("loss", tokens * columns, 5, itemsize + 4, (itemsize + 4) * tokens * columns)]


def _norm(tokens: float, dim: int, b: int, statistics: int = 0) -> Part:
    return elementwise("norm", tokens * dim, 9, 2 * b, b * tokens * dim + statistics * tokens)


def _residual(model: Transformer, tokens: float, dim: int, b: int) -> Part:
    mask = tokens * dim if model.dropout else 0
    return elementwise("residual", tokens * dim, 2, 3 * b + (3 if model.dropout else 0), mask, 1.0)


def _enter(model: Transformer, plan: Plan, tokens: float, b: int) -> Part:
    """Before matrices cut by columns: tokens are gathered; the backward sums up, and may gather again for the weights."""
    size, axis = b * tokens * model.dim, ("tp", plan.tp, plan.tp)
    if plan.sequence_parallel:
        again = (_of("all_gather", size, axis),) * plan.gathered_again
        return Part((_of("all_gather", size, axis),), (*again, _of("reduce_scatter", size, axis)))
    return Part((), (_of("all_reduce", size, axis),))


def _leave(plan: Plan, elements: float, b: int) -> Part:
    """Behind a matrix cut by rows: summands are added up."""
    size, axis = b * elements, ("tp", plan.tp, plan.tp)
    if plan.sequence_parallel:
        return Part((_of("reduce_scatter", size, axis),), (_of("all_gather", size, axis),))
    return Part((_of("all_reduce", size, axis),), ())


def _of(op: str, size: float, axis: tuple[str, int, int]) -> Collective:
    name, ranks, span = axis
    return Collective(op, size, ranks, span, name)


def _keys(plan: Plan, elements: float, b: int) -> Part:
    """Keys and values of all tokens, gathered over cp; their gradients go back."""
    size, axis = b * elements * plan.cp, ("cp", plan.cp, plan.cp * plan.tp)
    return Part((_of("all_gather", size, axis),), (_of("reduce_scatter", size, axis),), size)


def _attention(model: Transformer, sequences: float, length: int, q: float, kv: float, cp: int, b: int) -> list[Part]:
    rows = sequences * length / cp
    scores = rows * length * q / model.head_size
    if model.fused_attention:  # causal: half of the scores; its backward computes them again
        flops, traffic = 2 * rows * length * q, b * (2 * rows * q + 2 * sequences * length * kv)
        # before they are turned and after, and values; the result is the projection's; statistics of each row, eight times
        saved = b * (2 * rows * q + 3 * rows * kv) + 4 * 2 * 8 * rows * q / model.head_size
        return [Part((Op("attention", flops, traffic, True),), (Op("attention, backward", 2.5 * flops, 2 * traffic, True),),
                     saved, True)]
    flops, side = 2 * scores * model.head_size, b * (rows * q + rows * kv + scores)
    twice = (Op("scores, backward", flops, side, True),) * 2
    return [Part((Op("scores", flops, side, True),), twice, b * rows * (q + kv), True),
            elementwise("softmax", scores, 5, 2 * b, b * scores, core=True),
            *([elementwise("dropout", scores, 1, 2 * b + 1, (b + 1) * scores, 1.0, True)] if model.dropout else ()),
            Part((Op("values", flops, side, True),), twice, b * rows * kv, True)]


def _ffn(model: Transformer, tokens: float, width: float, b: int, more: bool, saved: float,
         times: float = 1.0) -> list[Part]:
    """`times`: how many such feed-forwards a rank has, each of its own share of the tokens."""
    wide = 2 if model.gated else 1
    out = [product("gate and up" if model.gated else "up", tokens, model.dim, wide * width, b, more, saved),
           elementwise("activation", tokens * width, 8, (wide + 1) * b, wide * b * tokens * width),
           product("down", tokens, width, model.dim, b, more, b * tokens * width)]
    if times == 1.0:
        return out
    extra = b * (times - 1) * model.dim * width  # the weights of all of them are read

    def each(work: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(op, traffic=op.traffic + extra) if isinstance(op, Op) and op.matrix else op for op in work)
    return [Part(each(part.forward), each(part.backward), part.saved) for part in out]


def _experts(model: Transformer, plan: Plan, tokens: float, between: float, b: int, more: bool) -> list[Part]:
    """A router, rows to the ranks of their experts and back, and the experts; chosen equally often."""
    own = between if plan.sequence_parallel else tokens  # every rank of tp has its own tokens, or all have the same
    chosen = own * model.per_token
    rows, axis = b * chosen * model.dim, ("ep", plan.ep, plan.ep * plan.tp)
    kept = tokens * model.per_token  # over tp the experts are cut, and every rank has all tokens' rows
    there = Part((_of("all_to_all", rows, axis),), (_of("all_to_all", rows, axis),), b * kept * model.dim)
    router = 4 * (3 * tokens * model.experts + 5 * kept)  # its scores, and which were chosen
    return [product("router", own, model.dim, model.experts, 4, more, router), there,
            *_ffn(model, chosen, model.ffn, b, more, 0.0, model.experts / plan.ep), there]
