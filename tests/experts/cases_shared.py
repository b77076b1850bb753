# SPDX-License-Identifier: Apache-2.0
"""Shared experts, which compute while tokens are under way: the same bits and the same calls, in another order.

And faults that other libraries' experts have had.
"""
from dataclasses import replace

import numpy as np
from mindspore import Tensor, mint

import ms_dtensor as md
from model_zoo.llama.config import ParallelConfig
from ms_dtensor import Shard, comm
from ms_dtensor.custom_ops.rows import connected
from ms_dtensor.errors import DTensorError, LayoutError
from ms_dtensor.internals.names import Function
from tests.cases import case
from tests.experts.cases_counts import BIASED
from tests.experts.cases_device import kernels
from tests.experts.cases_experts import CUT, WHATS, WHOLE, pieces, ten
from tests.experts.cases_grid import trainer_of
from tests.experts.reference import expected, operands, random_choice
from tests.rehearsal.emulator import RATES
from tests.rehearsal.session import rehearsed
from tests.support import array, counted, equal_each, mesh_1d, refusal
from tests.tiers import sampled

FORMS = {"a copy for each expert": {"dedup": False}, "a copy for each rank": {"dedup": True}, "room": {"room": 999}}
NAMES = (*WHATS, "dv")


def squares(x, v):
    """A feed-forward that all tokens share: [n, d] -> [n, d]."""
    if not x.shape[0]:  # a rank without tokens
        return connected(x, v)
    h = mint.matmul(x, v)
    return mint.matmul(h * h, mint.transpose(v, 0, 1))


mapped = md.local_map(squares, [CUT], ([CUT], [WHOLE]), out_shapes=lambda x, v: (x,))


def both(meanwhile, args, picks, cot, how, squares=mapped):
    """Result and gradients of the experts and the shared one, of which one computes meanwhile, or one behind the other."""
    def loss(x, weights, w1, w2, w3, v):
        if meanwhile:
            y = md.moe(x, weights, picks, w1, w2, w3, shared=lambda t: squares(t, v), **how)
        else:
            y = md.moe(x, weights, picks, w1, w2, w3, **how) + squares(x, v)
        return (y * cot).sum(), y
    with counted() as count, md.redistribution_policy("explicit"):
        (_, y), grads = md.value_and_grad(loss, tuple(range(6)), has_aux=True)(*args)
    return [y, *grads], count


def meanwhile_is_bit_for_bit_behind_and_dense(world):
    mesh = mesh_1d(world.size, "ep")
    for seed, (name, (tokens, experts, k, choose)) in sampled(enumerate(ten(world.size).items()), 3, 1):
        chosen = choose(np.random.default_rng(seed), tokens, experts, k)
        x, weights, dout, ws = operands(seed, tokens, experts, k)
        v = np.random.default_rng(seed).normal(size=(x.shape[1], 7))
        want = expected(x, weights, chosen, dout, ws)
        alone = [Tensor(a) for a in (x, v, dout)]
        dx, dv = md.grad(lambda x, v, cot=alone[2]: (squares(x, v) * cot).sum(), (0, 1))(*alone[:2])
        want = [want[0] + array(squares(*alone[:2])), want[1] + array(dx), *want[2:], array(dv)]
        *args, picks, cot = (pieces(a, mesh, [CUT]) for a in (x, weights, *ws, chosen, dout))
        args.append(pieces(v, mesh, [WHOLE]))
        for form, how in sampled(FORMS.items(), 2, seed):
            (got, count), (behind, calls) = (both(m, args, picks, cot, how) for m in (True, False))
            assert count == calls, (name, form, count, calls)
            for g, b, what in zip(got, behind, NAMES, strict=True):
                assert np.array_equal(array(g), array(b)) and g.placements == b.placements, (name, form, what)
            equal_each(got, want, NAMES, f"{name}, {form}", 1e-10)


