# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts against the same in one, beside data and tensor parallelism: bit for bit, and as often sent."""
import itertools
from collections import Counter

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.pipeline import PipelineStage, pipeline
from tests.cases import case, cases
from tests.operands import Built, filled, weight
from tests.pipeline import cases_run
from tests.pipeline.cases_run import T, X
from tests.support import each, set_trained
from tests.tiers import sampled

MIXED = md.MixedPrecisionPolicy(param_dtype=ms.float16, reduce_dtype=ms.float32)
MORE = {
    "fully_shard, float16": lambda net, mesh: md.fully_shard(net, mesh=mesh["dp"], mp_policy=MIXED),
    "replicate, float16": lambda net, mesh: md.replicate(net, mesh=mesh["dp"], mp_policy=MIXED),
    "kept": lambda net, mesh: [md.fully_shard(c, mesh=mesh["dp"], reshard_after_forward=False) for c in (*net.layers, net)],
    "blocks, recompute": lambda net, mesh: (
        [md.checkpoint_wrapper(c) for c in net.layers], cases_run.WAYS["blocks"](net, mesh)),
    "zero1": lambda net, mesh: md.replicate(net, mesh=mesh["dp"], zero1=True),
}


def parts_beside_an_axis(world):
    """Bit for bit the backward in one part, and the same collectives, as often."""
    @each(sampled({**cases_run.WAYS, **MORE}, 4, 1))
    def steps(way):
        other = "tp" if way.startswith("tp") else "dp"
        mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", other))
        net = filled(cases_run.Net(2))
        {**cases_run.WAYS, **MORE}[way](net, mesh)
        stage = PipelineStage(net, 1, 2, mesh["pp"])
        rows = [md.Replicate() if other == "tp" else md.Shard(0)]
        xs, ts = ([md.distribute_tensor(Tensor(half), mesh[other], rows, src_data_rank=None) for half in np.split(a, 2)]
                  for a in (X, T))
        params = stage.params()

        def run(in_parts: bool):
            with comm.record() as events:
                made = [stage.record((x,), {}, lambda y, t=t: cases_run.loss_fn(y, t), in_parts) for x, t in zip(xs, ts)]
                out = []
                for last, one in enumerate(made):
                    stage.synchronise(bool(last))
                    if in_parts:
                        dx, = one.backward_inputs(None, params)
                        products = len(one._store.products)
                        out += [dx, *one.backward_weights(params)]
                        assert products == 6, products
                    else:
                        (dx,), grads = one.backward(None, params)
                        out += [dx, *grads]
            return [g.full_tensor().asnumpy() for g in out], Counter((e.op, e.phase, tuple(e.axes)) for e in events)
        run(False)
        want, often = run(False)
        got, counted = run(True)
        assert counted == often, f"{counted - often} more, {often - counted} less"
        for i, (a, b) in enumerate(zip(got, want)):
            assert np.array_equal(a, b), f"{i}: off by {np.abs(a - b).max()} of {np.abs(b).max()}"


@cases(2, {"as_many_as_ranks_and_more_of_two": ((2, 5),)})
@cases(4, {"as_many_as_ranks_and_more_of_four": ((4, 9),)}, timeout=120)
def as_many(world, counts) -> None:
    """Microbatches: as many as ranks, and so many that the ranks do not divide them; weights tied over stages."""
    mesh = md.init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))

    @each(itertools.product(cases_run.IN_PARTS, counts))
    def steps(name, m):
        rng = np.random.default_rng(m)
        x, t = (rng.normal(0, 0.2, size=(8 * m, 4)).astype(np.float32) for _ in range(2))
        net = filled(cases_run.Net(tied=True))
        kind, v = cases_run.KINDS[name]
        schedule = kind(pipeline(net, mesh, n_stages=v * world.size, style=cases_run.style_of(name)), m, cases_run.loss_fn)
        want = cases_run.one_device(net, False, x, t)
        with comm.record() as events:
            cases_run.right(schedule, want, "tied", Tensor(t), 1e-6, args=(Tensor(x),))
        sent = Counter(e.op for e in events)
        assert set(sent) <= {"exchange", "broadcast"} and sent["broadcast"] == 1, sent


