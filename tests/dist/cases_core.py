# SPDX-License-Identifier: Apache-2.0
"""Real ranks: layouts move, gradients are decided in the forward, values are global ones or errors."""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor.dispatch.planner as planning
from ms_dtensor import DTensor, Layout, comm, distribute_tensor, value_and_grad
from ms_dtensor.dispatch.dispatcher import clear_cache
from tests.cases import case
from tests.dist.operands import P, R, S, data, mesh_1d, placed
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


def other_meshes_are_ordinary_targets(world, grid):
    b = mesh_1d(4, "x")
    from ms_dtensor import DeviceMesh
    c = DeviceMesh("cpu", [3, 1], mesh_dim_names=("y",))
    x = data(5, 7, 6)
    dx = placed(x, grid, S(0), S(1))
    equal(dx.redistribute(b, [S(0)]), x)
    on_c = dx.redistribute(c, [S(1)])
    if world.rank in (1, 3):
        equal(on_c.to_local(), x.asnumpy()[:, :3] if world.rank == 3 else x.asnumpy()[:, 3:])
    else:
        assert on_c.to_local().shape == (0, 0)


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


def successive_steps_and_idle_forwards_keep_gradients(world, grid):
    tensors = [data(20 + i, *s) for i, s in enumerate(_MLP)]
    _, wanted = ms.value_and_grad(_mlp, (1, 2, 3))(*tensors)
    dx = placed(tensors[0], grid, S(0), S(1))
    layouts = [(R, S(0)), (R, S(1)), (R, R)]
    params = [Parameter(placed(t, grid, *p), name=f"p{i}")
              for i, (t, p) in enumerate(zip(tensors[1:], layouts))]

    def loss(x):
        return _mlp(x, *params)
    step = ms.value_and_grad(loss, None, params)  # MindSpore's own, unmodified
    for round_ in range(3):
        if round_ == 1:
            loss(dx)  # a forward that no backward follows
        _, grads = step(dx)
        for p, g, w in zip(params, grads, wanted):
            assert type(g) is DTensor and g.layout is p.layout.gradient()
            equal(g, w, f"round {round_} {p.name}")


def recompute_gives_the_same_gradients(world, grid):

    class Block(nn.Cell):
        def __init__(self, params):
            super().__init__()
            self.w1, self.w2, self.g = params

        def construct(self, x):
            h = x * mint.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.g
            return x + mint.nn.functional.linear(mint.nn.functional.silu(mint.nn.functional.linear(h, self.w1)), self.w2)
    tensors = [data(20 + i, *s) for i, s in enumerate(_MLP)]

    def plain(x, *w):
        return (Block.construct(type("B", (), dict(zip(("w1", "w2", "g"), w)))(), x * 2) ** 2).mean()
    _, wanted = ms.value_and_grad(plain, (0, 1, 2, 3))(*tensors)
    dx = placed(tensors[0], grid, S(0), S(1))
    params = [Parameter(placed(t, grid, *p), name=f"p{i}")
              for i, (t, p) in enumerate(zip(tensors[1:], [(R, S(0)), (R, S(1)), (R, R)]))]
    block = Block(params)
    got = value_and_grad(lambda x: (ms.recompute(block, x * 2) ** 2).mean(), 0, params)(dx)[1]
    equal(got[0], wanted[0], "input")
    equal(got[1], wanted[1:], "parameter")


def readers_of_one_activation_share_one_reduction(world, line):
    tensors = [data(30, 4, 8), *(data(31 + i, 12, 8) for i in range(3))]

    def qkv(x, *weights):
        x = x * 2
        q, k, v = ((mint.nn.functional.linear(x, w) ** 2).sum() for w in weights)
        return q + k + v
    count = check_against_one_device(qkv, tensors, [[R], [S(0)], [S(0)], [S(0)]], line)
    assert count == {("all_reduce", "backward"): 1}, count


