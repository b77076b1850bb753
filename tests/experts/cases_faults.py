# SPDX-License-Identifier: Apache-2.0
"""Faults that other libraries' experts have had, each by its number: what was wrong there is compared with one device here.

Empty ranks (PaddleFormers#3010) are in `cases_grid.py` and among the ten cases of `cases_experts.py`; the faults of
attention in `tests/context/cases_grid.py`. All in float64, so that a sum which is taken twice cannot hide in rounding.
"""
from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from model_zoo.llama.config import ParallelConfig
from ms_dtensor import Shard
from ms_dtensor.errors import DTensorError
from ms_dtensor.optim import clip_grad_norm_
from ms_dtensor.tensor.distribute import distribute_parameter
from tests.cases import case
from tests.dist.support import array, equal_each, mesh_1d, refusal
from tests.experts.cases_counts import BIASED
from tests.experts.cases_experts import CUT, WHATS, WHOLE, pieces
from tests.experts.cases_recipe import trainer_of
from tests.experts.reference import expected, operands, random_choice
from tests.tiers import sampled

N, E, K, D, F = 24, 6, 2, 6, 5
EXACT = 1e-10


class Block(nn.Cell):
    """What is below the experts (a weight and a router), the experts, and a bias that is added to their result."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(11)
        for name, shape in (("below", (D, D)), ("gate", (D, E)), ("bias", (D,)), ("w1", (E, F, D)), ("w2", (E, D, F)),
                            ("w3", (E, F, D))):
            self.insert_param_to_cell(name, Parameter(Tensor(rng.normal(size=shape) * 0.5), name=name))
        self.router = md.Router(K)

    def construct(self, x):
        x = mint.matmul(x, self.below)
        weights, chosen = self.router(mint.matmul(x, self.gate))
        return x + (md.moe(x, weights, chosen, self.w1, self.w2, self.w3) + self.bias)


def gradients(cut=None, rows=None, mesh=None):
    """Loss, gradients by name, of one device or laid out: `cut` names the placements of the weights that are not whole."""
    net, batch = Block(), np.random.default_rng(12).normal(size=(N, D))
    x = Tensor(batch)
    if mesh is not None:
        for name in list(net._params):
            layout = (cut or {}).get(name, [WHOLE] * mesh.ndim)
            net._params[name] = distribute_parameter(net._params[name], mesh, layout, src_data_rank=None)
        x = pieces(batch, mesh, rows)
    params = net.trainable_params()
    value, grads = md.value_and_grad(lambda x: (net(x) ** 2).mean(), None, params)(x)
    return value, params, grads


def experts_over(dims):
    """Placements of w1, w2 and w3, where each mesh axis cuts "experts", "widths" or nothing."""
    by = {"experts": lambda d: Shard(0), "widths": Shard, None: lambda d: WHOLE}
    return {name: [by[what](d) for what in dims] for name, d in (("w1", 1), ("w2", 2), ("w3", 1))}


def as_long_as_one_devices(mesh, rows, cut, what):
    """Every gradient is the one device's, along which its length is 1.0: not 2, 1.2, or one rank's share."""
    want, _, right = gradients()
    value, params, grads = gradients(cut, rows, mesh)
    assert abs(float(array(value)) - float(want)) <= EXACT * float(want), what
    for p, g, w in zip(params, grads, right, strict=True):
        w = array(w)
        length = (array(g) * w).sum() / (w ** 2).sum()
        assert abs(length - 1) <= EXACT and np.abs(array(g) - w).max() <= EXACT * np.abs(w).max(), (what, p.name, length)
    return params, grads, [array(g) for g in right]


@case(world_size=4)
def gradients_of_experts_that_are_doubled(world):
    """pytorch#160285: with experts over two ranks their gradients came out twice as large; Megatron-LM#1464: 1.2 times."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    as_long_as_one_devices(mesh, [CUT, CUT], experts_over((None, "experts")), "dp2 x ep2")
    as_long_as_one_devices(mesh_1d(4, "ep"), [CUT], experts_over(("experts",)), "ep4")


