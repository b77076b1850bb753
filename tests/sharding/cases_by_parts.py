# SPDX-License-Identifier: Apache-2.0
"""Real ranks: parameters that `fully_shard` cuts by parts (`FusedShard`), of each of which every rank has a chunk."""
from __future__ import annotations

from collections import Counter

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.checkpoint import load, save
from ms_dtensor.errors import LayoutError
from ms_dtensor.optim import clip_grad_norm_
from tests.cases import case
from tests.operands import filled
from tests.rehearsal.session import rehearsed
from tests.sharding.support import data_mesh, own_rows, sharded
from tests.support import added, array, counted, crossed, each, equal, equal_each, refusal, shared_folder
from tests.tiers import sampled

QKV, W13 = (16, 8, 8), (24, 24)
PARTS = {sum(parts): md.FusedShard(0, parts) for parts in (QKV, W13)}
FEW, MANY = 10, 1280  # columns: rows that 4 ranks do not divide, packed; and enough for the backend's windows
WAYS = {"given back": {}, "kept": {"reshard_after_forward": False}, "neighbours": {"reshard_after_forward": 2}}
GATHERED = {"given back": 2, "kept": 1, "neighbours": 2}


def cut_up(x, widths):
    """Columns side by side; not `mint.split`, whose backward on a CPU takes what `cat` leaves for dense memory."""
    return [mint.narrow(x, 1, sum(widths[:i]), n).contiguous() for i, n in enumerate(widths)]


class Block(nn.Cell):
    """Two matrices that are three and two others, one under the other, between two that are not."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = Parameter(Tensor(np.zeros(width, np.float32)), name="norm")
        self.qkv, self.o = nn.Dense(width, sum(QKV)), nn.Dense(QKV[0], width, has_bias=False)
        self.w13, self.w2 = nn.Dense(width, sum(W13), has_bias=False), nn.Dense(W13[0], width, has_bias=False)

    def construct(self, x):
        q, k, v = cut_up(self.qkv(x * self.norm), QKV)
        x = x + self.o(mint.tanh(q) * mint.cat((k, v), 1))
        gate, up = cut_up(self.w13(x), W13)
        return x + self.w2(mint.tanh(gate) * up)


def net_of(width: int, kind=ms.float32) -> nn.Cell:
    net = filled(nn.SequentialCell(Block(width), Block(width)))
    for p in net.get_parameters():
        value = p.asnumpy() / (width ** 0.5 if p.ndim > 1 else 1)
        p.set_dtype(kind)
        p.set_data(Tensor(value).astype(kind))
    return net


def rows(width: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(8, width)).astype(np.float32)


def by_parts(p):
    return PARTS.get(p.shape[0])


def cut(net, mesh, **how):
    for cell in (*net, net):
        md.fully_shard(cell, mesh=mesh, shard_placement_fn=by_parts, **how)
    return net


def step_of(net):
    return md.value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())


def plain_step(plain, x):
    return ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(Tensor(x))


def as_one_device(net, plain, x, mine, what: str = "", rtol: float = 2e-5, ours: bool = False) -> Counter:
    """Value, gradients, and weights after plain gradient descent.

    Returns what the second of two steps communicated; `ours`: of that what `fully_shard` did.
    """
    for turn in range(2):
        want = plain_step(plain, x)
        with md.comm.record() as events:
            got = step_of(net)(mine)
        equal(got[0], want[0], f"{what}: value {turn}", rtol)
        for p, q, g, w in zip(net.trainable_params(), plain.trainable_params(), got[1], want[1], strict=True):
            assert g.placements == p.placements, (what, p.name, g.placements)
            equal(g, w, f"{what}: gradient of {p.name} {turn}", rtol)
            p.set_data(p - 0.1 * g)
            q.set_data(q - 0.1 * w)
            equal(p, q, f"{what}: {p.name} {turn}", rtol)
    return Counter((e.op, e.phase) for e in events if e.op != "all_gather_object" and (not ours or e.src == "fully_shard"))


@case(world_size=4, timeout=120)
def values_gradients_and_weights_are_those_of_one_device(world):
    @each(crossed((FEW, MANY), WAYS, 2))
    def steps(width, way):
        x, mesh = rows(width), data_mesh(world)
        net = cut(net_of(width), mesh, **WAYS[way])
        w = net[0].qkv.weight
        assert w.placements == (md.FusedShard(0, QKV),) and net[0].o.weight.placements == (md.Shard(0),)
        whole = net_of(width)[0].qkv.weight.asnumpy()
        mine = [whole[at + n // 4 * world.rank:at + n // 4 * (world.rank + 1)] for at, n in zip((0, 16, 24), QKV)]
        assert np.array_equal(w.to_local().asnumpy(), np.concatenate(mine)), "a rank has its rows of each part"
        count = as_one_device(net, net_of(width), x, own_rows(mesh, x), way)
        gathered = count.pop(("all_gather", "forward")) + count.pop(("all_gather", "backward"), 0)
        assert gathered == 2 * GATHERED[way], (way, gathered, count)
        assert count == {("reduce_scatter", "backward"): 2}, (way, count)


@case(world_size=4, timeout=120)
def each_way_to_use_them_is_as_with_single_device(world):
    """float64, copies on an axis, two axes as one, other dtypes of computing and adding up, ZeRO-1, local cells' inputs."""
    x = rows(FEW)

    def in_float64():
        mesh, plain = data_mesh(world), net_of(FEW, ms.float64)
        net = cut(net_of(FEW, ms.float64), mesh)
        as_one_device(net, plain, x.astype(np.float64), own_rows(mesh, x.astype(np.float64)), rtol=1e-12)

    def with_copies():
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut"))
        net = cut(net_of(FEW), mesh)
        assert net[0].qkv.weight.placements == (md.Replicate(), md.FusedShard(0, QKV))
        as_one_device(net, net_of(FEW), x, Tensor(np.array_split(x, 4)[world.rank]))

    def over_two_axes():
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        net = cut(net_of(FEW), mesh["dp", "cp"].flatten("data"))
        w = net[1].w13.weight
        assert w.placements == (md.FusedShard(0, W13),) * 2 and w.shape == (48, FEW) and w.to_local().shape == (12, FEW)
        assert [len(runs) for runs in w.layout.pieces()] == [2, 1]
        as_one_device(net, net_of(FEW), x, Tensor(np.array_split(x, 4)[world.rank]))
        equal(w.redistribute(placements=[md.Replicate(), md.Shard(1)]), array(w), "elsewhere")
        equal((w * 2 + w).sum(0), array(w).sum(0) * 3, "an op")
        other = w.redistribute(placements=[md.Shard(0), md.Shard(0)])
        equal(other.redistribute(placements=w.placements), array(w), "and back")

    def in_16_bits(policy, first):
        mesh = data_mesh(world)
        for width in sampled((FEW, MANY), 2, first):
            data = rows(width)
            whole = net_of(width)
            single = sharded(mp_policy=policy)(whole, mesh, whole)
            net = cut(net_of(width), mesh, mp_policy=policy)
            want, got = (step_of(n)(own_rows(mesh, data)) for n in (single, net))
            assert array(got[0]) == array(want[0]), "the same bits as cut by rows"
            for p, g, w in zip(net.trainable_params(), got[1], want[1], strict=True):
                assert np.array_equal(array(g), array(w)), p.name
            equal(got[0], plain_step(net_of(width), data)[0], rtol=0.02)

    def of_sums_in_16_bits():
        in_16_bits(md.MixedPrecisionPolicy(ms.bfloat16), 0)

    def of_sums_in_32_bits():
        in_16_bits(md.MixedPrecisionPolicy(ms.bfloat16, ms.float32), 1)

    @each(sampled((in_float64, with_copies, over_two_axes, of_sums_in_16_bits, of_sums_in_32_bits), 2))
    def check(way):
        way()