@case(4, timeout=180)
def parts_beside_other_axes(world):
    cases_run.beside_other_axes(world, cases_run.IN_PARTS, 4)


@case(4, timeout=120)
def frozen_when_laid_out_and_trained_later(world):
    """A gate takes over who adds up a parameter's gradient, which is said when it is first trained."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x, t = (md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (X, T))

    @each(itertools.product(sampled(("zbh1", "zbv"), 2), ("replicate", "fully_shard")))
    def steps(name, way):
        net, plain, (kind, v) = filled(cases_run.Net()), filled(cases_run.Net()), cases_run.KINDS[name]
        set_trained(False, net.layers[0], net.last)
        stages = pipeline(net, mesh["pp"], n_stages=2 * v, style=cases_run.style_of(name))
        for stage in stages:
            cases_run.WAYS[way](stage.module, mesh)
        schedule = kind(stages, 4, cases_run.loss_fn)
        for trained in (False, True):
            for one in (plain, *(stage.module for stage in stages)):
                set_trained(trained, *(c for c in (one.layers[0], one.last) if list(c.get_parameters())))
            with comm.record() as events:
                cases_run.right(schedule, cases_run.one_device(plain, False), f"{trained=}", t, args=(x,))
            sums = Counter(e.op for e in events if e.phase == "backward" and e.axes == ("dp",))
            units = sum(bool(s.module.trainable_params()) for s in stages)
            assert sum(n for op, n in sums.items() if op in ("all_reduce", "reduce_scatter")) <= units, sums


def own_norm() -> nn.Cell:
    """A user's norm with weights of two dims, of which a unit does not know that they are a norm's."""
    return Built(lambda c, x: ms.ops.LayerNorm(1, 1)(x, c.gamma, c.beta)[0], gamma=weight(3, 4), beta=weight(3, 4))


NORMS = {"of one dim": lambda: nn.LayerNorm((4,)), "by its op": own_norm, "of two dims": lambda: nn.LayerNorm((3, 4), 1, 1)}


@cases(2, {
    "norms_of_equal_weights": ("of one dim", [("zbh1", md.fully_shard, words, False) for words in ["", "gamma"] * 2]),
    "norms_by_their_op": ("by its op", [("zbh1", way, "gamma beta", False) for way in (md.fully_shard, md.replicate)]),
    "norms_that_an_optimizer_has_written": ("of one dim", [("zbh1", md.replicate, "", False)] * 2),
    "norms_over_two_dims": ("of two dims", [("zbh1", md.fully_shard, "gamma", False),
                                            ("1f1b", md.fully_shard, "gamma", True)])}, timeout=120)
def norms(world, kind: str, rows) -> None:
    """MindSpore takes a leaf of LayerNorm again for one of the same values: of another layer, or of a model that is gone.

    `rows`: a schedule, how cells are wrapped, which weights are alike in a model's norms (without any, only those of two
    models are), and whether they are frozen.
    """
    mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    x, t = (a if kind == "of one dim" else a.reshape(8, 3, 4) for a in (X, T))
    whole = [md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (x, t)]

    @each(rows)
    def step(name, wrap, alike, frozen):
        net = filled(nn.SequentialCell(*[c for _ in range(3) for c in (NORMS[kind](), nn.Dense(4, 4))]))
        for norm in (net[0], net[2], net[4]):
            for p in (getattr(norm, word) for word in alike.split()):
                p.set_data(Tensor(np.full(p.shape, 1.25 if p is norm.gamma else 0.5, np.float32)))
            norm.gamma.requires_grad = norm.beta.requires_grad = not frozen
        want = cases_run.one_device(net, False, x, t)
        for cell in net:
            wrap(cell, mesh=mesh["dp"])
        schedule = cases_run.KINDS[name][0](PipelineStage(net, 0, 1, mesh["pp"]), 4, cases_run.loss_fn)
        cases_run.right(schedule, want, "step", whole[1], args=whole[:1])
        md.optim.SGD(schedule.params, 0.5)([p * 1 for p in schedule.params])
