# SPDX-License-Identifier: Apache-2.0
"""Real ranks: layouts move, gradients are decided in the forward, values are global ones or errors."""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

import ms_dtensor.dispatch.planner as planning
from ms_dtensor import DTensor, Layout, comm, distribute_tensor, value_and_grad
from ms_dtensor.dispatch.dispatcher import clear_cache
from tests.dist.operands import P, R, S, data, placed
from tests.dist.support import check_against_one_device, counted, equal, refusal
from tests.test_shard_kinds import Backwards
from tests.tiers import sampled


def _layouts(ndim: int):
    options = [R, *(S(d) for d in range(ndim))]
    return list(itertools.product(options, repeat=2))


def redistribute_every_pair_value_and_gradient(world, grid):
    for shift, shape in enumerate(((4, 6), (5, 3))):
        x = data(1, *shape)
        weight = data(2, *shape)
        for src, dst in sampled(itertools.product(_layouts(2), repeat=2), 2, shift):
            dx = placed(x, grid, *src)
            dw = placed(weight, grid, *dst)
            value, grad = value_and_grad(lambda t, dst=dst, dw=dw: (t.redistribute(placements=dst) * dw).sum(), 0)(dx)
            equal(dx.redistribute(placements=dst), x, f"{src}->{dst}")
            equal(value, (x * weight).sum(), f"{src}->{dst} value")
            equal(grad, weight, f"{src}->{dst} gradient")


def partial_sources_reduce_and_their_gradient_is_whole(world, grid):
    for shift, shape in enumerate(((4, 6), (5, 3))):
        for axes, dst in sampled(itertools.product(((P, R), (R, P), (P, P), (P, S(0)), (S(1), P)), _layouts(2)), 2, shift):
            layout = Layout(grid, axes, shape)
            locals_ = [data(10 + r, *shape).asnumpy() for r in range(4)]
            whole = np.zeros(shape, np.float32)
            for at in np.ndindex(2, 2):
                box = tuple(slice(a, b) for a, b in layout.local_box(at))
                if all(at[a] == 0 or not p.is_replicate() for a, p in enumerate(axes)):
                    whole[box] += locals_[at[0] * 2 + at[1]][box]
            # replicated axes must hold equal data: take the data of coordinate 0 there
            owner = tuple(0 if axes[a].is_replicate() else c for a, c in enumerate(grid.get_coordinate()))
            box = tuple(slice(a, b) for a, b in layout.local_box(owner))
            mine = Tensor(locals_[owner[0] * 2 + owner[1]][box].copy())
            x = DTensor.from_local(mine, grid, axes, shape=shape)
            w = data(3, *shape)
            equal(x.redistribute(placements=dst), whole, f"{axes}->{dst}")
            dw = placed(w, grid, *dst)
            _, grad = value_and_grad(lambda t, dst=dst, dw=dw: (t.redistribute(placements=dst) * dw).sum(), 0)(x)
            equal(grad, w, f"{axes}->{dst} gradient")


def _mlp(x, w1, w2, g):
    h = x * mint.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * g
    h = mint.nn.functional.silu(mint.nn.functional.linear(h, w1))
    y = x + mint.nn.functional.linear(h, w2)
    return (y * y).mean()


_MLP = [(8, 5, 12), (16, 12), (12, 16), (12,)]


def gradients_of_an_mlp_equal_one_device_in_every_layout(world, grid):
    tensors = [data(20 + i, *s) for i, s in enumerate(_MLP)]
    for x, w1, w2 in sampled(itertools.product(  # 5: no divisor of the 24, so that each way meets each other
            [(S(0), S(1)), (S(0), R), (R, R), (R, S(2))], [(R, S(0)), (S(1), R), (R, R)], [(R, S(1)), (S(0), S(1))]), 5):
        check_against_one_device(_mlp, tensors, [x, w1, w2, (R, R)], grid, f"{x} {w1} {w2}")


