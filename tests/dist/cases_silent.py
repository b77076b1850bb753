# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what a distributed tensor library gets wrong without a word, one case each.

The first line of each case says how a well-known peer answers. We give the one-device answer on every rank, or raise
on every rank.
"""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, comm, distribute_tensor, parallelize_module, value_and_grad
from ms_dtensor.errors import CollectiveMismatch, LayoutError, OpRuleError
from tests.dist.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.dist.support import array, check_against_one_device, counted, equal, refusal, same_on_all_ranks


def counting(*shape: int) -> Tensor:
    """0, 1, 2, ... in a shape."""
    return Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


# -- values ---------------------------------------------------------------------------------------------------------
def item_float_and_int_of_a_partial(world):
    """Peer: each rank returns its own contribution (66 and 210 for 276)."""
    x = placed(counting(24), mesh_1d(), S(0))
    assert x.sum().placements == (P,), "the case is about partial values"
    assert x.sum().item() == 276 and float(x.sum()) == 276 and int(x.sum()) == 276
    assert x.max().item() == 23 and x.min().item() == 0 and x.mean().item() == 11.5
    equal(float((x * x).sum() ** 0.5), np.linalg.norm(np.arange(24)))
    equal(x.norm().item(), np.linalg.norm(np.arange(24)))


def bool_of_a_partial_decides_alike(world):
    """Peer: `bool((x > 20).any())` is False on one rank and True on another, so control flow diverges."""
    x = placed(counting(24), mesh_1d(), S(0))
    for truth, claim in ((True, (x > 20).any()), (True, (x < 1).any()), (False, (x > 0).all()), (True, (x >= 0).all()),
                         (False, (x > 99).any())):
        assert bool(claim) is truth
        same_on_all_ranks(world, "taken" if claim else "not taken")


def equality_asks_the_ranks_of_the_mesh(world):
    """Peer: `equal` all-reduces over the default group, not the mesh's, and waits for ranks that do not take part."""
    mesh = md.DeviceMesh("cpu", [0, 2], mesh_dim_names=("x",))
    if world.rank in mesh.rank_list:
        a = counting(5, 2)
        b = a.asnumpy().copy()
        b[4, 1] = -1  # differs in the last shard only
        with comm.record() as events:
            same, other = placed(a, mesh, S(0)), placed(Tensor(b), mesh, S(0))
            for fn in (lambda x, y: bool((x == y).all()), lambda x, y: bool(mint.equal(x, y))):
                assert fn(same, same) is True and fn(same, other) is False
        assert events and {e.group for e in events} == {(0, 2)}, events


# -- writes ---------------------------------------------------------------------------------------------------------
def a_write_through_a_view_reaches_its_siblings_or_raises(world, line):
    """A sibling that is a copy here: `c = x[2:7]` was gathered, `x[:, 1:3][:] = -1` writes into the storage of `x`."""
    x = distribute_tensor(data(1, 8, 5), line, [S(0)])
    c = x[2:7]
    before = array(c).copy()
    try:
        x[:, 1:3][:] = -1
    except OpRuleError:
        assert np.array_equal(array(x), array(data(1, 8, 5))) and np.array_equal(array(c), before)
    else:
        assert np.array_equal(array(c), array(x)[2:7])
    del c
    x[:, 1:3][:] = -1
    assert (array(x)[:, 1:3] == -1).all()
    scalar = x[3, 3].clone()
    scalar[...] = 7.0
    assert scalar.shape == () and scalar.item() == 7.0


# -- kernels --------------------------------------------------------------------------------------------------------
def cross_entropy_with_uneven_counts(world, line):
    """Peer: the mean of the shards' means, wrong where shards count differently (ignore_index, class weights)."""
    logits = data(5, 8, 5)
    labels = Tensor(np.array([0, -100, -100, -100, 4, 3, -100, 1], np.int32))
    few = Tensor(np.array([0, 1, -100, -100, -100, -100, -100, -100], np.int32))  # three of four ranks count nothing
    weight = Tensor(np.array([0.1, 5, 1, 2, 0.5], np.float32))
    for y, rows, use in itertools.product((labels, few), (8, 7), (False, True)):
        x, y = Tensor(logits.asnumpy()[:rows]), Tensor(y.asnumpy()[:rows])

        def loss(t, labels, weight, use=use):
            return ops.cross_entropy(t, labels, weight if use else None, ignore_index=-100)
        want = ms.value_and_grad(loss, 0)(x, y, weight)
        got = value_and_grad(loss, 0)(placed(x, line, S(0)), placed(y, line, S(0)), placed(weight, line, R))
        equal(got, want, f"weights {use}, {rows} rows")


