# SPDX-License-Identifier: Apache-2.0
"""`suggest`: every plan of a model over so many ranks, by what a step of it would cost; ranked, explained, nothing applied.

All plans are estimated, none is guessed away: ten thousand take a second or two. A plan that does not fit the device's
memory is not ranked, but the quickest of those is named, with what it lacks.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ...core.divisors import divisors
from ...errors import ConfigError
from ..text import human
from .hardware import Hardware, load_hardware
from .step import Estimate, Estimates
from .transformer import Plan, Transformer, check_counts, counts

GIB = 2**30
MOST = 2**24  # ranks, sequences and tokens that are cut in all ways
NAMES = {  # what configurations call a size: ours, Hugging Face's, Megatron's
    "layers": ("layers", "n_layers", "num_hidden_layers", "num_layers"), "dim": ("dim", "hidden_size"),
    "heads": ("heads", "n_heads", "num_attention_heads"),
    "kv_heads": ("kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
    "head_size": ("head_size", "head_width", "head_dim", "kv_channels"),
    "ffn": ("ffn", "ffn_dim", "moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    "vocab": ("vocab", "vocab_size"), "tied": ("tied", "tied_head", "tie_word_embeddings")}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Plans, the quickest first.

    Attributes:
        plans: those that fit.
        too_large: the quickest that does not fit, if it would be quicker than the first of `plans`; else None.
        tried: how many plans were estimated.
        hardware: the machine.
        tokens: of a step.
    """

    plans: tuple[Estimate, ...]
    too_large: Estimate | None
    tried: int
    hardware: Hardware
    tokens: int

    def __str__(self) -> str:
        best = self.plans[0]
        lines = [f"{self.tried} plans on {best.plan.world} ranks of {self.hardware.name}, {len(self.plans)} fit; the first:"]
        for i, one in enumerate(self.plans[:5]):
            rate = self.tokens / one.seconds / one.plan.world
            lines.append(f"  {i + 1}. {duration(one.seconds)} a step, {rate:8,.0f} tokens/s a rank, "
                         f"{human(one.bytes):>10}  {keys(one.plan)}")
            if i:
                lines.append(f"     {one.seconds / best.seconds - 1:.1%} slower: {lost(one, best)}")
        if self.too_large is not None:
            over = self.too_large
            lines.append(f"  not ranked: {duration(over.seconds).strip()} a step, but {over.bytes / GIB:.1f} GiB of "
                         f"{self.hardware.capacity / GIB:.0f}: {keys(over.plan)}")
        return "\n".join([*lines, f"by the figures of {self.hardware.name}: {self.hardware.source}"])