@case(world_size=2)
def devices_join_and_cast_gradients_to_the_bits_of_a_host(world):
    """A host casts each to its place; a device joins them before, where the dtype of sums is another, or casts the sums."""
    x = rows(FEW)
    policies = md.MixedPrecisionPolicy(ms.bfloat16, ms.float32), md.MixedPrecisionPolicy(ms.bfloat16)

    @each(crossed(policies, (by_parts, None), 2))
    def stepped_alike(policy, place):
        def stepped(mesh):
            net = net_of(FEW)
            for cell in (*net, net):
                md.fully_shard(cell, mesh=mesh, shard_placement_fn=place, mp_policy=policy)
            return [array(g).tobytes() for g in step_of(net)(own_rows(mesh, x))[1]]
        want = stepped(data_mesh(world))
        with rehearsed(clock=False):
            got = stepped(data_mesh(world, "npu"))
        assert got == want, [a == b for a, b in zip(got, want, strict=True)]


@case(world_size=4, timeout=120)
def micro_batches_recompute_prefetch_and_clipping(world):
    mesh, x = data_mesh(world), rows(FEW)
    want = plain_step(net_of(FEW), x)
    for how in ({}, {"reshard_after_forward": 2}):
        net = cut(net_of(FEW), mesh, **how)
        net[0].set_modules_to_forward_prefetch([net[1]])
        net[1].set_modules_to_backward_prefetch([net[0]])
        net[0].recompute()
        run, total = step_of(net), None
        for i, part in enumerate(np.array_split(x, 2)):
            net.set_requires_gradient_sync(i == 1)
            with counted() as count:
                _, grads = run(own_rows(mesh, part))
            assert count["reduce_scatter", "backward"] == (2 if i else 0), count
            total = added(total, grads)
        equal_each([g / 2 for g in total], want[1], net.trainable_params(), str(how))
    norm = np.sqrt(sum(float((array(g).astype(np.float64) ** 2).sum()) for g in want[1]))
    clipped = [g / 2 for g in total]
    equal(clip_grad_norm_(clipped, norm / 3), np.float32(norm), "norm")
    equal_each(clipped, [w / 3 for w in want[1]], net.trainable_params(), "clipped")


