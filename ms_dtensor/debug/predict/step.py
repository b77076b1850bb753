# SPDX-License-Identifier: Apache-2.0
"""Seconds and bytes of a training step of a transformer on a machine, by formula; what each figure is made of is kept.

Not a clock: no figure is fitted to the run that is predicted, and what is left out is said in `docs/howto/predict.md`. Data
parallelism's exchanges run beside computation as far as they fit; those of tp and cp are waited for; a pipeline's last
stage, which has the head, sets the pace. Read next: `search.py`, which compares plans.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import ConfigError
from .cost import Collective, Op, Work, seconds, together, total
from .hardware import Hardware
from .peak import ROWS, Held, peak
from .transformer import Part, Plan, Transformer, block, check_counts, ends

GRADIENT = 4  # bytes of a parameter's, float32
UPDATED = 30  # bytes that an update reads and writes of a parameter: itself, two moments, gradient, the copy in 16 bits


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step of one plan.

    Attributes:
        plan: it.
        seconds: of a step, of the slowest rank.
        memory: bytes of a rank at the peak by what they are for, see `peak.py`, and "communication buffers".
        time: seconds by what they are for; they add up to `seconds`.
    """

    plan: Plan
    seconds: float
    memory: dict[str, float]
    time: dict[str, float]

    @property
    def bytes(self) -> float:
        """All of `memory`."""
        return sum(self.memory.values())


def estimate(model: Transformer, plan: Plan, machine: Hardware, batch: int, length: int, itemsize: int = 2) -> Estimate:
    """A step of `batch` sequences of `length` tokens.

    Args:
        model: its sizes.
        plan: its layout; `batch` is a multiple of dp * micro_batches.
        machine: of `load_hardware`.
        batch: sequences of all ranks in a step.
        length: tokens of a sequence.
        itemsize: bytes of an activation's element.

    Raises:
        ConfigError: a number is none, or the batch is no such multiple.

    Example:
        >>> from ms_dtensor.debug.predict import Plan, Transformer, estimate, load_hardware
        >>> llama = Transformer(layers=32, dim=4096, heads=32, kv_heads=8, head_size=128, ffn=14336, vocab=128256)
        >>> step = estimate(llama, Plan(dp=8, sharded="fsdp", recompute="full"), load_hardware("910b"), 8, 8192)
        >>> 2000 < 8 * 8192 / step.seconds / 8 < 4000          # tokens a second of a card
        True
    """
    check_counts("estimate", {"batch": batch, "length": length, "itemsize": itemsize})
    if batch % (plan.dp * plan.micro_batches):
        raise ConfigError("For 'estimate', the batch cannot be cut.", f"{batch} sequences over dp = {plan.dp} ranks and "
                          f"{plan.micro_batches} micro-batches", "Each rank has equally many sequences in a micro-batch.",
                          f"batch={batch + -batch % (plan.dp * plan.micro_batches)}")
    return Estimates(model, machine, batch, length, itemsize).of(plan)


class Passes(NamedTuple):
    """What a micro-batch is on a rank, without what cuts only parameters or deals out layers.

    Attributes:
        parts: of a block.
        forward, backward: seconds of a block, computing and waiting.
        core: of its forward's core of attention.
        head: of what the last stage has besides blocks, all.
    """

    parts: list[Part]
    forward: tuple[float, float]
    backward: tuple[float, float]
    core: tuple[float, float]
    head: float


class Estimates:
    """Those of several plans of one step; what plans have in common is worked out once.

    Args:
        model, machine, batch, length, itemsize: as of `estimate`.
    """

    def __init__(self, model: Transformer, machine: Hardware, batch: int, length: int, itemsize: int):
        self.model, self.machine, self.batch, self.length, self.itemsize = model, machine, batch, length, itemsize
        self._known: dict[tuple, Passes] = {}

    def of(self, plan: Plan) -> Estimate:
        """One of them."""
        sequences = self.batch / (plan.dp * plan.micro_batches)
        key = (sequences, plan.cp, plan.tp, plan.ep, plan.micro_batches > 1, plan.sequence_parallel, plan.gathered_again)
        passes = self._known.get(key)
        if passes is None:
            passes = self._known[key] = self._passes(plan, sequences)
        time = _times(self.model, plan, self.machine, passes, self.itemsize, sequences * self.length)
        return Estimate(plan, sum(time.values()), memory(self.model, plan, passes.parts, self.itemsize, self.machine,
                                                         sequences * self.length / plan.cp), time)

    def _passes(self, plan: Plan, sequences: float) -> Passes:
        def split(work: Iterable[Work]) -> tuple[float, float]:
            work = list(work)
            return (total((w for w in work if isinstance(w, Op)), self.machine),
                    total((w for w in work if isinstance(w, Collective)), self.machine))
        parts, last = (of(self.model, plan, sequences, self.length, self.itemsize) for of in (block, ends))
        return Passes(parts, split(w for part in parts for w in part.forward),
                      split(w for part in parts for w in part.backward),
                      split(w for part in parts if part.core for w in part.forward),
                      sum(split(w for part in last for w in (*part.forward, *part.backward))))


