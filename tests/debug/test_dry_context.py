# SPDX-License-Identifier: Apache-2.0
"""Attention of context parallelism in a dry run: no scores on a device, and of a host what its one node really takes."""
from __future__ import annotations

import tracemalloc
from math import prod

import numpy as np
import pytest

import ms_dtensor as md
from ms_dtensor.core.balance import Mask
from ms_dtensor.debug import dry_run
from ms_dtensor.debug.predict import Op
from ms_dtensor.debug.predict.timeline import work_of
from ms_dtensor.ops.local import varlen_cpu

pytestmark = pytest.mark.usefixtures("cpu")
HEADS, KEY_HEADS, WIDTH = 8, 4, 64


def attended(device: str, documents: tuple[int, ...], ranks: int, algorithm: str = "gather", window: int | None = None):
    """A dry run of attention and its gradients over such documents."""
    n = sum(documents)
    with dry_run(ranks, 0, device) as run:
        mesh = md.init_device_mesh("cpu" if device == "CPU" else "npu", (ranks,), mesh_dim_names=("cp",))
        tokens, attention = md.balance(documents, ranks), md.context_attention(mesh, algorithm)
        q, k, v = (md.zeros((n, h, WIDTH), device_mesh=mesh, placements=[md.Shard(0)])
                   for h in (HEADS, KEY_HEADS, KEY_HEADS))
        md.value_and_grad(lambda q, k, v: attention(q, k, v, tokens, window=window).sum(), (0, 1, 2))(q, k, v)
    return run, tokens


@pytest.mark.parametrize("device", ["Ascend", "CPU"])
def test_no_scores_are_counted_and_products_are_those_of_pairs(device):
    run, tokens = attended(device, (16384,), 4)
    score = HEADS * 4096 * 16384 * 4
    assert run.memory().peak < score / 8
    seen = [e for e in run.events if e.op == "context_attention"]
    cost = 4 * tokens.work(0) * HEADS * WIDTH
    assert [(e.phase, e.flops) for e in seen] == [("forward", cost), ("backward", cost * 5 // 2)]
    works = [work_of(e) for e in seen]
    assert all(isinstance(work, Op) and work.matrix for work in works), "products are the matrix units' work"
    assert not run.assumed


@pytest.mark.parametrize("device", ["Ascend", "CPU"])
def test_of_a_ring_rounds_are_seen_there_and_back_and_no_more_is_held_than_of_a_gather(device):
    run, tokens = attended(device, (16384,), 4, "ring")
    cost = 4 * tokens.work(0) * HEADS * WIDTH
    for phase, least in (("forward", cost), ("backward", cost * 5 // 2)):
        seen = [e for e in run.events if e.op == "context_attention" and e.phase == phase]
        assert len(seen) >= 4 and sum(e.flops for e in seen) == least
        assert {e.phase for e in run.events[run.events.index(seen[0]):run.events.index(seen[-1]) + 1]} == {phase}
    first = next(i for i, e in enumerate(run.events) if e.is_move)
    assert not run.events[first + 1].is_move and any(first in e.after for e in run.events)  # work goes on meanwhile
    assert not run.assumed
    assert attended(device, (16384,), 8, "ring")[0].memory().peak < 0.6 * run.memory().peak
    windowed = attended(device, (16384,), 4, "ring", window=512)[0]
    assert not windowed.assumed and 0 < windowed.flops() < run.flops()


@pytest.mark.parametrize("ends", [((300, 512), (300, 900)), ((512,), (9000,))])
def test_what_the_node_of_a_host_has_beside_its_results_is_what_it_takes(ends, monkeypatch):
    (t, s), rng = (ends[0][-1], ends[1][-1]), np.random.default_rng(3)
    q, k, v = (rng.normal(size=(n, h, WIDTH)).astype(np.float32) for n, h in ((t, HEADS), (s, KEY_HEADS), (s, KEY_HEADS)))
    mask, scale = Mask(), 0.125
    own, forward, backward = varlen_cpu.beside(q.shape, k.shape, v.shape, *ends)

    def most(run) -> int:
        monkeypatch.setattr(varlen_cpu, "_kept", varlen_cpu._Kept())  # as a thread's first call
        tracemalloc.start()
        run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    given = varlen_cpu.forward(q, k, v, *ends, mask, scale)
    log_total = given[1] + np.log(given[2])
    for run, shapes, results in (
            (lambda: varlen_cpu.forward(q, k, v, *ends, mask, scale), [*own, *forward], [q.shape]),
            (lambda: varlen_cpu.backward(q, k, v, q, given[0], log_total, *ends, mask, scale), backward,
             [q.shape, k.shape, v.shape])):
        assert 4 * sum(map(prod, (*shapes, *results))) == pytest.approx(most(run), rel=0.15)