@case(world_size=4, timeout=120)
def beside_tensor_parallel_ranks_both_cut_the_parts(world):
    """Without being asked: a style's parts are cut further, biases too; where ranks do not divide them, columns are."""
    for width in sampled((FEW, MANY), 2):
        mesh, x = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), rows(width)
        net = net_of(width)
        for block in net:
            md.parallelize_module(block, mesh["tp"], {
                "qkv": md.FusedColwiseParallel(QKV, units=4, use_local_output=False, split_output=False),
                "w13": md.FusedColwiseParallel(W13, units=4, use_local_output=False, split_output=False),
                "o": md.RowwiseParallel(use_local_output=False), "w2": md.RowwiseParallel(use_local_output=False)})
        for cell in (*net, net):
            md.fully_shard(cell, mesh=mesh["dp"])
        for p in (net[0].qkv.weight, net[0].qkv.bias):
            assert p.placements == (md.FusedShard(0, QKV),) * 2 and "16+8+8@tp@dp" in repr(p.layout), p
        whole, dp, tp = net_of(width)[0].qkv.weight.asnumpy(), world.rank // 2, world.rank % 2
        mine = [whole[at + n // 2 * tp + n // 4 * dp:][:n // 4] for at, n in zip((0, 16, 24), QKV)]
        assert np.array_equal(net[0].qkv.weight.to_local().asnumpy(), np.concatenate(mine)), "tp cuts first"
        count = as_one_device(net, net_of(width), x, own_rows(mesh["dp"], x), ours=True)
        asked = {("all_gather", "forward"): 2, ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 2}
        assert count == asked, count
    odd = nn.Dense(4, 10)
    md.parallelize_module(odd, mesh["tp"], {"": md.FusedColwiseParallel((6, 4), units=2)})
    md.fully_shard(odd, mesh=mesh["dp"])
    assert odd.weight.placements == (md.Shard(1), md.FusedShard(0, (6, 4))) and odd.bias.placements[0] == md.Replicate()


@case(world_size=4, timeout=120)
def checkpoints_are_read_by_other_numbers_of_ranks(world):
    path = shared_folder() / "saved"
    net = cut(net_of(FEW), data_mesh(world))
    want = {name: array(p) for name, p in net.parameters_dict().items()}
    save(net.state_dict(), path)
    meshes = {"copies": md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut")), "4": data_mesh(world),
              "plain rows": data_mesh(world)}
    for what, mesh in meshes.items():
        again = filled(net_of(FEW), 9)
        for cell in (*again, again):
            md.fully_shard(cell, mesh=mesh, shard_placement_fn=None if what == "plain rows" else by_parts)
        load(again.state_dict(), path)
        for name, p in again.parameters_dict().items():
            assert array(p).tobytes() == want[name].tobytes(), (what, name)
    again = cut(filled(net_of(FEW), 7), data_mesh(world))
    half = path.with_name("by_parts_of_two")
    copies = cut(net_of(FEW), meshes["copies"])
    save(copies.state_dict(), half)
    load(again.state_dict(), half)
    for name, p in again.parameters_dict().items():
        assert array(p).tobytes() == want[name].tobytes(), name


def parts_that_ranks_do_not_divide_are_refused(world):
    mesh = data_mesh(world)
    cell = nn.Dense(6, 12)
    for place, words in (
            (lambda p: md.FusedShard(0, (6, 4, 2)), (
                "parameter 'weight' cannot be cut by parts over 'dp'", "4 does not divide 6, 2",
                "FusedShard(0, (6, 4, 2)) over 4 ranks", "Shard(dim)")),
            (lambda p: md.FusedShard(-1, (4, 2)) if p.ndim == 2 else None, (
                "along dim 0, where a part is one piece of memory",)),
            (lambda p: md.FusedShard(0, (4, 4)), ("The parts are all of the dim.",))):
        text = refusal(lambda place=place: md.fully_shard(cell, mesh=mesh, shard_placement_fn=place), LayoutError)
        assert all(word in text for word in words), text
    md.fully_shard(cell, mesh=mesh, shard_placement_fn=lambda p: md.FusedShard(0, (8, 4)))  # nothing had moved
    assert cell.weight.to_local().shape == (3, 6)
