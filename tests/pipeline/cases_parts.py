# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts against the same in one, beside data and tensor parallelism: bit for bit, and as often sent."""
from __future__ import annotations

from collections import Counter

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.pipeline import PipelineStage, pipeline
from tests.cases import case
from tests.pipeline.cases_run import (
    KINDS,
    WAYS,
    Net,
    T,
    X,
    beside_other_axes,
    frozen_and_unfrozen,
    loss_fn,
    one_device,
    right,
    style_of,
)
from tests.sharding.support import collected, filled, none_of
from tests.tiers import sampled

MIXED = md.MixedPrecisionPolicy(param_dtype=ms.float16, reduce_dtype=ms.float32)
MORE = {
    "fully_shard, float16": lambda net, mesh: md.fully_shard(net, mesh=mesh["dp"], mp_policy=MIXED),
    "replicate, float16": lambda net, mesh: md.replicate(net, mesh=mesh["dp"], mp_policy=MIXED),
    "kept": lambda net, mesh: [md.fully_shard(c, mesh=mesh["dp"], reshard_after_forward=False) for c in (*net.layers, net)],
    "blocks, recompute": lambda net, mesh: ([md.checkpoint_wrapper(c) for c in net.layers], WAYS["blocks"](net, mesh)),
    "zero1": lambda net, mesh: md.replicate(net, mesh=mesh["dp"], zero1=True),
}


@case(2, timeout=120)
def parts_beside_an_axis(world):
    """Bit for bit the backward in one part, and the same collectives, as often."""
    faults: list[str] = []
    for way, apply in sampled({**WAYS, **MORE}.items(), 4, 1):
        def steps(way=way, apply=apply):
            other = "tp" if way.startswith("tp") else "dp"
            mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", other))
            net = filled(Net(2))
            apply(net, mesh)
            stage = PipelineStage(net, 0, 1, mesh["pp"])
            rows = [md.Replicate() if other == "tp" else md.Shard(0)]
            xs, ts = ([md.distribute_tensor(Tensor(half), mesh[other], rows, src_data_rank=None) for half in np.split(a, 2)]
                      for a in (X, T))
            params = stage.params()

            def run(in_parts: bool):
                with comm.record() as events:
                    made = [stage.record((x,), {}, lambda y, t=t: loss_fn(y, t), in_parts) for x, t in zip(xs, ts)]
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
                return [g.full_tensor().asnumpy() for g in out], Counter(
                    (e.op, e.phase, tuple(e.axes)) for e in events)
            run(False)
            want, often = run(False)
            got, counted = run(True)
            assert counted == often, f"{counted - often} more, {often - counted} less"
            for i, (a, b) in enumerate(zip(got, want)):
                assert np.array_equal(a, b), f"{i}: off by {np.abs(a - b).max()} of {np.abs(b).max()}"
        collected(faults, way, steps)
    none_of(faults)


IN_PARTS = ("zbh1", "zbv", "dualpipev")


def as_many(world, counts) -> None:
    """Microbatches: as many as ranks, and so many that the ranks do not divide them; weights tied over stages."""
    mesh, faults = md.init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",)), []
    for name in IN_PARTS:
        for m in counts:
            def steps(name=name, m=m):
                rng = np.random.default_rng(m)
                x, t = (rng.normal(0, 0.2, size=(8 * m, 4)).astype(np.float32) for _ in range(2))
                net = filled(Net(tied=True))
                kind, v = KINDS[name]
                schedule = kind(pipeline(net, mesh, n_stages=v * world.size, style=style_of(name)), m, loss_fn)
                want = one_device(net, False, x, t)
                with comm.record() as events:
                    right(schedule, want, "tied", Tensor(t), 1e-6, args=(Tensor(x),))
                sent = Counter(e.op for e in events)
                assert set(sent) <= {"exchange", "broadcast"} and sent["broadcast"] == 1, sent
            collected(faults, f"{name}, m={m}", steps)
    none_of(faults)


