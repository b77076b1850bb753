# SPDX-License-Identifier: Apache-2.0
"""What a device packs together, against one device: parameters that lie alike, gradients cast together and handed out as
places of one sum. With what goes another way: a parameter used twice, outside of its unit too, pieces that are not equal,
cut on another dim, several dtypes in a unit.
"""
from __future__ import annotations

from collections import Counter

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from tests.cases import case
from tests.rehearsal.session import rehearsed
from tests.sharding.support import data_mesh
from tests.support import array, each, each_once, equal_each, mesh_2d
from tests.tiers import sampled

DIM, WIDE = 8, 16
X = np.random.default_rng(11).normal(size=(8, DIM)).astype(np.float32)
SHAPES = {"wq": (DIM, DIM), "wk": (4, DIM), "wv": (4, DIM), "wo": (DIM, DIM), "w1": (WIDE, DIM), "w3": (WIDE, DIM),
          "w2": (DIM, WIDE), "norm1": (DIM,), "norm2": (DIM,)}


class Block(nn.Cell):
    """A Llama block's parameters; `twice`: one of them is used again."""

    def __init__(self, seed: int, dtype, twice: bool, odd: int = 0):
        super().__init__()
        draw, self.twice = np.random.default_rng(seed), twice
        for name, shape in SHAPES.items():
            shape = tuple(n + odd if n == WIDE else n for n in shape)  # the feed-forward's width divides nothing
            value = draw.normal(0.3, 0.4, shape).astype(np.float32)
            setattr(self, name, Parameter(Tensor(value.astype(dtype)), name=name))

    def construct(self, x):
        def of(w, y):
            return mint.matmul(y, mint.transpose(w, 0, 1))
        h = x * self.norm1
        both = mint.cat((of(self.wk, h), of(self.wv, h)), 1)
        x = x + of(self.wo, mint.tanh(of(self.wq, h))) + both
        if self.twice:
            x = x + 0.5 * of(self.wq, mint.tanh(x))
        h = x * self.norm2
        return x + of(self.w2, mint.tanh(of(self.w1, h)) * of(self.w3, h))


class Net(nn.Cell):
    """Two blocks."""

    def __init__(self, dtype=np.float32, twice: bool = False, odd: int = 0):
        super().__init__()
        self.blocks = nn.CellList([Block(i, dtype, twice, odd) for i in (1, 2)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(net, outside: bool):
    """`outside`: of a parameter that is used outside of its unit, too."""
    def loss(x):
        value = (net(x) ** 2).mean()
        return value + (net.blocks[0].wk ** 2).mean() if outside else value
    return loss


def step(mesh, policy, how: dict, twice: bool, odd: int, outside: bool):
    """Loss and whole gradients of the second of two steps, parameters after both, and its collectives."""
    net = Net(twice=twice, odd=odd)
    for block in net.blocks:
        md.fully_shard(block, mesh=mesh, mp_policy=policy, **how)
    md.fully_shard(net, mesh=mesh, mp_policy=policy)
    params = net.trainable_params()
    optimizer = md.optim.AdamW(params, 0.01)
    of = md.value_and_grad(loss_of(net, outside), 0, params)
    x = md.distribute_tensor(Tensor(X), mesh, [md.Shard(0)] * mesh.ndim, src_data_rank=None)
    optimizer(of(x)[1][1])
    with md.comm.record() as events:
        loss, (dx, grads) = of(x)
    whole = [g.full_tensor() for g in grads]
    optimizer(grads)
    count = Counter(f"{e.op} {e.phase}" for e in events if e.src == "fully_shard")
    return list(map(array, (loss, dx, *whole, *params))), count


def of_one_device(twice: bool, odd: int, outside: bool):
    net = Net(twice=twice, odd=odd)
    params = net.trainable_params()
    optimizer = md.optim.AdamW(params, 0.01)
    of = ms.value_and_grad(loss_of(net, outside), 0, params)
    optimizer(of(Tensor(X))[1][1])
    loss, (dx, grads) = of(Tensor(X))
    optimizer(grads)
    return [loss, dx, *grads, *params]


def by_columns(p):
    """Another dim for those that have one: the pieces lie in stretches."""
    return md.Shard(1) if len(p.shape) > 1 else None


def by_parts(p):
    """Several, equal and not, of some of them: equal parts lie side by side, of whichever parameters."""
    parts = {"w1": (4,) * 4, "w3": (4, 8, 4), "wq": (4, 2, 2)}.get(p.name.rpartition(".")[2])
    return None if parts is None else md.FusedShard(0, parts)


PLAIN, MIXED = None, md.MixedPrecisionPolicy(ms.bfloat16, ms.float32, output_dtype=ms.float32)
ONLY = md.MixedPrecisionPolicy(ms.bfloat16, output_dtype=ms.float32)
WAYS = {  # policy, how, twice, odd, outside; a push takes each third: both precisions, each way to lie
    "used twice": (MIXED, {}, True, 0, False),
    "float32": (PLAIN, {}, False, 0, False), "bfloat16": (MIXED, {}, False, 0, False),
    "odd, float32": (PLAIN, {}, False, 1, False),
    "odd": (MIXED, {}, False, 1, False), "used outside": (MIXED, {}, False, 0, True),
    "columns": (MIXED, {"shard_placement_fn": by_columns}, False, 0, False),
    "columns, float32": (PLAIN, {"shard_placement_fn": by_columns}, True, 0, False),
    "added up in bfloat16": (ONLY, {}, False, 0, False),
    "parts, float32": (PLAIN, {"shard_placement_fn": by_parts, "reshard_after_forward": 1}, True, 0, True),
    "parts": (MIXED, {"shard_placement_fn": by_parts}, False, 0, False), "both, float32": (PLAIN, {}, True, 0, True),
}


@case(2, timeout=240)
def a_block_that_is_packed_together(world):
    mesh = data_mesh(world)
    with rehearsed(clock=False):
        npu = data_mesh(world, "npu")

    @each(sampled(WAYS, 3))
    def run(name):
        policy, how, *rest = WAYS[name]
        want, count = step(mesh, policy, how, *rest)
        with rehearsed(clock=False):
            got, seen = step(npu, policy, how, *rest)
        kept = {} if "reshard_after_forward" in how else {"all_gather backward": 2}
        assert seen == count == {"all_gather forward": 2, "reduce_scatter backward": 2} | kept, seen
        one, = each_once(lambda: list(map(array, of_one_device(*rest))))
        names = ["loss", "input", *(f"{what} {n}" for what in ("gradient of", "parameter") for n in 2 * [*SHAPES])]
        equal_each(got, one, names, "of one device", 8e-2 if policy else 2e-5)  # bfloat16's 2^-9, and many sums
        equal_each(got, want, names, "of CPU ranks", 1e-6)


@case(4, timeout=120)
def sums_of_copies_lie_in_one_memory(world):
    """Over two axes: the sum of the shards is one all-reduce in place."""
    @each(sampled((PLAIN, MIXED), 2))
    def run(policy):
        want, _ = step(mesh_2d(), policy, {}, True, 0, True)
        with rehearsed(clock=False):
            npu = md.init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp"))
            got, seen = step(npu, policy, {}, True, 0, True)
        assert seen["all_reduce backward"] == seen["reduce_scatter backward"] == 2, seen
        equal_each(got, want, range(len(want)), rtol=1e-4)