def gathered_activations_reduce_scatter_back(world, line):
    tensors = [data(30, 8, 8), *(data(31 + i, 12, 8) for i in range(3))]

    def qkv(x, *weights):
        x = (x * 2)
        x = x.redistribute(placements=[R]) if isinstance(x, DTensor) else x
        q, k, v = ((mint.nn.functional.linear(x, w) ** 2).sum() for w in weights)
        return q + k + v
    count = check_against_one_device(qkv, tensors, [[S(0)], [S(0)], [S(0)], [S(0)]], line)
    assert count == {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}, count


def readers_that_reshape_share_it_too(world, line):
    tensors = [data(30, 2, 4, 8), *(data(31 + i, 12, 8) for i in range(3))]

    def qkv(gathered):
        def fn(x, *weights):
            x = x * 2
            if gathered and isinstance(x, DTensor):
                x = x.redistribute(placements=[R])
            flat = [mint.matmul(x.reshape(-1, 8), w.T).reshape(2, 4, 12) for w in weights]  # as nn.Dense does inside
            q, k, v = ((f ** 2).sum() for f in flat)
            return q + k + v
        return fn
    count = check_against_one_device(qkv(False), tensors, [[R], [S(0)], [S(0)], [S(0)]], line)
    assert count == {("all_reduce", "backward"): 1}, count
    count = check_against_one_device(qkv(True), tensors, [[S(1)], [S(0)], [S(0)], [S(0)]], line)
    assert count == {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}, count


def a_leaf_used_twice_gets_both_gradients(world, grid):
    tensors = [data(40, 6, 8), data(41, 8, 8)]

    def twice(x, w):
        return (mint.matmul(mint.nn.functional.silu(mint.matmul(x, w)), w) ** 2).mean()
    check_against_one_device(twice, tensors, [(S(0), R), (R, R)], grid)


def losses_of_any_layout_are_seeded_right(world, line):
    x = data(60, 6, 4)
    dx = placed(x, line, S(0))
    for fn in (lambda t: (t * t).sum(), lambda t: (t * t).mean(), lambda t: (t * t).sum(1), lambda t: mint.max(t)):
        grad = value_and_grad(fn, 0)(dx)[1]
        equal(grad, ms.grad(fn)(x))


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


def to_local_gives_and_takes_in_the_right_layout(world, line):
    x = data(140, 8, 4)

    def through_local(t):
        local = t.to_local(grad_placements=[P]) if isinstance(t, DTensor) else t
        # each rank uses the replicated value for other rows: its cotangent is partial
        if isinstance(t, DTensor):
            rows = mint.narrow(local, 0, 2 * line.get_rank(), 2)
            return DTensor.from_local((rows * rows).sum().reshape(1), line, [S(0)]).sum()
        return (local * local).sum()
    dx = placed(x, line, R)
    value, grad = value_and_grad(lambda t: through_local(t * 1.0), 0)(dx)
    equal(value, (x * x).sum())
    equal(grad, x * 2)


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


@case(2)
def truth_values_are_looked_up_where_they_are_cut(world):
    """A rank has those of its rows; nobody adds up truth values, so whether any rank has one is asked."""
    mesh, at = mesh_1d(world.size, "tp"), np.array([4, 0, 4, 1])
    rows = np.random.default_rng(3).random((5, 4)) > 0.5
    ways = {"x[i]": lambda x, i: x[i], "x[i, i]": lambda x, i: x[i, i - 1], "embedding": lambda x, i: ops.gather(x, i, 0),
            "along": lambda x, i: mint.gather(x, 0, i.reshape(1, 4)), "sum": lambda x, i: mint.sum(x, 0, dtype=ms.bool_),
            "scatter_nd": lambda x, i: ops.scatter_nd(i[:, None].astype(ms.int32), x[:4], (5, 4)) & (i.sum() > 0)}
    for name, look in ways.items():
        wanted = look(Tensor(rows), Tensor(at))
        got = look(distribute_tensor(Tensor(rows), mesh, [S(0)]), distribute_tensor(Tensor(at), mesh, [R]))
        assert got.dtype == ms.bool_ and np.array_equal(got.full_tensor().asnumpy(), wanted.asnumpy()), name