def suggest(model: Transformer | Mapping[str, Any] | Any, world: int, hardware: str | Path | Hardware, *, batch: int,
            seq: int, itemsize: int = 2) -> Suggestion:
    """Ranks all plans of a model by the seconds of a step that `estimate` gives.

    Args:
        model: its sizes: a `Transformer`, a configuration of the recipe or of Hugging Face, or a mapping of either's names.
        world: ranks.
        hardware: for `load_hardware`.
        batch: sequences of all ranks in a step.
        seq: tokens of a sequence.
        itemsize: bytes of an activation's element: 2, or 4 for float32.

    Returns:
        Plans that fit, ranked; printed, it says why each of the next ones lost, and what to give the recipe. Nothing is
        applied, and nothing communicates.

    Raises:
        ConfigError: a size of the model is not told or a number is none, no plan cuts the model over so many ranks, or none
            fits.

    Example:
        >>> from ms_dtensor.debug import suggest
        >>> found = suggest({"n_layers": 32, "dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336,
        ...                  "vocab_size": 128256}, 8, "910b", batch=8, seq=8192)
        >>> found.plans[0].plan.world, found.plans[0].bytes < found.hardware.capacity
        (8, True)
    """
    sizes, machine = transformer(model), load_hardware(hardware)
    check_counts("suggest", {"world": world, "batch": batch, "seq": seq, "itemsize": itemsize})
    if max(world, batch, seq) > MOST:
        raise ConfigError("For 'suggest', a number is too large.", f"world = {world}, batch = {batch}, seq = {seq}"[:200],
                          f"Each is at most {MOST:,}: all ways to cut them are tried.", "the numbers of one step")
    of = Estimates(sizes, machine, batch, seq, itemsize).of
    found = sorted((of(plan) for plan in plans(sizes, world, machine, batch, seq)),
                   key=lambda e: (e.seconds, e.bytes > machine.capacity, e.plan.recompute != "none", e.bytes,
                                  _simpler(e.plan)))
    if not found:
        raise ConfigError(
            f"For 'suggest', no plan cuts this model over {world} ranks.",
            f"{sizes.heads} heads, {sizes.kv_heads} of keys, {sizes.layers} layers, {batch} sequences of {seq} tokens",
            "tp divides both kinds of heads, pp the layers, dp the batch and cp the tokens; their product is the ranks.",
            ("a batch that the ranks divide", "another number of ranks"))
    fit = tuple(e for e in found if e.bytes <= machine.capacity)
    if not fit:
        least = min(found, key=lambda e: e.bytes)
        raise ConfigError(
            f"For 'suggest', no plan fits: {sizes.parameters / 1e9:.2f} B parameters on {world} ranks of {machine.name}.",
            f"the least that one needs is {least.bytes / GIB:.1f} GiB a rank: {keys(least.plan)}",
            f"A rank has {machine.capacity / GIB:.0f} GiB.",
            ["more ranks", "a smaller batch or seq", "a batch that more ranks divide"])
    too_large = found[0] if found[0].bytes > machine.capacity else None
    return Suggestion(fit, too_large, len(found), machine, batch * seq)


def transformer(model: Transformer | Mapping[str, Any] | Any) -> Transformer:
    """A model's sizes by the names that configurations have for them."""
    if isinstance(model, Transformer):
        return model

    def get(name: str) -> Any:
        return model.get(name) if isinstance(model, Mapping) else getattr(model, name, None)

    told: dict[str, Any] = {size: next((value for name in names if (value := get(name)) is not None), None)
                            for size, names in NAMES.items()}
    wrong = [f"{size} = {value!r}" for size, value in told.items()
             if size != "tied" and value is not None and not counts(value)]
    if wrong:
        raise ConfigError("For 'suggest', a size of the model is no size.", ", ".join(wrong),
                          "Each is an integer, 1 or more.", "numbers as a configuration has them")
    told["kv_heads"] = told["kv_heads"] or told["heads"]
    if told["heads"]:
        _divides("kv_heads", told["kv_heads"], "heads", told["heads"])
    if told["head_size"] is None and told["dim"] and told["heads"]:
        _divides("heads", told["heads"], "dim", told["dim"])
        told["head_size"] = told["dim"] // told["heads"]
    told["tied"] = bool(told["tied"])
    lacking = [size for size, value in told.items() if value is None]
    if lacking:
        raise ConfigError("For 'suggest', a size of the model is not told.", f"{', '.join(lacking)} of {str(model)[:120]}",
                          "A plan is counted from the model's sizes.",
                          [*(["give its text_config"] if get("text_config") is not None else []),
                           *(["python -m ms_dtensor suggest FILE reads a file"] if isinstance(model, str | Path) else []),
                           *(f"give {size} as one of {', '.join(NAMES[size])}" for size in lacking)])
    experts = get("experts")
    if experts is not None and not isinstance(experts, int):
        told |= {"experts": experts.count, "per_token": experts.per_token, "ffn": experts.width or told["ffn"]}
    else:
        count = experts or get("num_local_experts") or get("num_experts") or get("n_routed_experts")
        told |= {"experts": count or 0, "per_token": (get("per_token") or get("num_experts_per_tok") or 0) if count else 0}
    return Transformer(**told)