@case(2)
def as_many_as_ranks_and_more_of_two(world):
    as_many(world, (2, 5))


@case(4, timeout=120)
def as_many_as_ranks_and_more_of_four(world):
    as_many(world, (4, 9))


@case(4, timeout=180)
def parts_beside_other_axes(world):
    beside_other_axes(world, IN_PARTS, 4)


@case(2, timeout=120)
def norms_of_equal_weights(world):
    """MindSpore takes a leaf of LayerNorm again for one of the same values: of another layer, or of a model that is gone."""
    mesh, faults = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")), []
    x, t = (md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (X, T))
    for alike in (False, True):  # in one model; the second model has the first one's
        for turn in range(2):
            def step(alike=alike, turn=turn):
                net = filled(nn.SequentialCell(*[c for _ in range(3) for c in (nn.LayerNorm((4,)), nn.Dense(4, 4))]))
                for norm in (net[0], net[2], net[4]) if alike else ():
                    norm.gamma.set_data(Tensor(np.full(4, 1.25, np.float32)))
                want = one_device(net, False)
                for cell in net:
                    md.fully_shard(cell, mesh=mesh["dp"])
                stage = PipelineStage(net, 0, 1, mesh["pp"])
                right(KINDS["zbh1"][0](stage, 4, loss_fn), want, "gradients", t, args=(x,))
            collected(faults, f"alike {alike}, turn {turn}", step)
    none_of(faults)


class OwnNorm(nn.Cell):
    """A user's norm with weights of two dims, of which a unit does not know that they are a norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.b = (ms.Parameter(Tensor(np.full((3, 4), v, np.float32))) for v in (1.25, 0.5))

    def construct(self, x):
        return ms.ops.LayerNorm(1, 1)(x, self.g, self.b)[0]


@case(2, timeout=120)
def norms_by_their_op(world):
    mesh, faults = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")), []
    x, t = (a.reshape(8, 3, 4) for a in (X, T))
    whole = [md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (x, t)]
    for way, wrap in (("fully_shard", md.fully_shard), ("replicate", md.replicate)):
        def step(wrap=wrap, way=way):
            net = nn.SequentialCell(*[c for _ in range(3) for c in (OwnNorm(), filled(nn.Dense(4, 4)))])
            want = one_device(net, False, x, t)
            for cell in net:
                wrap(cell, mesh=mesh["dp"])
            right(KINDS["zbh1"][0](PipelineStage(net, 0, 1, mesh["pp"]), 4, loss_fn), want, way, whole[1], args=whole[:1])
        collected(faults, way, step)
    none_of(faults)


@case(2, timeout=120)
def norms_over_two_dims(world):
    """Their weights have two dims, and are taken again as others' are; frozen ones in a backward of one part, too."""
    mesh, faults = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")), []
    x, t = (a.reshape(8, 3, 4) for a in (X, T))
    whole = [md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (x, t)]
    for name, frozen in (("zbh1", False), ("1f1b", True)):
        def step(name=name, frozen=frozen):
            net = filled(nn.SequentialCell(*[c for _ in range(3) for c in (nn.LayerNorm((3, 4), 1, 1), nn.Dense(4, 4))]))
            for norm in (net[0], net[2], net[4]):
                norm.gamma.set_data(Tensor(np.full((3, 4), 1.25, np.float32)))
                norm.gamma.requires_grad = norm.beta.requires_grad = not frozen
            want = one_device(net, False, x, t)
            for cell in net:
                md.fully_shard(cell, mesh=mesh["dp"])
            right(KINDS[name][0](PipelineStage(net, 0, 1, mesh["pp"]), 4, loss_fn), want, "step", whole[1], args=whole[:1])
        collected(faults, f"{name}, frozen {frozen}", step)
    none_of(faults)


@case(2)
def frozen_and_unfrozen_between_steps(world):
    for name in IN_PARTS:
        frozen_and_unfrozen(name)
