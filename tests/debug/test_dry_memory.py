# SPDX-License-Identifier: Apache-2.0
"""Where a dry run's tensors would lie on a host, and what its kernels take beside their results: of attention, too."""
import tracemalloc
from math import prod

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn, ops

import ms_dtensor as md
from ms_dtensor.core.balance import Mask
from ms_dtensor.core.dry_event import COMPUTE, DryEvent
from ms_dtensor.debug import dry_run
from ms_dtensor.debug.dryrun.pool import Pool
from ms_dtensor.debug.predict import Op
from ms_dtensor.debug.predict.timeline import work_of
from ms_dtensor.ops.local import varlen_cpu


def test_pages_of_a_pool_have_gaps_and_do_not_come_back():
    """Pieces that are given back leave gaps, which serve what fits; the longest free of one size is the first to be used."""
    pool = Pool()
    first = [pool.take(n) for n in (4096, 512, 4096, 512, 8192, 512)]
    for at in (first[2], first[0]):
        pool.give(at)
    assert pool.take(4000) == first[2] and pool.take(8) == first[0], "of two gaps the older; then a part of the other"
    pool.give(first[4])
    most = pool.most
    assert pool.take(12000) == most and pool.most == most + 12288, "no gap is large enough"
    big = pool.take(3 << 30)
    assert pool.most == most + 12288 + (3 << 30)
    pool.give(big)
    assert pool.most == most + 12288 + (3 << 30)


def test_memory_of_a_host_is_what_its_kernels_and_nodes_take():
    """MindSpore's fused Adam makes its three results anew; a norm of ours is NumPy's; silu has a tensor beside its own."""
    size = 4 * 512 * 512

    def changes(device: str, what) -> list[tuple[int, str]]:
        with dry_run(world=2, device=device) as run:
            mesh = md.init_device_mesh("cpu" if device == "CPU" else "npu", (2,), mesh_dim_names=("dp",))
            x = md.ones(512, 512, device_mesh=mesh, placements=[md.Replicate()])
            step = what(x)
            run.forget()
            _alive = step()
        return [(c.bytes, c.where) for c in run._executor.ledger.changes if abs(c.bytes) >= size and c.at]

    def adam(x):
        weight = ms.Parameter(x, name="w")
        optimizer = md.optim.AdamW([weight], 1e-3)
        return lambda: optimizer([x])

    def norm(x):
        return lambda: ops.rms_norm(x, md.ones(512, device_mesh=x.device_mesh, placements=[md.Replicate()]))
    assert changes("CPU", adam) == [(size, "pool")] * 3 + [(-size, "pool")] * 3
    assert changes("Ascend", adam) == [], "a device's writes in place"
    assert (size, "heap") in changes("CPU", norm) and (size, "pool") not in changes("CPU", norm)
    assert changes("CPU", lambda x: lambda: mint.nn.functional.silu(x)) == [(size, "pool"), (size, "pool"), (-size, "pool")]


def test_kernels_of_a_host_read_copies_of_views_and_sums_hand_gradients_on():
    """Counted in MindSpore 2.10's pool: each operand that is a view is copied, and a backward keeps the copy. A cast to its
    own dtype is the tensor itself, and the gradients of a sum are the sum's."""
    size = 4 * 512 * 512

    def changes(what, device: str = "CPU", grad: bool = False) -> list[int]:
        with dry_run(world=2, device=device) as run:
            mesh = md.init_device_mesh("cpu" if device == "CPU" else "npu", (2,), mesh_dim_names=("dp",))
            x = md.ones(512, 512, device_mesh=mesh, placements=[md.Replicate()])
            run.forget()
            if grad:
                md.grad(lambda x: what(x * 1.5).sum())(x)
            else:
                _alive = what(x)
        return [c.bytes for c in run._executor.ledger.changes if abs(c.bytes) >= size and c.at]

    def turned(x):
        return x.reshape(1024, 256)
    assert changes(lambda x: mint.exp(x)) == changes(lambda x: mint.exp(turned(x)), "Ascend") == [size]
    assert changes(lambda x: mint.exp(turned(x))) == [size, size, -size]
    assert changes(lambda x: turned(x) + turned(x)) == [size, size, size, -size, -size]
    assert changes(lambda x: mint.exp(x.astype(ms.float32))) == changes(lambda x: mint.softmax(x, -1)) == [size]
    assert changes(lambda x: mint.exp(turned(x).astype(ms.float32))) == [size, size, -size], "a cast of a view is a copy"
    square, of_views = (sum(c > 0 for c in changes(what, grad=True)) for what in (
        lambda x: mint.mul(x, x), lambda x: mint.mul(turned(x), turned(x))))
    assert of_views == square + 4, "of each view a copy, and of each of their gradients where these are added up"
    assert changes(lambda x: x + x, grad=True).count(size) == changes(lambda x: mint.exp(x), grad=True).count(size)
    joined = changes(lambda x: mint.cat((x, x)), "Ascend", grad=True)
    assert joined[2] == -size, "a concatenation keeps no operand"
    assert sum(c > 0 for c in joined) == 5, "the gradients of its operands are pieces of its own: the sum alone is made"