def _divides(part: str, count: int, whole: str, size: int) -> None:
    if size % count:
        raise ConfigError("For 'suggest', the model's heads do not divide it.", f"{part} = {count}, {whole} = {size}",
                          "Heads are equally wide, and equally many query heads share each key head.",
                          f"{part} that divides {size}")


def plans(model: Transformer, world: int, machine: Hardware, batch: int, seq: int) -> Iterator[Plan]:
    """Every plan whose degrees divide what they cut: tp the heads and within the quickest link, with and without sequence
    parallelism, pp the layers, cp sequences, ep the experts; dp is what is left, and divides the batch."""
    for tp, pp in product(divisors(world), divisors(world)):
        if world % (tp * pp) or model.heads % tp or model.kv_heads % tp or model.layers % pp or tp > machine.links[0].ranks:
            continue
        rest = world // (tp * pp)
        for cp in divisors(rest):
            dp = rest // cp
            if batch % dp or seq % cp:
                continue
            for micro in divisors(batch // dp):
                if pp > 1 and micro < pp:
                    continue
                for ep in divisors(dp * cp) if model.experts else (1,):
                    if model.experts % ep:
                        continue
                    ways = product(_stages(model, pp, micro), (False, True)[:1 + (tp > 1)], _recompute(model),
                                   _sharded(dp * cp))
                    for stages, cut_tokens, recompute, sharded in ways:
                        yield Plan(dp, cp, tp, pp, ep, micro, stages, cut_tokens, recompute, sharded)


def _stages(model: Transformer, pp: int, micro: int) -> tuple[int, ...]:
    return tuple(v for v in (1, 2, 4) if v == 1 or pp > 1 and model.layers % (pp * v) == 0 and micro % pp == 0)


def _recompute(model: Transformer) -> tuple[Any, ...]:
    return ("none", "full") if model.fused_attention else ("none", "attention", "full")


def _sharded(ranks: int) -> tuple[Any, ...]:
    return ("none", "zero1", "fsdp") if ranks > 1 else ("none",)


def _simpler(plan: Plan) -> tuple[int, ...]:
    """Of plans alike, fewer axes and options come first."""
    axes = (plan.pp, plan.cp, plan.tp, plan.ep)
    return (sum(n > 1 for n in axes), *axes, plan.micro_batches, plan.sequence_parallel, plan.recompute != "none",
            ("none", "zero1", "fsdp").index(plan.sharded))


def duration(seconds: float) -> str:
    """A time of nine digits, and its unit."""
    return f"{seconds:9.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:8.3f} ms"


def keys(plan: Plan) -> str:
    """The recipe's options for a plan; what it has no option for is said in words."""
    told: dict[str, Any] = {f"parallel.{name}": getattr(plan, name) for name in ("pp", "dp", "hsdp", "cp", "tp", "ep")}
    told = {key: value for key, value in told.items() if value > 1}
    if plan.sequence_parallel:
        told["parallel.sequence_parallel"] = "true"
    if plan.sharded != "none":
        told[f"parallel.{plan.sharded}"] = "true"
    if plan.stages_per_rank > 1:
        told |= {"parallel.pp_schedule": "interleaved", "parallel.pp_stages_per_rank": plan.stages_per_rank}
    if plan.micro_batches > 1:
        told["train.micro_batches"] = plan.micro_batches
    if plan.recompute == "full":
        told["train.recompute"] = "true"
    words = [f"--{key} {value}" for key, value in told.items()]
    if plan.recompute == "attention":
        words.append("and checkpoint_wrapper around the core of attention")
    return " ".join(words) or "one rank"


def lost(one: Estimate, best: Estimate) -> str:
    """What makes a plan slower than the best: the parts of a step that differ by a hundredth of it, the largest first."""
    gaps = sorted(((one.time[part] - best.time[part]) / best.seconds, part) for part in one.time)
    said = [f"{part} {gap:+.1%}" for gap, part in sorted(gaps, key=lambda g: -abs(g[0])) if abs(gap) >= 0.001]
    return ", ".join(said[:4]) or "by less than a thousandth in each part"
