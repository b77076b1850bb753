# SPDX-License-Identifier: Apache-2.0
"""The device's branch on real ranks over the strict emulator: equal to the CPU's, with every wait and without a needless one.

Each fault that the emulator is there for is planted once, and caught.
"""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import DTensor, comm, distribute_tensor, init_device_mesh, replicate, value_and_grad
from ms_dtensor.comm.device import DeviceBackend
from ms_dtensor.optim import AdamW, clip_grad_norm_
from tests.cases import case
from tests.operands import P, R, S, data
from tests.rehearsal.emulator import Refused, memory
from tests.rehearsal.session import rehearsed
from tests.rehearsal.tables import Rates
from tests.support import RTOL, array, equal, refusal
from tests.tiers import sampled


def meshes(world, kind: str):
    """All ranks on one axis, and half of them on each of two."""
    one = init_device_mesh(kind, (world.size,), mesh_dim_names=("tp",))
    return one, init_device_mesh(kind, (2, world.size // 2), mesh_dim_names=("dp", "tp"))


def on_both(run, *args, **how):
    """`run("cpu")` and, rehearsed, `run("npu")`: the results, and the emulated device."""
    want = run("cpu", *args)
    with rehearsed(**how) as device:
        got = run("npu", *args)
    return want, got, device


def all_equal(got, want, what: str, rtol: float = RTOL):
    equal(got, want, what, rtol)


@case(world_size=(2, 4), timeout=240)
def redistributions_are_those_of_the_cpu(world):
    x = data(1, 2 * world.size, world.size + 1, 5)

    def moved(kind, two):
        mesh = meshes(world, kind)[two]
        kinds = [(p,) for p in (R, S(0), S(1), S(2), P)] if not two else \
            list(itertools.islice(itertools.product((R, S(1), P), (R, S(0), S(1), P)), 12))
        out = []
        for src, dst in sampled(itertools.permutations(kinds, 2), 3 if two else 1):
            if any(q == P and p != P for p, q in zip(src, dst)):
                continue
            start = distribute_tensor(x, mesh, [R if p == P else p for p in src])
            start = DTensor.from_local(start.to_local() * (mesh.get_rank() + 1), mesh, src, shape=x.shape)
            for async_op in (False, True):
                out.append(start.redistribute(mesh, dst, async_op=async_op).to_local().asnumpy())
        return out
    for two in (False, True) if world.size == 4 else (False,):
        want, got, device = on_both(moved, two, clock=False)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(i))
        assert device.counts["kernels"] <= 2 * device.counts["launches"], device.counts


@case(world_size=(2, 4))
def collectives_take_few_kernels(world):
    """Launches by case: one of even pieces on dim 0, at most three of any."""
    n, me = world.size, world.rank
    with rehearsed(clock=False) as device:
        g = init_device_mesh("npu", (n,)).get_group(0)
        row, square, odd = data(1, 2, 6), data(2, 2 * n, 2 * n, 3), [2] * (n - 1) + [1]
        mine = data(3, odd[me], 4)

        def launches(call):
            device.counts.clear()
            result = call()
            result = result.wait() if isinstance(result, comm.Work) else result
            return device.counts["kernels"] + device.counts["launches"]
        for async_op in (False, True):
            how = {"async_op": async_op}
            assert launches(lambda: g.all_gather(row, 0, [2] * n, **how)) == 1  # noqa: B023  called at once
            assert launches(lambda: g.reduce_scatter(square, "sum", 0, [2] * n, **how)) == 1  # noqa: B023
            assert launches(lambda: g.all_reduce_(Tensor(row.asnumpy()), "sum")) == 1
            for call in (lambda: g.all_reduce(row, "sum", **how), lambda: g.all_reduce(row, "avg", **how),  # noqa: B023
                         lambda: g.broadcast(row, 0, **how), lambda: g.all_gather(row, 1, [6] * n, **how),  # noqa: B023
                         lambda: g.reduce_scatter(square, "sum", 1, [2] * n, **how),  # noqa: B023
                         lambda: g.all_to_all(square, 0, [2] * n, 1, [2 * n] * n, **how)):  # noqa: B023
                assert launches(call) <= 2
            for call in (lambda: g.all_to_all(square, 1, [2] * n, 2, [3] * n, **how),  # noqa: B023
                         lambda: g.all_gather(mine, 0, odd, **how),  # noqa: B023
                         lambda: g.reduce_scatter(square[:2 * n - 1], "sum", 0, odd, **how),  # noqa: B023
                         lambda: g.reduce_scatter(square[:, :2 * n - 1], "avg", 1, odd, **how)[:0]  # noqa: B023
                         if not async_op else g.barrier(),  # noqa: B023
                         lambda: g.all_to_all(mine, 1, uneven(4, n), 0, odd, **how)):  # noqa: B023
                assert launches(call) <= 4, launches(call)
        assert not device.syncs or all("cases_rehearsal" in site or "device.py" in site for site in device.syncs)


def uneven(total, n):
    return [total - n + 1] + [1] * (n - 1)


class Net(nn.Cell):
    """Two products; the first weight is wide, so that it has work after it in the backward."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.blocks = nn.CellList([nn.Dense(8, 8, activation=None) for _ in range(layers)])
        for i, p in enumerate(self.trainable_params()):
            p.set_data(data(40 + i, *p.shape) * 0.3)

    def construct(self, x):
        for block in self.blocks:
            x = mint.tanh(block(x))
        return x


def trained(kind, world, steps=3, clip=0.5, layers=3, bucket_mb=300 / 2**20):
    """Losses, gradient norms and weights of a few steps, data parallel over all ranks."""
    mesh = init_device_mesh(kind, (world.size,), mesh_dim_names=("dp",))
    net = replicate(Net(layers), mesh=mesh["dp"], bucket_mb=bucket_mb)
    params = net.trainable_params()
    optimizer = AdamW(params, lr=0.05)
    step = value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, params)
    out = []
    for i in range(steps):
        x, y = (distribute_tensor(data(60 + i + k, 4 * world.size, 8), mesh, [S(0)]) for k in (0, 10))
        loss, grads = step(x, y)
        norm = clip_grad_norm_(list(zip(params, grads)), clip)
        optimizer(grads)
        out += [loss.full_tensor(), norm]
    return [np.asarray(array(v)) for v in (*out, *params)]


@case(world_size=(2, 4), timeout=240)
def data_parallel_training_is_that_of_the_cpu(world):
    want, got, device = on_both(trained, world)
    all_equal(got, want, "trained")
    buckets = [c for c in device.calls if c[0] == "all_reduce" and len(c[2]) == 1 and c[2][0] > 8]
    assert len(buckets) == 3 * 3, device.calls  # one per layer and step


def tensor_parallel_training_is_that_of_the_cpu(world):
    def run(kind):
        mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
        net = md.parallelize_module(Net(), mesh["tp"], {
            "blocks.0": md.ColwiseParallel(use_local_output=False), "blocks.1": md.RowwiseParallel(use_local_output=False)})
        net = replicate(net, mesh=mesh["dp"])
        params = net.trainable_params()
        optimizer = AdamW(params, lr=0.05)
        step = value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, params)
        out = []
        for i in range(3):
            x, y = (distribute_tensor(data(60 + i + k, 8, 8), mesh, [S(0), R]) for k in (0, 10))
            loss, grads = step(x, y)
            out += [loss, clip_grad_norm_(list(zip(params, grads)), 0.5)]
            optimizer(grads)
        return [np.asarray(array(v)) for v in (*out, *params)]
    want, got, _ = on_both(run)
    all_equal(got, want, "trained")


def the_llama_trains_as_on_the_cpu(world):
    from model_zoo.llama.config import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
    from model_zoo.llama.trainer import Trainer
    for dp, tp in sampled(((2, 2), (1, 4)), 2):
        cfg = Config(ModelConfig(dim=64, n_layers=len(sampled((1, 2), 2)), n_heads=4, n_kv_heads=4, ffn_dim=96, vocab_size=64),
                     parallel=ParallelConfig(dp=dp, tp=tp, sequence_parallel=True), optim=OptimConfig(warmup=1),
                     train=TrainConfig(steps=4, batch=4, seq=8, dtype="bfloat16", micro_batches=3 - dp, recompute=tp == 2,
                                       qkv_concat=False))

        def run(kind, cfg=cfg, dp=dp, tp=tp):
            mesh = init_device_mesh(kind, (dp, tp), mesh_dim_names=("dp", "tp"))
            trainer, out = Trainer(cfg, None, mesh), []
            for i in sampled(range(2), 2):
                rows = np.random.default_rng(i).integers(0, 64, (4, 9)).astype(np.int32)
                loss, grads = trainer.gradients(rows[:, :-1], rows[:, 1:])
                out += [loss, trainer.update(grads, i)[0]]
            return [np.asarray(array(v)) for v in (*out, *trainer.params)]
        want, got, _ = on_both(run)
        said = 2 * len(sampled(range(2), 2))
        all_equal(got[:said], want[:said], f"dp={dp} tp={tp}: loss, norm", 2e-2)  # bfloat16, and other products on the CPU
        all_equal(got[said:], want[said:], f"dp={dp} tp={tp}: weight", 0.1)  # Adam's first steps are signs


@case(world_size=2)
def a_bucket_may_add_up_in_float32(world):
    """bfloat16 gradients whose sum in bfloat16 is another."""
    def run(kind, policy):
        mesh = init_device_mesh(kind, (world.size,), mesh_dim_names=("dp",))
        net = replicate(Net(1), mesh=mesh["dp"], bucket_mb=1, mp_policy=policy)
        x = distribute_tensor(data(3, 4 * world.size, 8), mesh, [S(0)])
        _, grads = value_and_grad(lambda x: (net(x) ** 2).sum(), None, net.trainable_params())(x)
        return [array(g) for g in grads]
    from ms_dtensor import MixedPrecisionPolicy
    policy = MixedPrecisionPolicy(ms.bfloat16, ms.float32)
    want, got, device = on_both(run, policy)
    all_equal(got, want, "gradient")
    assert device.counts["launches"] > 0


@case(world_size=2)
def hooks_see_what_is_reduced_and_a_bucket_may_stay_open(world):
    """A user's hook doubles a reduced gradient; a parameter without a gradient leaves its bucket open to the end."""
    def run(kind):
        mesh = init_device_mesh(kind, (world.size,), mesh_dim_names=("dp",))
        net = replicate(Net(3), mesh=mesh["dp"])
        params = net.trainable_params()
        seen = []
        params[0].register_hook(lambda grad: seen.append(grad.asnumpy()) or grad * 2)
        x = distribute_tensor(data(3, 4 * world.size, 8), mesh, [S(0)])
        _, grads = value_and_grad(lambda x: (net.blocks[1](net.blocks[0](x)) ** 2).sum(), None, params[:4])(x)
        return [*seen, *map(array, grads)]
    want, got, _ = on_both(run)
    assert len(got) == 5
    all_equal(got, want, "gradient")
    equal(got[1], got[0] * 2)


@case(world_size=2)
def the_same_over_nccls_primitives(world):
    def run(kind):
        return trained("gpu" if kind == "npu" else kind, world, steps=2)
    want, got, device = on_both(run, kind="nccl")
    all_equal(got, want, "trained")
    assert any(c[0] == "AllReduce" for c in device.calls)


# -- planted faults ------------------------------------------------------------------------------------------------------
@case(world_size=2)
def a_missing_wait_is_caught(world):
    def forgotten():
        with rehearsed() as device:
            g = init_device_mesh("npu", (world.size,)).get_group(0)
            work = g.all_gather(data(1, 2, 3), 0, [2] * world.size, async_op=True)
            assert np.isnan(memory(work.pending_result)).all(), "garbage until it is waited for"
            device.flying  # noqa: B018  and then nobody waits
    assert "never waited for: all_gather" in refusal(forgotten, Refused)
    with rehearsed():
        g = init_device_mesh("npu", (world.size,)).get_group(0)
        works = [g.all_reduce(data(i, 3), async_op=True) for i in range(2)]
        equal(works[1].wait(), array(data(1, 3)) * world.size)
        equal(works[0].pending_result, array(data(0, 3)) * world.size, "an earlier one of the same stream has ended, too")


@case(world_size=2)
def a_changed_input_is_caught(world):
    def changed():
        with rehearsed():
            g = init_device_mesh("npu", (world.size,)).get_group(0)
            x = data(1, 2, 3)
            work = g.all_gather(x, 0, [2] * world.size, async_op=True)
            x.mul_(2.0)
            work.wait()
    assert "changed before the wait" in refusal(changed, Refused)


@case(world_size=2)
def a_result_written_too_early_is_caught(world):
    def written():
        with rehearsed():
            g = init_device_mesh("npu", (world.size,)).get_group(0)
            work = g.all_gather(data(1, 2, 3), 0, [2] * world.size, async_op=True)
            work.pending_result.copy_(data(2, 2 * world.size, 3))
            work.wait()
    assert "copy_ touches the result of all_gather" in refusal(written, Refused)


@case(world_size=2)
def two_messages_to_one_peer_in_a_batch_are_caught(world):
    peer = 1 - world.rank

    def batch(split: bool):
        with rehearsed() as device:
            g = init_device_mesh("npu", (world.size,)).get_group(0)
            if not split:
                device.batch_isend_irecv([device.P2POp("isend", data(i, 2), peer) for i in range(2)])
            return g.exchange([(peer, data(i, 2)) for i in range(3)], [(peer, (2,), ms.float32) for _ in range(3)])
    assert "two of one kind for one peer" in refusal(lambda: batch(False), Refused)
    for i, got in enumerate(batch(True)):  # our own go in three batches
        equal(got, data(i, 2))


@case(world_size=2)
def a_dtype_that_is_not_in_the_table_is_caught(world):
    with rehearsed() as device:
        g = init_device_mesh("npu", (world.size,)).get_group(0)
        bf16, int16 = Tensor([1.5, 3], ms.bfloat16), Tensor([3, 5], ms.int16)
        for x in (bf16, int16):
            assert "does not reduce prod" in refusal(lambda x=x: device.all_reduce(x, "prod", "world"), Refused)
        assert "does not reduce avg" in refusal(lambda: device.all_reduce(data(1, 2), "avg", "world"), Refused)
        assert "does not move Bool" in refusal(lambda: device.broadcast(Tensor([True]), 0, "world"), Refused)
        before = len(device.calls)
        assert g.all_reduce(int16, "prod").asnumpy().tolist() == [9, 25]
        assert g.all_reduce(bf16, "prod").astype(ms.float32).asnumpy().tolist() == [2.25, 9]
        for dtype in (ms.int16, ms.int64, ms.bfloat16):
            assert g.all_reduce(Tensor([3, 5], dtype)).astype(ms.float32).asnumpy().tolist() == [6, 10]
        assert [c[0] for c in device.calls[before:]] == ["all_gather_into_tensor"] * 2 + ["all_reduce"] * 3


@case(world_size=2)
def lost_overlap_is_caught(world):
    rates = Rates(wire=1e8, saved=2e6, latency=1e-6)  # backward of a layer ten times as long as its reduction

    def overlapped():
        with rehearsed(rates=rates) as device:
            trained("npu", world, steps=1, clip=np.inf, layers=12)
        return device.overlapped("all_reduce")
    assert overlapped() > 0.85
    real = DeviceBackend.all_reduce_
    try:
        def at_once(*args):
            work = real(*args)
            work.wait()
            return work
        DeviceBackend.all_reduce_ = at_once
        assert overlapped() < 0.1
    finally:
        DeviceBackend.all_reduce_ = real


@case(world_size=2)
def an_extra_wait_of_the_host_is_caught(world):
    def syncs(extra: bool):
        mesh = init_device_mesh("npu", (world.size,), mesh_dim_names=("dp",))
        net = replicate(Net(), mesh=mesh["dp"])
        params = net.trainable_params()
        optimizer = AdamW(params)
        step = value_and_grad(lambda x: (net(x) ** 2).mean(), None, params)
        for i in range(2):
            x = distribute_tensor(data(i, 4 * world.size, 8), mesh, [S(0)])
            device.syncs.clear()
            loss, grads = step(x)
            norm = clip_grad_norm_(list(zip(params, grads)), 1.0)
            optimizer(grads)
            if extra:
                grads[0].asnumpy()
        float(loss), float(norm)  # noqa: B018  the logged numbers
        return list(device.syncs)
    with rehearsed() as device:
        clean, dirty = syncs(False), syncs(True)
    assert len(clean) == 2, clean
    assert len(dirty) == 3, dirty


@case(world_size=2)
def communicators_in_different_orders_are_caught(world):
    def crossed():
        with rehearsed() as device:
            for name in ("a", "b") if world.rank else ("b", "a"):
                device.create_group(name, [0, 1], None)
    assert "in different orders" in refusal(crossed, Refused)


def a_prefetch_needs_no_wait_before_its_use(world):
    """The gathered weight of the next layer is under way while this one computes."""
    rates = Rates(wire=1e9, saved=1e6, latency=1e-6)
    w = data(5, 8, 8)
    with rehearsed(rates=rates) as device:
        mesh = init_device_mesh("npu", (world.size,), mesh_dim_names=("dp",))
        shards = [distribute_tensor(w, mesh, [S(0)]) for _ in range(3)]

        def chain(x):
            ahead = shards[0].redistribute(mesh, [R], async_op=True)
            for i in range(3):
                now, ahead = ahead, shards[i + 1].redistribute(mesh, [R], async_op=True) if i < 2 else None
                x = mint.tanh(mint.matmul(x, now.to_local()))
            return x.sum()
        value = ms.value_and_grad(chain)(data(6, 4, 8))[0]
        overlapped = device.overlapped("all_gather_into_tensor")
    x = array(data(6, 4, 8))
    for _ in range(3):
        x = np.tanh(x @ array(w))
    equal(value, x.sum(), rtol=2e-4)
    assert overlapped > 0.6, "only the first is waited for"


@case(world_size=2, timeout=120)
def cluster_benchmarks_take_the_branch_for_devices(world):
    from model_zoo.llama.tools import bench_step
    from ms_dtensor.tools.bench import collectives, dispatch, suites
    from ms_dtensor.tools.bench.world import Bench

    class Rehearsed(Bench):
        name = "Ascend910B2"
    real = collectives.dist
    with rehearsed(clock=False) as device:
        bench = Rehearsed("npu", slots=1)
        collectives.dist = device
        try:
            rows = collectives.run(bench, {"least": 256, "most": 256, "factor": 2, "times": 1, "dtypes": ["float", "bfloat16"]})
        finally:
            collectives.dist = real
        toy = {**suites.MODELS["toy"], "dim": 128, "n_layers": 1}
        issued = dispatch.run(bench, {"rounds": 1, "calls": 4, "rows": ["add"]})
        step = bench_step.run(bench, {"name": "toy", "model": toy, "layout": {"dp": 2, "fsdp": True}, "steps": 1,
                                 "train": {"batch": 4, "seq": 16, "dtype": "bfloat16", "micro_batches": 2, "recompute": True}})
    assert {(r["op"], r["interface"], r["type"]) for r in rows} == set(itertools.product(
        collectives.OPS, ("ms_dtensor", "mindspore"), ("float", "bfloat16")))
    assert not any(r[way]["wrong"] for r in rows for way in ("in", "out") if way in r)
    assert {(r["op"], r["interface"]) for r in rows if "in" in r} == {
        ("all_reduce", "ms_dtensor"), ("all_reduce", "mindspore"), ("broadcast", "mindspore")}
    assert [r["op"] for r in issued] == ["add", "fb add"] and issued[0]["mode"] == "issue"
    assert step[0]["peak"] == 376 and step[0]["mfu"] > 0 and step[0]["memory_gib"] is not None
