# SPDX-License-Identifier: Apache-2.0
"""Experts over ranks by the device's branch, rehearsed: one device's numbers, and how often the host waits in a layer."""
from collections import Counter
from contextlib import contextmanager

import numpy as np
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from model_zoo.llama.config import ExpertsConfig, ModelConfig, ParallelConfig
from model_zoo.llama.experts import Experts
from model_zoo.llama.parallelize import Cut, CutExperts, lay_out_experts, make_mesh
from ms_dtensor import Replicate, Shard
from ms_dtensor.core.placements import chunk_bounds
from ms_dtensor.internals.names import Function
from ms_dtensor.ops.local import moe as twins
from ms_dtensor.parallel import experts as module
from tests.experts.cases_experts import WHATS, pieces, ten
from tests.experts.reference import expected, operands
from tests.rehearsal.session import rehearsed
from tests.rehearsal.watch import asking
from tests.support import array, equal_each
from tests.tiers import sampled

# kernels at least, that a layer's forward and its backward ask for on four ranks
OPS = {False: 34, True: 66, "room": 34}
BACKWARD = {False: 33, True: 38, "room": 31}
VIEWS = ("Reshape", "Contiguous", "TransposeExtView")  # of autograd's nodes


def stable_sort(values, dim, stable, descending=False):
    assert stable
    array = -values.asnumpy() if descending else values.asnumpy()
    order = np.argsort(array, dim, kind="stable")
    return Tensor(np.take_along_axis(values.asnumpy(), order, dim)), Tensor(order)


class Products(Function):
    """Rows by groups, each by its own matrix; its gradient are two calls of the same kernel."""

    @staticmethod
    def forward(ctx, x, w, ends, device):
        ctx.save_for_backward(x, w)
        ctx.ends, ctx.device = ends, device
        x, w = x.asnumpy(), w.asnumpy()
        return Tensor(np.concatenate([x[a:b] @ of for a, b, of in zip([0, *ends], ends, w)]))

    @staticmethod
    def backward(ctx, dout):
        ctx.device.counts["ops"] += 2
        x, w, dy, ends = *(t.asnumpy() for t in (*ctx.saved_tensors, dout)), ctx.ends
        parts = list(zip([0, *ends], ends, w))
        dx = np.concatenate([dy[a:b] @ of.T for a, b, of in parts])
        return Tensor(dx), Tensor(np.stack([x[a:b].T @ dy[a:b] for a, b, _ in parts])), None, None


class Gated(Function):
    """`ops.swiglu` of two halves; its gradient is one kernel."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.save_for_backward(x)
        ctx.device = device
        gate, up = np.split(x.asnumpy(), 2, 1)
        return Tensor(gate / (1 + np.exp(-gate)) * up)

    @staticmethod
    def backward(ctx, dout):
        ctx.device.counts["ops"] += 1
        (gate, up), dy = np.split(ctx.saved_tensors[0].asnumpy(), 2, 1), dout.asnumpy()
        share = 1 / (1 + np.exp(-gate))
        return Tensor(np.concatenate((dy * up * share * (1 + gate * (1 - share)), dy * gate * share), 1)), None


@contextmanager
def kernels(device):
    """In the place of those that a CPU has not: an op each; what they ask of the host is left out of the count."""
    def grouped(xs, ws, *, group_list, split_item, group_type, group_list_type):
        assert (split_item, group_type, group_list_type, len(xs), len(ws)) == (3, 0, 1, 1, 1)
        return Products.apply(xs[0], ws[0], np.cumsum(group_list.asnumpy()).tolist(), device),
    def gated(x, dim):
        if type(x) is Tensor:
            return Gated.apply(x, device)
        a, b = ops.chunk(x, 2, dim)
        return a * ops.sigmoid(a) * b
    def plain(twin, kernel):
        return lambda x, *rest: (twin if type(x) is Tensor or type(x) is tuple else kernel)(x, *rest)
    permute, unpermute, stack = ops.moe_token_permute, ops.moe_token_unpermute, mint.stack
    mint.stack = plain(ops.stack, stack)
    had = module.auto_generate.grouped_matmul_v4, ops.swiglu, mint.sort
    ops.moe_token_permute, ops.moe_token_unpermute = plain(twins.permute, permute), plain(twins.unpermute, unpermute)
    module.auto_generate.grouped_matmul_v4 = asking(grouped, "grouped_matmul_v4", device)
    mint.sort = asking(stable_sort, "sort", device)
    ops.swiglu = asking(gated, "swiglu", device)
    try:
        yield
    finally:
        module.auto_generate.grouped_matmul_v4, ops.swiglu, mint.sort = had
        ops.moe_token_permute, ops.moe_token_unpermute, mint.stack = permute, unpermute, stack


def asked_by_autograd(y) -> int:
    """MindSpore's own nodes behind a result: of each the backward runs a kernel at least, but of views."""
    found, todo, known = 0, [y._grad_node], set()
    while todo:
        node = todo.pop()
        if node is None or node._unique_id() in known:
            continue
        known.add(node._unique_id())
        found += not (isinstance(node, Function) or node.is_leaf() or node.name() in VIEWS)
        todo += [after[0] if isinstance(after, tuple) else after for after in node.next_functions]
    return found