# -- entering and leaving -------------------------------------------------------------------------------------------
def local_tensors_of_uneven_shards(world, line):
    """Peer: each rank believes in a global shape of its own."""
    rows = (3, 3, 2, 0)[world.rank]
    whole = data(6, 8, 4)  # 8 rows on 4 ranks are 2, 2, 2, 2
    mine = Tensor(whole.asnumpy()[:rows])
    for kwargs in ({"run_check": True}, {"run_check": True, "shape": (8, 4)}):
        same_on_all_ranks(world, refusal(lambda: DTensor.from_local(mine, line, [S(0)], **kwargs), LayoutError))
    nine = data(7, 9, 4)
    lo, hi = min(3 * world.rank, 9), min(3 * world.rank + 3, 9)
    good = DTensor.from_local(Tensor(nine.asnumpy()[lo:hi]), line, [S(0)], shape=(9, 4), run_check=True)
    equal(good, nine)
    unchecked = DTensor.from_local(mine, line, [S(0)])
    for use in (lambda t: t.full_tensor(), lambda t: t.redistribute(placements=[S(1)])):
        refusal(lambda: use(unchecked), CollectiveMismatch)


def layouts_that_differ(world, line):
    """Peer: each rank cuts by its own, and rows are taken together that are none of one tensor's."""
    odd = world.rank == 2
    for one, other in ((S(0), S(1)), (md.FusedShard(0, (8, 8)), md.FusedShard(0, (4, 12))), (S(0), md.FusedShard(0, (8, 8)))):
        how = other if odd else one
        refusal(lambda: distribute_tensor(data(8, 16, 16), line, [how]), CollectiveMismatch)
        refusal(lambda: md.fully_shard(nn.Dense(16, 16, has_bias=False), mesh=line, shard_placement_fn=lambda p: how),
                CollectiveMismatch)


def cells_laid_out_in_another_order(world):
    """Equal shapes, so nothing else tells that one rank's second cell would get the first values of the other's first."""
    for apply in (lambda c: md.fully_shard(c, mesh=mesh_1d()), lambda c: md.replicate(c, mesh=mesh_1d())):
        cells = nn.CellList([nn.Dense(16, 16, has_bias=False) for _ in range(2)])
        refusal(lambda: apply(cells[world.rank == 2]), CollectiveMismatch)


# -- styles ---------------------------------------------------------------------------------------------------------
def a_fused_qkv_is_split_globally(world, line):
    """Peer: the weight is cut contiguously, so a rank's local output is all of q and half of k, unsaid."""
    x = data(11, 3, 8)
    weight, out = data(12, 24, 8), data(13, 8, 8)

    def attention(t, w, o):
        q, k, v = mint.split(mint.nn.functional.linear(t, w), 8, -1)
        return (mint.nn.functional.linear(mint.softmax(q * k, -1) * v, o) ** 2).sum()
    count = check_against_one_device(attention, [x, weight, out], [[R], [S(0)], [S(1)]], line, "fused qkv")
    assert sum(count.values()) > 1, "the split of a contiguous cut has to move data, and says so"
    assert "contiguous" in ColwiseParallel.__doc__ and "fused" in ColwiseParallel.__doc__
    layer = mint.nn.Linear(8, 24, bias=False)
    layer.weight.set_data(weight)
    local = parallelize_module(layer, line, ColwiseParallel())(x)
    equal(local, ops.matmul(x, weight.T).asnumpy()[:, 6 * world.rank:6 * world.rank + 6], "documented: a contiguous piece")