class Seen(Function):
    """Notes whether a collective is under way, in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        note("forward")
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.note("backward")
        return grad * 1, None


def the_dispatch_is_under_way_while_shared_experts_compute(world):
    """On the emulator: posted before, waited for behind; the computing stream stands still for it no more, both ways."""
    n, seed = world.size, 3
    tokens, experts, k, choose = 8 * n, 2 * n, 2, ten(n)["random"][3]
    chosen = choose(np.random.default_rng(seed), tokens, experts, k)
    x, weights, dout, ws = operands(seed, tokens, experts, k)
    v, slow = np.random.default_rng(seed).normal(size=(x.shape[1], 64)), replace(RATES, flops=1e8, saved=1e8)
    for form, how in FORMS.items():
        still = {}
        for meanwhile in (False, True):
            with rehearsed(rates=slow) as device, kernels(device):
                mesh = md.init_device_mesh("npu", (n,), mesh_dim_names=("ep",))
                *args, picks, cot = (pieces(a, mesh, [CUT]) for a in (x, weights, *ws, chosen, dout))
                args.append(pieces(v, mesh, [WHOLE]))
                seen = []

                def note(phase, seen=seen, device=device):
                    seen.append((phase, sum(map(len, device.flying.values()))))

                local = md.local_map(Seen.apply, [CUT], ([CUT], None), out_shapes=lambda y, *_: (y,))
                device.times.clear()
                both(meanwhile, args, picks, cot, how, lambda x, v, note=note, local=local: local(mapped(x, v), note))
                times = [t for t in device.times if t[0] == "all_to_all_single"]
            under = {False: 0, True: 3 if how.get("dedup") else 1}[meanwhile]  # tokens, their weights and choices
            back = {False: 0, True: 2 if how.get("dedup") else 1}[meanwhile]
            assert seen == [("forward", under), ("backward", back)], (form, meanwhile, seen)
            first = 0 if "room" in how else 1  # behind the numbers, for which nothing can be done
            there, home = times[first:first + max(under, 1)], times[-max(back, 1):]
            still[meanwhile] = [sum(t[3] for t in some) for some in (there, home)], sum(t[2] for t in (*there, *home))
        (stood, seconds), (hidden, _) = still[False], still[True]
        assert min(stood) > 0 and sum(stood) > 0.3 * seconds, (form, still)
        assert hidden == [0, 0], (form, still)


def shared_experts_of_tp_communicate_between_posting_and_waiting(world):
    """DeepSeek-V3's block of the recipe: its calls in their order, and one device's losses and norms."""
    def steps(parallel):
        trainer = trainer_of(BIASED, parallel)
        with comm.record() as events:
            told = [(r.loss, r.grad_norm) for r in (trainer.step(i) for i in range(2))]
        return told, events
    want, _ = steps(None)
    for parallel, reduced in sampled((
            (ParallelConfig(2, 2, ep=2, loss_parallel=False), "all_reduce"),
            (ParallelConfig(2, 2, ep=2, loss_parallel=False, sequence_parallel=True), "reduce_scatter")), 2, 1):
        got, events = steps(parallel)
        assert np.allclose(got, want, rtol=1e-5), (parallel, got, want)
        told = [(e.op, e.axes) if e.src != "tokens" and e.dst != "tokens" else (e.src, e.dst) for e in events
                if e.phase == "forward"]
        there = ("tokens", "their experts' ranks")
        for at in (i for i, e in enumerate(told) if e == there and told[i - 1] != there):  # tokens, weights, choices
            assert told[at:at + 5] == [there, there, there, (reduced, ("tp",)), there[::-1]], told[at:at + 8]


@case(world_size=2)
def what_is_shared_is_refused_where_it_does_not_fit(world):
    mesh, chosen = mesh_1d(2, "ep"), np.array([[0, 1], [2, 0]], np.int32)
    x, weights, _, ws = operands(1, 2, 4, 2)
    args = [pieces(a, mesh, [CUT]) for a in (x, weights, chosen, *ws)]
    for odd, told in ((lambda t: t.sum(1), "f64[2@ep]"), (lambda t: t.to_local(), "Tensor[1, 6]"),
                      (lambda t: None, "NoneType")):
        assert told in refusal(lambda odd=odd: md.moe(*args, shared=odd), LayoutError), told
    plain = [Tensor(a) for a in (x, weights, chosen, *ws)]
    assert "NoneType" in refusal(lambda: md.moe(*plain, shared=lambda t: None), LayoutError)
    whole = [pieces(a, mesh, [WHOLE]) for a in (x, weights, chosen, *ws)]  # nothing is sent, and it has run all the same
    got, want = (md.moe(*whole, shared=lambda t: t * 3), md.moe(*plain) + plain[0] * 3)
    assert np.array_equal(array(got), array(want))
    summand = md.local_map(lambda t: t * 1, [md.Partial()], ([WHOLE],), out_shapes=lambda t: (t,))
    got = md.moe(*whole, shared=summand)  # of summands their sum
    assert np.array_equal(array(got), array(md.moe(*plain)) + 2 * x), "two ranks"


@case(world_size=2)
def what_raises_while_tokens_are_under_way_leaves_nothing_behind(world):
    mesh, chosen = mesh_1d(2, "ep"), np.array([[0, 1], [2, 0], [3, 3], [1, 2]], np.int32)
    x, weights, _, ws = operands(1, 4, 4, 2)
    args = [pieces(a, mesh, [CUT]) for a in (x, weights, chosen, *ws)]

    def step(shared):
        return md.value_and_grad(lambda x: (md.moe(x, *args[1:], shared=shared) ** 2).sum())(args[0])

    def broken(t):
        raise ValueError("mine")
    want = step(lambda t: t * 3)
    for _ in range(3):
        assert "mine" in refusal(lambda: step(broken), ValueError)
        for got, right in zip(step(lambda t: t * 3), want):
            assert np.array_equal(array(got), array(right))


# -- faults that other libraries' experts have had, each by its number: what was wrong there is compared with one device ----
# Others are seen by what compares with one device anyway, in float64, where a sum that is taken twice cannot hide in
# rounding: doubled gradients (pytorch#160285, Megatron-LM#1464), those below the experts (torchtitan#4054) and ranks without
# tokens (PaddleFormers#3010) in `cases_experts.py`; norms (Megatron-LM#5916, Automodel#3816) in `cases_grid.py`; what moves
# twice in evaluation or recompute (torchtitan#4148) in `cases_counts.py`; those of attention in `tests/context`.
N, E, K = 24, 6, 2
EXACT = 1e-10


def experts_over(dims, d):
    """Placements of a weight whose widths are its dim `d`, where each mesh axis cuts "experts", "widths" or nothing."""
    return [{"experts": CUT, "widths": Shard(d), None: WHOLE}[what] for what in dims]


def tokens_of_several_sequences_come_back_to_their_places(world):
    """torchtitan#3604: with sequences cut over tp, row i of a rank was taken for row `i + rank * rows` of all: right for a
    batch of one sequence only."""
    mesh, (b, t) = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), (6, 4)
    x, weights, dout, ws = operands(5, b * t, E, K)
    chosen = random_choice(np.random.default_rng(5), b * t, E, K)
    want = expected(x, weights, chosen, dout, ws)
    rows = [Shard(0), Shard(1)]  # sequences over dp, their tokens over tp
    three = [pieces(a.reshape(b, t, -1), mesh, rows) for a in (x, weights, chosen, dout)]
    for dims in (("experts", "experts"), (None, "experts"), ("experts", "widths")):
        cut = [pieces(w, mesh, experts_over(dims, d)) for w, d in zip(ws, (1, 2, 1))]

        def result(x, weights, *w, dims=dims):
            lists = [a.reshape(b * t, -1) for a in (x, weights, three[2])]
            if "widths" in dims:
                lists = [a.redistribute(placements=[CUT, WHOLE]) for a in lists]
            elif not all(p == CUT for p in lists[0].placements):
                lists = [a.redistribute(placements=[CUT, CUT]) for a in lists]
            return md.moe(*lists, *w).reshape(b, t, -1)
        y = result(three[0], three[1], *cut)
        assert np.abs(array(y).reshape(b * t, -1) - want[0]).max() <= EXACT * np.abs(want[0]).max(), dims
        grads = md.grad(lambda *a: (result(*a) * three[3]).sum(), (0, 1, 2, 3, 4))(*three[:2], *cut)  # noqa: B023
        equal_each([array(g).reshape(w.shape) for g, w in zip(grads, want[1:])], want[1:], WHATS[1:], str(dims), EXACT)


def loads_where_ranks_of_tp_have_the_same_tokens_or_others(world):
    """torchtitan#4154: loads were not added up over tp, or would be counted tp times where tokens are whole there; with
    and without ep, with and without sequence parallelism."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    chosen = random_choice(np.random.default_rng(6), N, E, K)
    want, bias = np.bincount(chosen.ravel(), minlength=E), np.random.default_rng(7).normal(size=E).astype(np.float32)
    moved = md.update_expert_bias(Tensor(bias), Tensor(want), 0.25).asnumpy()
    for rows in ([CUT, WHOLE], [CUT, CUT], [WHOLE, CUT], [WHOLE, WHOLE]):
        counts = md.expert_counts(pieces(chosen, mesh, rows), E)
        assert np.array_equal(array(counts), want), rows
        got = md.update_expert_bias(pieces(bias, mesh, [WHOLE, WHOLE]), counts, 0.25)
        assert np.array_equal(array(got), moved), rows
    loads = [trainer_of(BIASED, parallel).step(0).loads for parallel in (
        None, *sampled((ParallelConfig(2, 2, sequence_parallel=sp, ep=ep, loss_parallel=False) for sp, ep in
                        ((True, 2), (False, 2), (False, 1), (True, 1))), 2))]
    assert all(np.array_equal(other, loads[0]) for other in loads[1:]), loads


def a_router_that_gives_nan_is_named(world):
    """The layer, the ranks and how many of their tokens, told by all that share experts, before a token is sent."""
    for parallel, how in sampled((
            (ParallelConfig(4, ep=2, loss_parallel=False), {}),
            (ParallelConfig(4, ep=4, loss_parallel=False, fsdp=True), {"recompute": True}),
            (ParallelConfig(4, ep=2, loss_parallel=False, fsdp=True), {"dtype": "bfloat16"})), 3, 1):
        trainer = trainer_of(BIASED, parallel, **how)
        gate = trainer.model.layers[1].feed_forward.gate
        gate.construct = lambda x, right=gate.construct: right(x) * (float("nan") if world.rank in (1, 2) else 1.0)
        told = refusal(lambda trainer=trainer: trainer.step(0), DTensorError)
        assert "layers.1.feed_forward.experts.w1" in told, told
        for rank in (1, 2) if parallel.ep == 4 else (1 if world.rank < 2 else 2,):
            assert f"rank {rank}: 12 tokens" in told, told