# -- time --------------------------------------------------------------------------------------------------------------
def _times(model: Transformer, plan: Plan, machine: Hardware, passes: Passes, itemsize: int,
           tokens: float) -> dict[str, float]:
    (forward, forward_waits), (backward, backward_waits), head = passes.forward, passes.backward, passes.head
    again, again_waits = {"full": passes.forward, "attention": passes.core, "none": (0.0, 0.0)}[plan.recompute]
    blocks = model.layers / plan.pp
    computing, waiting = blocks * (forward + backward + again), blocks * (forward_waits + backward_waits + again_waits)
    filled = plan.micro_batches + (plan.pp - 1) / plan.stages_per_rank  # passes of a stage in a step
    reductions = _data_parallel(model, plan, machine, itemsize, blocks, (forward, backward + again), head)
    hop = Collective("exchange", itemsize * tokens / plan.cp * model.dim / (plan.tp if plan.sequence_parallel else 1), 2,
                     2 * plan.tp * plan.cp * plan.dp, "pp")
    hops = 2 * (plan.micro_batches * plan.stages_per_rank + plan.pp - 1) if plan.pp > 1 else 0
    own = parameters_of_a_rank(model, plan)
    updated = own / (plan.dp * plan.cp if plan.sharded != "none" else 1)
    return {"computation": plan.micro_batches * computing, "tp and cp": plan.micro_batches * waiting,
            "head": plan.micro_batches * head,
            "bubble": (filled - plan.micro_batches) * (computing + waiting),
            "between stages": hops * seconds(hop, machine) if hops else 0.0, "data parallelism": reductions,
            "optimizer": seconds(Op("AdamW", 10 * updated, UPDATED * updated), machine)}


def _data_parallel(model: Transformer, plan: Plan, machine: Hardware, itemsize: int, blocks: float,
                   computing: tuple[float, float], head: float) -> float:
    """Seconds that a step is longer for its data axes: what of their exchanges does not fit beside computation.

    A table of words has its own: the head's beside its computing; that of an embedding, whose values a step needs first and
    whose gradient comes last, beside nothing.
    """
    ranks, span = plan.dp * plan.cp, plan.dp * plan.cp * plan.tp
    if ranks == 1:
        return 0.0
    weights = model.attention_weights + model.ffn_weights * max(1, model.experts) / plan.ep
    forward, backward = computing
    processor = machine.link(span).processor

    def longer(work: float, *collectives: tuple[str, float]) -> float:
        sending = sum(seconds(Collective(op, size, ranks, span), machine) for op, size in collectives)
        return together(work, sending, processor) - work

    def parts(weights: float) -> tuple[tuple[str, float], tuple[str, float]]:
        reduce = "all_reduce" if plan.sharded == "none" else "reduce_scatter"
        return ("all_gather", itemsize * weights), (reduce, GRADIENT * weights)

    gather, reduce = parts(weights / plan.tp)
    table_gather, table_reduce = parts(model.dim * model.vocab / plan.tp)
    gathered, beside, alone = plan.sharded != "none", (head / 3, head * 2 / 3), (0.0, 0.0)
    places = [beside] if plan.pp > 1 else [alone] if model.tied else [alone, beside]
    end = sum(longer(there, table_gather) * gathered + longer(back, table_reduce) for there, back in places)
    if plan.sharded == "fsdp":
        each = longer(forward, gather) + longer(backward, gather)
        return end + blocks * (plan.micro_batches * each + longer(backward, gather, reduce) - longer(backward, gather))
    end += blocks * longer(backward, reduce)  # the last micro-batch's backward hides it
    return end + (blocks * longer(forward, gather) if gathered else 0.0)


