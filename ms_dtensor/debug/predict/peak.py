# SPDX-License-Identifier: Apache-2.0
"""Bytes of one rank at the peak of a training step, by formula: the one that `memory`, `suggest`, and the recipe use.

A step needs most at one of three moments, and what is there at one is mostly gone at the next: when the loss is taken, all
saved results and the logits are there, and no gradient of this micro-batch; when the backward begins, the first gradients
come beside all that is saved; at its end all gradients are there, and are packed and reduced, and nothing is saved. A sum of
all of these is up to half too much. What a kernel takes beside is not known. `tests/zoo/test_llama_memory.py` compares with
dry runs, and these were compared with what ranks really take. Pure arithmetic.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MASTER = 4  # bytes of a parameter that is trained, and of its gradient
MOMENTS = 8  # AdamW's


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
        largest: bytes of the largest result of an op.
        itemsize: bytes of what is computed with.
        sharded: what data parallelism cuts.
        recompute: whether blocks run again in the backward.
        accumulates: whether gradients of several micro-batches are added up.
        offloaded: whether moments are in the host's memory, but for two places of each shape.
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
    largest: float
    itemsize: int
    sharded: Literal["none", "zero1", "fsdp"]
    recompute: bool
    accumulates: bool
    offloaded: bool = False


def moments(h: Held) -> dict[str, dict[str, float]]:
    """By moment: bytes by what they are for."""
    b, whole, cut = h.itemsize, MASTER * h.parameters, h.sharded != "none"
    waiting = min(1.0, h.layers) if h.recompute else h.waiting
    here = h.own if not h.offloaded else min(h.own, 2 * (h.block + h.ends / 2) * h.own / h.parameters)
    state = {"parameters, float32": MASTER * h.own, "moments of AdamW": MOMENTS * here}
    saved = {"saved by blocks": waiting * h.saved, "results that they keep": h.kept,
             "inputs of recomputed blocks": h.recompute * h.waiting * h.inputs}
    own = MASTER * h.own if cut else whole
    before = h.accumulates * (whole + own)  # of micro-batches before: the sums, and what a call without reduction gives
    if h.sharded == "fsdp":
        gathered, at_work = b * h.ends, b * h.block
    else:  # a copy in 16 bits of each block that waits; ZeRO-1 gathers all of them
        blocks = h.block * (min(1.0, h.layers) if h.recompute and h.sharded == "none" else h.layers)
        gathered, at_work = (b if b < 4 or h.sharded == "zero1" else 0) * (h.ends + blocks), 0.0
    name = "gathered parameters" if cut else "their copies in 16 bits"
    first = MASTER * h.block * (1 + cut) + b * h.ends / 2  # a block's, joined too if they are cut; the head's
    # of the largest unit as they come and joined, and each unit's result beside what is given of it; else the embedding's
    reduced = 2 * MASTER * max(h.ends, h.block) + own if cut else MASTER * h.ends / 2
    ends = before + own if cut else max(before, own)
    return {
        # themselves and the exponentials, and of both the gradient
        "the loss": {**state, name: gathered + at_work, "gradients, float32": before, **saved,
                     "logits and loss": h.logits * (2 * b + 2 * 4)},
        "the backward begins": {**state, name: gathered + at_work, "gradients, float32": before + first, **saved,
                                "temporaries": 2 * h.largest},
        # a block's room is there until the graph is gone; as much again is what dry runs have seen beside it
        "the backward ends": {**state, name: 2 * at_work, "gradients, float32": ends + reduced,
                              "saved by blocks": min(1.0, h.layers) * h.saved, "temporaries": 2 * h.largest}}


def peak(h: Held) -> dict[str, float]:
    """Bytes by what they are for, at the moment that needs most.

    Example:
        >>> from ms_dtensor.debug.predict.peak import Held, peak
        >>> eight_b = Held(parameters=8e9, own=1e9, ends=1e9, block=218e6, layers=32, waiting=32, saved=0.6e9, inputs=33e6,
        ...                kept=0, logits=4096 * 128256, largest=0.2e9, itemsize=2, sharded="fsdp", recompute=False,
        ...                accumulates=False)
        >>> f"{sum(peak(eight_b).values()) / 1e9:.1f} GB"
        '39.9 GB'
    """
    return max(moments(h).values(), key=lambda rows: sum(rows.values()))
