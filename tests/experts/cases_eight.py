# SPDX-License-Identifier: Apache-2.0
"""Experts on eight ranks: the ten cases, bytes of deduplicated tokens, three axes at once, and a toy Mixtral that trains."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

import ms_dtensor as md
from model_zoo.llama.config import ParallelConfig
from model_zoo.llama.parallelize import CutExperts
from ms_dtensor import Replicate, Shard, comm
from ms_dtensor.optim import clip_grad_norm_
from ms_dtensor.parallel.experts import ratio
from tests.cases import case
from tests.dist.support import mesh_1d
from tests.experts.cases_experts import Block, as_on_one_device, pieces
from tests.experts.cases_recipe import MIXTURES, ends_of
from tests.experts.reference import operands, random_choice


@case(world_size=8, timeout=400)
def results_and_gradients_of_eight_are_those_of_one_device(world):
    as_on_one_device(world)


@case(world_size=8)
def of_64_experts_over_eight_ranks_a_token_once_to_a_rank_is_at_most_070_of_the_bytes(world):
    mesh, (tokens, experts, k, d) = mesh_1d(8, "ep"), (512, 64, 8, 256)
    x, weights, _, ws = operands(4, tokens, experts, k, d=d, f=2)
    chosen = random_choice(np.random.default_rng(3), tokens, experts, k)
    cut = [pieces(np.asarray(a, np.float32 if a is not chosen else np.int32), mesh, [Shard(0)])
           for a in (x, weights, chosen, *ws)]
    sent = {}
    for dedup in (False, True):
        with md.CommDebugMode() as log:
            md.moe(*cut, dedup=dedup)
        sent[dedup] = sum(comm.group(tuple(range(8))).all_gather_object(sum(e.bytes for e in log.events)))
    assert sent[True] <= 0.70 * sent[False], sent
    assert abs(sent[True] / sent[False] - ratio(experts, k, 8, d * 4)) < 0.02, sent


@case(world_size=8, timeout=240)
def three_axes_at_once_are_one_device(world):
    """fsdp x ep x tp with widths cut over tp; and tokens cut over tp too (sequence parallel), experts over ep and tp."""
    rng = np.random.default_rng(10)
    x = rng.normal(size=(24, 6))

    def double(cell):
        for p in cell.get_parameters():
            p.set_dtype(ms.float64)
        return cell

    def run(cell, x):
        def loss(x):
            y, extra, _ = cell(x)
            return (y * y).mean() + extra
        value, grads = md.value_and_grad(loss, None, cell.trainable_params())(x) if isinstance(x, md.DTensor) else \
            ms.value_and_grad(loss, None, cell.trainable_params())(x)
        whole = [(g.full_tensor() if isinstance(g, md.DTensor) else g).asnumpy() for g in grads]
        norm = clip_grad_norm_(list(zip(cell.trainable_params(), grads, strict=True)), 1e9)
        return float(value.full_tensor() if isinstance(value, md.DTensor) else value), float(norm), whole
    want = run(double(Block()), Tensor(x))
    mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("fsdp", "ep", "tp"))
    for within in (False, True):
        cell = double(Block())
        if within:
            md.parallelize_module(cell.experts, mesh["ep", "tp"], md.ExpertParallel())
            data, rows = mesh["fsdp", "ep", "tp"].flatten("data"), [Shard(0)] * 3
        else:
            md.parallelize_module(cell.experts, mesh["ep", "tp"], CutExperts(True))
            data, rows = mesh["fsdp", "ep"].flatten("data"), [Shard(0), Shard(0), Replicate()]
        md.fully_shard(cell.experts, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1))
        md.fully_shard(cell, mesh=data)
        got = run(cell, pieces(x, mesh, rows))
        off = [abs(a - b) / abs(b) for a, b in zip(got[:2], want[:2])]
        assert max(off) < 1e-10, (within, off)
        for p, g, w in zip(cell.trainable_params(), got[2], want[2], strict=True):
            assert np.abs(g - w).max() <= 1e-10 * max(np.abs(w).max(), 1e-30), (within, p.name)


@case(world_size=8, timeout=300)
def a_toy_mixtral_over_ep4_and_dp2_ends_at_the_loss_of_one_device(world):
    want, first = ends_of(MIXTURES["dropless"], None, 20)
    got, _ = ends_of(MIXTURES["dropless"], ParallelConfig(8, ep=4, loss_parallel=False), 20)
    assert want < first - 0.5, (first, want)
    assert abs(got - want) < 1e-4 * want, (got, want)
