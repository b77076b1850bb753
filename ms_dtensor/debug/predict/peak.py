# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank at the peak of a training step, by formula: the one that `memory`, `suggest`, and the recipe use.

A step needs most at one of five moments, and what is there at one is mostly gone at the next: when the loss is taken, all
saved results and the logits are there, and no gradient of this micro-batch; when the backward begins, the first gradients
come beside all that is saved; in the last block most gradients are there, and one block's results, also where what is owed
of micro-batches waits whole, for one after this; at the end all gradients are there, and are packed and reduced, and nothing
is saved. A sum of all of these is up to half too much. What a kernel takes beside is not known. Pure arithmetic.
`tests/zoo/test_llama_memory.py` compares with dry runs, and these were compared with what ranks really take.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MASTER = 4  # bytes of a parameter that is trained, and of its gradient
MOMENTS = 8  # AdamW's
ROWS = 10  # bytes an element of a choice's row, twice: of experts of other ranks rows are cast, gathered, added in float32


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank has of a model and of a step of it; elements, where it does not say bytes.

    Attributes:
        parameters: it computes with, of its stage; cut over tp, pp and ep.
        own: of these it keeps between steps: less, where data parallelism cuts them.
        ends: of the embedding, the head and the norm before it, of those that it has.
        block: of a block.
        layers: its blocks.
        waiting: blocks whose backward is still to come, each counted once a micro-batch that waits for it.
        saved: bytes that a block keeps for its backward.
        inputs: bytes of a block's input.
        kept: bytes of results that all recomputed blocks keep together.
        logits: of all micro-batches whose logits wait.
        read: bytes of what the norm and the head have read for them.
        largest: bytes of the largest result of an op.
        itemsize: bytes of what is computed with.
        sharded: what data parallelism cuts.
        recompute: whether blocks run again in the backward.
        before: micro-batches before the last one, of whose gradients there is a sum.
        owed: whether these wait whole, beside, to be reduced with the last one's: of several ranks of data parallelism.
        arrives: bytes of an element of a whole gradient, before it is reduced.
        offloaded: whether moments are in the host's memory, but for two places of each shape.
        classes_cut: whether ranks share the classes of the logits, and the loss is `loss_parallel`.
        alike: whether a unit's gradients come in one dtype, so that a device casts them together; norms' not, if over tp.
        recorded: whether a backward comes later than in the call of a gradient: in a pipeline. Else a device keeps what a
            rank gave to a unit's gathering, its shards in 16 bits, till the backward gives them again.
    """

    parameters: float
    own: float
    ends: float
    block: float
    layers: float
    waiting: float
    saved: float
    inputs: float
    kept: float
    logits: float
    read: float
    largest: float
    itemsize: int
    sharded: Literal["none", "zero1", "fsdp"]
    recompute: bool
    before: int
    owed: bool
    arrives: int
    offloaded: bool = False
    classes_cut: bool = False
    alike: bool = False
    recorded: bool = False


def moments(h: Held) -> dict[str, dict[str, float]]:
    """By moment: bytes by what they are for."""
    b, whole, cut = h.itemsize, MASTER * h.parameters, h.sharded != "none"
    here = h.own if not h.offloaded else min(h.own, 2 * (h.block + h.ends / 2) * h.own / h.parameters)
    state = {"parameters, float32": MASTER * h.own, "moments of AdamW": MOMENTS * here}
    one = min(1.0, h.layers) * h.saved  # block's
    saved = {"saved by blocks": 0.0 if h.recompute else h.waiting * h.saved, "results that they keep": h.kept,
             "inputs of recomputed blocks": h.recompute * h.waiting * h.inputs}
    own = MASTER * h.own if cut else whole
    owed = h.owed and h.before > 0
    given = (h.before > 0 and not owed) * own  # what is owed is handed out as zeros, which nobody adds up
    if h.sharded == "fsdp":
        gathered, at_once = b * h.ends, b * h.block
    else:  # a copy in 16 bits of each block that waits; ZeRO-1 gathers all of them
        blocks = h.block * (min(1.0, h.layers) if h.recompute and h.sharded == "none" else h.layers)
        gathered, at_once = (b if b < 4 or h.sharded == "zero1" else 0) * (h.ends + blocks), 0.0
    read, name = "what the norm and the head have read", "gathered parameters" if cut else "their copies in 16 bits"
    # float32: with cut classes logits less the greatest, their exponentials, and the gradients of both, beside the logits'
    # own; with whole ones the exponentials and a gradient, beside the logits and theirs
    loss = b + 4 * 4 if h.classes_cut else 2 * b + 2 * 4
    # Of a block either what its backward works with is there, or its gradients beside each other; of several the next one's
    # parameters come while it runs again.
    joined, of_head = MASTER * cut * h.block, h.arrives * h.ends / 2 * (h.logits > 0)
    working = {"saved by blocks": one, "temporaries": 2 * h.largest}
    working, reduced = (working, 0.0) if sum(working.values()) > joined else ({}, joined)
    block = (h.arrives if cut else MASTER) * h.block + reduced
    in_block = {**state, name: gathered + at_once * (1 + (h.recompute and h.layers > 1))}
    others = saved if h.recompute else saved | {"saved by blocks": saved["saved by blocks"] - one}
    if h.sharded == "fsdp" and b < MASTER and not h.recorded:
        rows = {"shards in 16 bits": b * (h.own - h.ends * h.own / h.parameters)}
        saved, others = saved | rows, others | rows
    made = {
        "the loss": {**state, name: gathered + at_once, "gradients, float32": given + owed * whole, **saved,
                     read: h.read, "logits and loss": h.logits * loss},
        "the backward begins": {**in_block, **others,
                                **{what: size + others.get(what, 0.0) for what, size in working.items()},
                                "gradients, float32": given + owed * whole + of_head + block}}
    if not cut:  # all are there, and the embedding's twice
        return made | {"the backward ends": {
            **state, "gradients, float32": given + owed * whole + whole + MASTER * h.ends / 2}}
    each = MASTER * owed  # what is owed of a unit goes when it is reduced
    # those of 16 bits lie beside each other once more as they came, for the moment in which they are cast all at once
    beside = MASTER + (h.arrives if h.alike and h.arrives < MASTER else 0)
    if owed and h.before > 1:  # shards of zeros are handed out meanwhile
        rest = {"inputs of recomputed blocks" if h.recompute else "saved by blocks": max(0.0, h.waiting - h.layers) * (
            h.inputs if h.recompute else h.saved)}
        made["the last block, reduced later"] = {
            **in_block, **rest, **{what: size + rest.get(what, 0.0) for what, size in working.items()},
            "gradients, float32": given + own + whole + of_head}
    return made | {
        "the last block": {**in_block, **working,
                           "gradients, float32": given + own + of_head + block + each * (h.block + h.ends)},
        # where blocks run again, what is gathered goes with the graph; of float32 each unit's result lies beside its shards
        "the backward ends": {**state, name: (h.sharded == "fsdp" and h.recompute) * (gathered + at_once),
                              "gradients, float32": given + own + (h.arrives + beside + each) * h.ends
                              + (b == MASTER) * own}}


def peak(h: Held) -> dict[str, float]:
    """Bytes by what they are for, at the moment that needs most.

    Example:
        >>> from ms_dtensor.debug.predict.peak import Held, peak
        >>> eight_b = Held(parameters=8e9, own=1e9, ends=1e9, block=218e6, layers=32, waiting=32, saved=0.6e9, inputs=33e6,
        ...                kept=0, logits=4096 * 128256, read=67e6, largest=0.2e9, itemsize=2, sharded="fsdp",
        ...                recompute=False, before=0, owed=False, arrives=2)
        >>> f"{sum(peak(eight_b).values()) / 1e9:.1f} GB"
        '41.8 GB'
    """
    return max(moments(h).values(), key=lambda rows: sum(rows.values()))