# -- communication and gradients ------------------------------------------------------------------------------------
def a_partial_used_three_times_is_reduced_once(world, line):
    """Peer: three all-reduces, no memo."""

    def three(t):
        p = (t * 2).sum(0)
        return (mint.exp(p) + mint.sin(p) * mint.cos(p)).sum()
    count = check_against_one_device(three, [data(17, 8, 4)], [[S(0)]], line)
    assert sum(n for (_, phase), n in count.items() if phase == "forward") == 1, count


def whole(x):
    """The sum of the summands, made here and nowhere else; a plain tensor as it is."""
    return x.reduce_partial() if isinstance(x, DTensor) else x


def lora_under_row_parallel_weights_is_one_all_reduce(world):
    """x W^T + (x A^T) B^T: what A gives is a summand, and so is what B makes of it."""
    x, w, a, b = data(1, 6, 8), data(2, 5, 8), data(3, 3, 8), data(4, 5, 3)

    def lora(x, w, a, b):
        return (whole(mint.matmul(x, w.t()) + 2.0 * mint.matmul(mint.matmul(x, a.t()), b.t())) ** 3).mean()
    for mesh, extra in ((mesh_1d(), []), (mesh_2d(), [S(0)])):
        rest = [R] * len(extra)
        layouts = [[*extra, S(1)], [*rest, S(1)], [*rest, S(1)], [*rest, R]]
        count = check_against_one_device(lora, [x, w, a, b], layouts, mesh, f"lora on {mesh}")
        assert {k: n for k, n in count.items() if k[1] == "forward"} == {("all_reduce", "forward"): 1}, count
    inputs = [placed(v, mesh, *p) for v, p in zip((x, w, a, b), layouts, strict=True)]
    with counted({}):
        mid = mint.matmul(inputs[0], inputs[2].t())
        out = mint.matmul(mid, inputs[3].t())
    assert mid.placements == out.placements == (S(0), P)


def a_chain_of_products_keeps_the_summand(world, line):
    x, ws = data(1, 4, 8), [data(2, 8, 8), data(3, 8, 6), data(4, 6, 5)]

    def chain(x, *ws):
        for w in ws:
            x = mint.matmul(x, w)
        return (whole(x) ** 2).mean()
    layouts = [[S(1)], [S(0)], [R], [R]]
    count = check_against_one_device(chain, [x, *ws], layouts, mesh_1d(), "chain")
    assert {k: n for k, n in count.items() if k[1] == "forward"} == {("all_reduce", "forward"): 1}, count
    p = DTensor.from_local(x, line, [P])  # every rank's summand is x
    with counted({}):
        out = mint.matmul(mint.matmul(p, placed(ws[0], line, R)), placed(ws[1], line, R))
    assert out.placements == (P,)
    equal(out, 4 * mint.matmul(mint.matmul(x, ws[0]), ws[1]))
    both = DTensor.from_local(x.t(), line, [P])
    equal(mint.matmul(p, both), 16 * mint.matmul(x, x.t()))  # not the sum of the summands' products, 4 of them


def losses_of_micro_steps_add_up(world):
    """At every step the sum is a DTensor of the same layout, and its gradient is that of the sum."""
    xs, w = [data(i, 8, 6) for i in range(5)], data(9, 6, 4)

    def total(w, *xs):
        loss = 0.0
        for x in xs:
            micro = (mint.matmul(x, w) ** 2).mean()
            loss += micro
            if isinstance(w, DTensor):
                assert isinstance(loss, DTensor) and loss.shape == (), type(loss)
        return loss / len(xs)
    for mesh, x_lies, w_lies in ((mesh_1d(), [R], [S(1)]), (mesh_1d(), [S(0)], [R]), (mesh_2d(), [S(0), R], [R, S(1)])):
        check_against_one_device(total, [w, *xs], [w_lies, *[x_lies] * 5], mesh, str(x_lies))
        parts = [placed(t, mesh, *p) for t, p in ((w, w_lies), *((x, x_lies) for x in xs))]
        with counted() as five:
            ms.value_and_grad(total)(*parts)
        with counted() as one:
            ms.value_and_grad(total)(*parts[:2])
        forward = five["all_reduce", "forward"], one["all_reduce", "forward"]
        assert forward[0] <= 5 * forward[1], (five, one)
        equal(total(*parts), total(w, *xs))