def shards_cut_in_a_made_up_way_train_as_one_device(world, grid):
    """Existing rules keep that way; it costs nothing where operands agree, and moves are right where they do not."""
    cut = Backwards

    def step(x, w, b):
        y = mint.transpose(mint.matmul(x, w) + b, 0, 1)
        return (mint.sum(y, 1) * mint.softmax(y, 1)[:, 1]).sum()
    tensors = [data(20 + i, *s) for i, s in enumerate([(5, 7), (7, 3), (5, 3)])]
    for layouts in sampled(itertools.product([(cut(0), R), (S(0), cut(1)), (cut(0), cut(0))], [(R, R), (R, cut(0)), (cut(1), R)],
                                             [(cut(0), R), (R, S(1))]), 5):
        check_against_one_device(step, tensors, layouts, grid, str(layouts))
    count = check_against_one_device(lambda x, w, b: ((x @ w + b) ** 2).sum(), tensors, [(cut(0), R), (R, cut(1)),
                                                                                        (cut(0), cut(1))], grid)
    assert count == {("all_reduce", "backward"): 2}, count  # of x on tp and w on dp
    x = placed(tensors[0], grid, cut(0), R)
    for dst in itertools.product([R, S(0), cut(0), cut(1)], repeat=2):
        equal(x.redistribute(placements=dst), tensors[0], str(dst))
        assert x.redistribute(placements=dst).placements == dst


def a_flipped_face_is_seen(world, grid):
    """The mutation the gradient table must not survive: own face treated as same face."""
    tensors = [data(20 + i, *s) for i, s in enumerate(_MLP)]
    layouts = [(S(0), R), (R, S(0)), (R, S(1)), (R, R)]
    real = planning.choose

    def flipped(*args):
        choice = real(*args)
        return type(choice)(choice.targets, ((),) * len(choice.own), choice.outs, choice.cases)
    clear_cache()
    planning.choose = flipped
    try:
        assert "gradient" in refusal(lambda: check_against_one_device(_mlp, tensors, layouts, grid), AssertionError)
    finally:
        planning.choose = real
        clear_cache()


def readers_of_one_activation_share_one_move(world, line):
    """Its cotangents are added before one reduction; where it was gathered, what goes back is scattered."""
    def flat(x, w):  # as nn.Dense does inside
        return mint.matmul(x.reshape(-1, 8), w.T).reshape(2, 4, 12)

    def qkv(read, gathered):
        def fn(x, *weights):
            x = x * 2
            if gathered and isinstance(x, DTensor):
                x = x.redistribute(placements=[R])
            q, k, v = ((read(x, w) ** 2).sum() for w in weights)
            return q + k + v
        return fn
    weights = [data(31 + i, 12, 8) for i in range(3)]
    for read, x, cut in ((mint.nn.functional.linear, data(30, 8, 8), S(0)), (flat, data(30, 2, 4, 8), S(1))):
        for start, wanted in ((R, {("all_reduce", "backward"): 1}),
                              (cut, {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1})):
            count = check_against_one_device(qkv(read, start is cut), [x, *weights], [[start], *[[S(0)]] * 3], line)
            assert count == wanted, (start, count)


def lookups_in_a_sharded_table_are_masked(world, grid):
    ids = Tensor(np.array([[0, 6, 3], [2, 2, 5]], np.int32))
    table = data(71, 7, 4)
    d_ids = placed(ids, grid, S(0), R)
    for placements in ((R, S(0)), (R, S(1)), (S(0), S(0)), (R, R)):
        d_table = placed(table, grid, *placements)
        got = value_and_grad(lambda t: (ops.gather(t, d_ids, 0) ** 2).sum(), 0)(d_table)
        want = ms.value_and_grad(lambda t: (ops.gather(t, ids, 0) ** 2).sum(), 0)(table)
        equal(got, want, str(placements))


def whose_data_is_the_truth(world, grid):
    mine = data(80 + world.rank, 5, 4)
    equal(distribute_tensor(mine, grid, [S(0), R]), data(80, 5, 4), "coordinate 0's")
    with counted({}):
        own = placed(mine, grid, S(0), R)
    lo, hi = own.layout.local_box()[0]
    equal(own.to_local(), mine.asnumpy()[lo:hi], "its own")


def nothing_outlives_a_step(world, line):
    """Memo entries hold no cycle that keeps activations alive."""
    import gc
    import weakref
    x = placed(data(150, 8, 8), line, R)
    w = placed(data(151, 8, 8), line, S(0))
    seen = []

    def loss(t):
        h = t * 2
        seen.append(weakref.ref(h))
        return (mint.nn.functional.linear(h, w) ** 2).sum()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            value_and_grad(loss, 0)(x)
        assert all(r() is None for r in seen), "an activation is still alive after its step"
    finally:
        gc.enable()
    assert comm.current_world() is not None