def with_gradients(device, run, cut, cot, most):
    """Gradients of a layer; of its backward no more ops than these: those that ours ask for, and those of autograd."""
    behind = []

    def loss(*a):
        y = run(*a)
        value = (y * cot).sum()
        behind.extend((asked_by_autograd(y), device.counts["ops"]))
        return value
    grads = md.grad(loss, (0, 1, 2, 3, 4))(*cut)
    backward = behind[0] + device.counts["ops"] - behind[1]
    assert 0 < backward <= most, (backward, most)
    return grads


def forget(device) -> None:
    """What the device has been asked for."""
    for kept in (device.syncs, device.calls, device.counts):
        kept.clear()


def waits(device):
    """Lines of ours where the host waited for the device."""
    ours = ("/parallel/", "/custom_ops/", "/comm/group.py", "/comm/device.py", "/comm/hccl.py")
    return [site.rpartition("/")[2] for site in device.syncs if any(part in site for part in ours)]


def a_layer_waits_for_the_host_once(world):
    """Choices, sizes and what is not finite come to the host together; nothing is waited for in the backward."""
    n = world.size
    with rehearsed(clock=False) as device, kernels(device):
        mesh = md.init_device_mesh("npu", (n,), mesh_dim_names=("ep",))
        for seed, (name, (tokens, experts, k, choose)) in sampled(enumerate(ten(n).items()), 3):
            chosen = choose(np.random.default_rng(seed), tokens, experts, k)
            x, weights, dout, ws = operands(seed, tokens, experts, k)
            want = expected(x, weights, chosen, dout, ws)
            *cut, picks, cot = (pieces(a, mesh, [Shard(0)]) for a in (x, weights, *ws, chosen, dout))
            for dedup in sampled((False, True), 2, seed):
                def run(x, weights, *w, picks=picks, dedup=dedup):
                    return md.moe(x, weights, picks, *w, dedup=dedup)
                forget(device)
                y = run(*cut)
                assert 0 < device.counts["ops"] <= OPS[dedup], (name, dedup, device.counts)
                assert [site.split(":")[0] for site in waits(device)] == ["experts_counts.py"], (name, dedup, waits(device))
                called = Counter(c[0] for c in device.calls)
                assert called == {"all_to_all_single": 5 if dedup else 3}, (name, dedup, called)
                device.syncs.clear()
                grads = with_gradients(device, run, cut, cot, BACKWARD[dedup])
                assert len(waits(device)) == 1, (name, dedup, waits(device))
                equal_each((y, *grads), want, WHATS, f"{name}, {dedup=}", 1e-10)


def in_room(chosen, ranks, experts, room):
    """What is left of choices where each expert takes so many of each rank."""
    left = chosen.copy()
    for rows in np.split(left, np.cumsum([b - a for a, b in chunk_bounds(len(chosen), ranks)])[:-1]):
        had = np.zeros(experts, int)
        for at in np.ndindex(*rows.shape):
            e = rows[at]
            if e >= 0:
                had[e] += 1
                rows[at] = e if had[e] <= room else -1
    return left


def with_room_for_so_many_the_host_never_waits(world):
    """Sizes are known beforehand: two all-to-alls there and home, two in the backward, and one device's numbers."""
    n = world.size

    def everything(device=None):
        mesh = md.init_device_mesh("cpu" if device is None else "npu", (n,), mesh_dim_names=("ep",))
        for seed, (name, (tokens, experts, k, choose)) in sampled(enumerate(ten(n).items()), 4, 2 * (device is not None)):
            chosen = choose(np.random.default_rng(seed), tokens, experts, k)
            x, weights, dout, ws = operands(seed, tokens, experts, k)
            *cut, picks, cot = (pieces(a, mesh, [Shard(0)]) for a in (x, weights, *ws, chosen, dout))
            for room in sampled((1, 2, k * tokens), 3, seed):
                want = expected(x, weights, in_room(chosen, n, experts, room), dout, ws)

                def run(x, weights, *w, picks=picks, room=room):
                    return md.moe(x, weights, picks, *w, room=room)
                if device is not None:
                    forget(device)
                y = run(*cut)
                if device is not None:
                    assert 0 < device.counts["ops"] <= OPS["room"], (name, room, device.counts)
                    grads = with_gradients(device, run, cut, cot, BACKWARD["room"])
                    assert not waits(device), (name, room, waits(device))
                    assert Counter(c[0] for c in device.calls)["all_to_all_single"] == 2 + 2 + 2, (name, device.calls)
                else:
                    grads = md.grad(lambda *a, run=run, cot=cot: (run(*a) * cot).sum(), (0, 1, 2, 3, 4))(*cut)
                equal_each((y, *grads), want, WHATS, f"{name}, {room=}", 1e-10)
    everything()
    with rehearsed(clock=False) as device, kernels(device):
        everything(device)