@case(world_size=4)
def gradients_below_the_experts(world):
    """torchtitan#4054: tp without ep: the gradient of the experts' input was one rank's summand, and the router's with
    it."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for what in ("widths", None):
        as_long_as_one_devices(mesh, [CUT, WHOLE], experts_over((None, what)), f"tp2, {what}")


@case(world_size=4)
def norms_that_leave_experts_out(world):
    """Megatron-LM#5916: the norm was without the experts' where ep and tp are both above one. Automodel#3816: experts were
    clipped by another factor than the rest."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    for rows, dims in (([CUT, WHOLE], ("experts", "widths")), ([CUT, WHOLE], ("experts", None)),
                       ([CUT, CUT], ("experts", "experts"))):
        params, grads, right = as_long_as_one_devices(mesh, rows, experts_over(dims), dims)
        whole = np.sqrt(sum((w ** 2).sum() for w in right))
        of_experts = np.sqrt(sum((w ** 2).sum() for w in right[-3:]))
        assert of_experts > 0.1 * whole, "they count"
        norm = float(array(clip_grad_norm_(list(zip(params, grads)), 0.1 * whole)))
        assert abs(norm - whole) <= 1e-6 * whole, (dims, norm, whole)
        factors = [(array(g) * w).sum() / (w ** 2).sum() for g, w in zip(grads, right, strict=True)]
        assert max(abs(f - 0.1) for f in factors) <= 1e-6, (dims, factors)


@case(world_size=4)
def a_bias_that_is_added_by_every_rank(world):
    """torchtitan#4245: with widths cut each rank of tp added the whole bias to its summand, and the sum had it tp times."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, weights, dout, ws = operands(3, N, E, K)
    chosen = random_choice(np.random.default_rng(3), N, E, K)
    bias, rows = np.random.default_rng(4).normal(size=D), [CUT, WHOLE]
    want = expected(x, weights, chosen, dout, ws)[0] + bias
    args = [pieces(a, mesh, rows) for a in (x, weights, chosen)]
    cut = [pieces(w, mesh, [WHOLE, Shard(d)]) for w, d in zip(ws, (1, 2, 1))]
    given, cot = pieces(bias, mesh, [WHOLE, WHOLE]), pieces(dout, mesh, rows)
    y, grad = md.value_and_grad(lambda b: ((md.moe(*args, *cut) + b) * cot).sum(), 0)(given)
    assert abs(float(array(y)) - (want * dout).sum()) <= EXACT * np.abs(want * dout).sum()
    assert np.abs(array(grad) - dout.sum(0)).max() <= EXACT
    assert np.abs(array(md.moe(*args, *cut) + given) - want).max() <= EXACT * np.abs(want).max()


@case(world_size=4)
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
        cut = [pieces(w, mesh, p) for w, p in zip(ws, experts_over(dims).values())]

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


@case(world_size=4)
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


@case(world_size=4)
def a_bias_that_moves_in_evaluation_or_twice_in_recompute(world):
    """torchtitan#4148: an evaluation's tokens were counted, too, and moved the bias at the next step; others count each
    token again where a forward is recomputed."""
    steps = {}
    for recompute in (False, True):
        trainer = trainer_of(BIASED, ParallelConfig(4, ep=2, loss_parallel=False), recompute=recompute, eval_batches=2)
        cell = trainer.model.layers[1].feed_forward
        trainer.step(0)
        before = array(cell.expert_bias).copy()
        first, second = trainer.held_out_loss(), trainer.held_out_loss()
        assert first == second and np.array_equal(array(cell.expert_bias), before) and before.any()
        loads = trainer.step(1).loads
        assert (loads.sum(1) == 8 * 6 * BIASED.per_token).all(), loads
        steps[recompute] = before, loads, array(cell.expert_bias)
    assert all(np.array_equal(a, b) for a, b in zip(steps[False], steps[True], strict=True))


@case(world_size=4)
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