@pytest.mark.parametrize("width, copies", [(384, 3), (512, 0)])  # from 65,536 elements on a forward makes no view
def test_a_small_weight_of_a_unit_is_copied_at_each_use(width, copies):
    """It is a view there, which kernels copy and the backward keeps; a recurrent unit's peak was half of what is real."""
    with dry_run(world=2, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        cell = md.fully_shard(mint.nn.Linear(128, width, bias=False), mesh=mesh)
        x = md.ones(4, 128, device_mesh=mesh, placements=[md.Shard(0)])
        run.forget()
        md.value_and_grad(lambda x: cell(x).sum() + cell(x).sum() + cell(x).sum(), 0, cell.trainable_params())(x)
    size = 4 * 128 * width
    copied = [e.written for e in run.events if e.op == "copy_of_view" and e.phase == "forward"]
    assert copied.count(size) == copies
    assert copies * size <= run.memory().at_peak["activations"] < (copies + 2) * size, "the backward keeps them"


POOLS = {"maxima": lambda x: mint.nn.functional.max_pool2d(x, 2), "averages": lambda x: mint.nn.functional.avg_pool2d(x, 2),
         "nn.MaxPool2d": nn.MaxPool2d(2, 2), "nn.AvgPool2d": nn.AvgPool2d(2, 2),
         "ops.max_pool2d": lambda x: ops.max_pool2d(x, 2), "adaptive": lambda x: ops.adaptive_avg_pool2d(x, 32)}


@pytest.mark.parametrize("pool, end, real", [
    ("maxima", mint.tanh, 3543630), ("averages", mint.tanh, 3150414), ("maxima", mint.square, 4456505),
    ("averages", mint.square, 3670073), ("maxima", lambda y: y**2, 4980797), ("averages", lambda y: y**2, 4194365),
    ("nn.MaxPool2d", mint.tanh, 3412557), ("nn.AvgPool2d", mint.tanh, 3412557), ("ops.max_pool2d", mint.tanh, 3529781),
    ("adaptive", mint.tanh, 3145736)])
def test_the_peak_of_a_u_net_is_the_real_one(pool, end, real):
    """Bytes as `scripts/bench/heap.py` counted them of the same step on a mesh of one rank."""
    with dry_run(world=1, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        down, up = (mint.nn.Conv2d(n, 8, 3, padding=1, bias=False) for n in (8, 16))

        def net(x):
            x = down(x)
            y = mint.repeat_interleave(mint.repeat_interleave(POOLS[pool](x), 2, 2), 2, 3)
            return end(up(mint.cat((y, x), 1))).mean()
        x = md.ones((4, 8, 64, 64), device_mesh=mesh, placements=[md.Replicate()])
        params = [p for cell in (down, up) for p in md.distribute_module(cell, mesh).trainable_params()]
        run.forget()
        before = sum(run._executor.ledger.alive.values())
        md.value_and_grad(net, None, params)(x)
    assert (run.memory().peak - before) / real == pytest.approx(1, abs=0.05)


# -- attention of context parallelism ----------------------------------------------------------------------------------
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


def test_an_event_is_a_value_and_says_which_kind_it_is():
    product = DryEvent("matmul", flops=1024, read=640, written=256)
    moved = DryEvent("all_gather", "tp", after=(0,), bytes=96, payload=32, axes=("tp",), ranks=4, stride=2, span=6)
    assert product == DryEvent("matmul", COMPUTE, flops=1024, read=640, written=256)
    assert not product.is_move and moved.is_move
    assert len({product, moved, DryEvent("matmul", flops=1024, read=640, written=256)}) == 2
