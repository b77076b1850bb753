# SPDX-License-Identifier: Apache-2.0
"""Faults that other libraries' experts have had, each by its number: what was wrong there is compared with one device here.

Others are seen by what compares with one device anyway, in float64, where a sum that is taken twice cannot hide in rounding:
doubled gradients (pytorch#160285, Megatron-LM#1464), those below the experts (torchtitan#4054) and ranks without tokens
(PaddleFormers#3010) in `cases_experts.py`; norms (Megatron-LM#5916, Automodel#3816) in `cases_grid.py`; what moves twice in
evaluation or recompute (torchtitan#4148) in `cases_counts.py`; those of attention in `tests/context`.
"""
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from model_zoo.llama.config import ParallelConfig
from ms_dtensor import Shard
from ms_dtensor.errors import DTensorError
from tests.dist.support import array, equal_each, refusal
from tests.experts.cases_counts import BIASED
from tests.experts.cases_experts import CUT, WHATS, WHOLE, pieces
from tests.experts.cases_grid import trainer_of
from tests.experts.reference import expected, operands, random_choice
from tests.tiers import sampled

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