# -- memory ------------------------------------------------------------------------------------------------------------
def parameters_of_ends(model: Transformer, plan: Plan) -> float:
    """Of these the embedding and the head, of the stage that has most."""
    return model.dim * model.vocab / plan.tp * (1 if plan.pp > 1 or model.tied else 2)


def parameters_of_a_rank(model: Transformer, plan: Plan, tables: bool = True) -> float:
    """Elements that a rank computes with, of the stage that has most; cut over tp, pp and ep only."""
    block_weights = model.attention_weights + model.ffn_weights * max(1, model.experts) / plan.ep + model.dim * model.experts
    return model.layers / plan.pp * block_weights / plan.tp + tables * parameters_of_ends(model, plan)


def saved(parts: list[Part], plan: Plan) -> float:
    """Bytes that a block keeps of a micro-batch, or runs again from."""
    if plan.recompute == "full":
        return parts[0].saved  # its input, which the first norm reads
    return sum(part.saved for part in parts if not (plan.recompute == "attention" and part.core and _scores(part)))


def _scores(part: Part) -> bool:
    """Whether it is one that recomputing attention does not keep: of the products, q, k and v stay."""
    return part.forward[0].name in ("softmax", "dropout")  # type: ignore[union-attr]


def held(plan: Plan) -> float:
    """Micro-batches, in units of a rank's blocks, whose activations wait at once: 1F1B, interleaved or not."""
    if plan.pp == 1:
        return 1.0
    most = plan.pp * (1 + (plan.pp - 1) / (plan.pp * plan.stages_per_rank) if plan.stages_per_rank > 1 else 1)
    return min(most, plan.micro_batches) if plan.stages_per_rank == 1 else most


def communicators(plan: Plan) -> int:
    """Of a rank: of all ranks, of each axis, of dp and cp together; those of the same ranks are one."""
    axes = [n for n in (plan.dp, plan.cp, plan.tp, plan.pp, plan.ep) if n > 1]
    together = [plan.dp * plan.cp] * (plan.dp > 1 and plan.cp > 1) + [plan.hsdp, plan.dp // plan.hsdp] * (plan.hsdp > 1)
    together += [plan.dp * plan.cp // plan.ep] * (1 < plan.ep < plan.dp * plan.cp)
    return (plan.world > 1) + sum(n < plan.world for n in (*axes, *together))


def memory(model: Transformer, plan: Plan, parts: list[Part], itemsize: int, machine: Hardware,
           tokens: float) -> dict[str, float]:
    """Bytes of a rank at the peak, by kind; `tokens` of a micro-batch, cut over cp."""
    own, blocks = parameters_of_a_rank(model, plan), model.layers / plan.pp
    ranks, experts = plan.dp * plan.cp / plan.hsdp, blocks * model.ffn_weights * model.experts / plan.ep / plan.tp
    cut = (own - experts) / ranks + experts / (ranks / plan.ep)
    block_weights = (own - parameters_of_ends(model, plan)) / blocks
    between = itemsize * tokens * model.dim / (plan.tp if plan.sequence_parallel else 1)
    whole = plan.recompute == "full"
    rows = ROWS * tokens * model.per_token * model.dim if plan.ep > 1 else 0
    held_at_once = Held(
        own, own if plan.sharded == "none" else cut, parameters_of_ends(model, plan), block_weights, blocks,
        blocks * held(plan), sum(part.saved for part in parts) if whole else saved(parts, plan), between, 0.0,
        tokens * model.vocab / plan.tp, itemsize * tokens * model.dim + between,
        max(itemsize * tokens * max(model.dim, 2 * model.ffn / plan.tp), rows), itemsize, plan.sharded, whole,
        plan.micro_batches - 1, plan.dp * plan.cp > 1,
        4 if plan.cp > 1 or plan.ep > 1 else itemsize, classes_cut=plan.tp > 1, alike=plan.tp == 1,
        recorded=plan.pp > 1)
    return peak(held_at_once) | {"communication buffers": communicators(plan) * machine.communicator}