def layer(cfg) -> Experts:
    """The recipe's mixture, of drawn weights."""
    cell, rng = Experts(cfg), np.random.default_rng(3)
    for name, p in cell.parameters_and_names():
        p.name = name
        p.set_data(Tensor(rng.normal(size=p.shape).astype(np.float32) * 0.4))
    return cell


def run_of(cell, t: int, x, cot) -> tuple:
    """A loss of it, its experts' loads, and all gradients."""
    def loss(x):
        y, shares, loads = cell(x, t)
        return (y * cot).sum() + shares.sum(), loads
    (value, loads), (dx, grads) = md.value_and_grad(loss, 0, cell.trainable_params(), has_aux=True)(x)
    return value, loads, dx, *grads


def a_layer_of_the_recipe_with_a_capacity_never_waits(world):
    """Its router, its capacity over sequences, its experts: values and gradients of one device, by the device's branch."""
    t, cfg = 6, ModelConfig(dim=16, ffn_dim=12, experts=ExpertsConfig(8, 2, capacity=0.7, shared=1))
    x, cot = (np.random.default_rng(i).normal(size=(8 * t, 16)).astype(np.float32) for i in (1, 2))
    want = [array(v) for v in run_of(layer(cfg), t, Tensor(x), Tensor(cot))]
    assert 0 < want[1].sum() < 8 * t * 2, "some are dropped, and not all"
    for parallel in sampled((ParallelConfig(4, ep=2), ParallelConfig(4, ep=4), ParallelConfig(2, 2, ep=2)), 2, 1):
        with rehearsed(clock=False) as device, kernels(device):
            mesh, cell = make_mesh("npu", parallel), layer(cfg)
            md.parallelize_module(cell, mesh["tp"], {"gate": Cut(), "shared": Cut()})  # whole on tp
            lay_out_experts(cell, mesh, parallel)
            md.parallelize_module(cell.experts, mesh["ep", "tp"], CutExperts(True))
            md.replicate(cell.experts, mesh=mesh["dp"])
            md.replicate(cell, mesh=mesh["dp", "ep"].flatten("data"), ignored_modules=[cell.experts])
            rows = [Shard(0), Shard(0), Replicate()]
            args = [pieces(a, mesh, rows) for a in (x, cot)]
            device.syncs.clear()
            out = run_of(cell, t, *args)
            assert not waits(device), (parallel, waits(device))
            got = [array(v) for v in out]
        assert np.array_equal(got[1], want[1]), (parallel, got[1], want[1])
        equal_each(got, want, range(len(want)), str(parallel))


def experts_that_are_not_cut_over_ranks_take_their_own_tokens(world):
    """No row travels over dp: what does are the gradients, and what the losses of balance and the loads are made of."""
    t, cfg = 6, ModelConfig(dim=16, ffn_dim=12, experts=ExpertsConfig(8, 2))
    x, cot = (np.random.default_rng(i).normal(size=(8 * t, 16)).astype(np.float32) for i in (1, 2))
    want = [array(v) for v in run_of(layer(cfg), t, Tensor(x), Tensor(cot))]
    for parallel in (ParallelConfig(4), ParallelConfig(2, 2), ParallelConfig(2, 2, expert_tp=False)):
        with rehearsed(clock=False) as device, kernels(device):
            mesh, cell = make_mesh("npu", parallel), layer(cfg)
            cut = {"w1": Shard(1), "w2": Shard(2), "w3": Shard(1)} if parallel.expert_tp else {}
            md.parallelize_module(cell, mesh["tp"], {"gate": Cut(), "experts": Cut(**cut)})
            lay_out_experts(cell, mesh, parallel)
            md.replicate(cell, mesh=mesh["dp"])
            args = [pieces(a, mesh, [Shard(0), Replicate()]) for a in (x, cot)]
            with md.comm.record() as events:
                out = run_of(cell, t, *args)
            got = [array(v) for v in out]
        over_dp = Counter(e.op for e in events if "dp" in e.axes)
        assert over_dp == {"all_reduce": over_dp["all_reduce"]} and over_dp["all_reduce"] <= 4, (parallel, events)
        assert np.array_equal(got[1], want[1]), (parallel, got[1], want[1])
        equal_each(got, want, range(len(want)), str(parallel))
