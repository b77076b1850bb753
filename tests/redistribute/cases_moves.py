# SPDX-License-Identifier: Apache-2.0
"""Real ranks: layouts move, between meshes and asynchronously, too, and send what the textbook says; gradients are decided in
the forward; values are global ones or errors.
"""
import itertools
import os
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DeviceMesh, DTensor, Layout, SkipDTensorDispatch, comm, distribute_tensor, value_and_grad
from ms_dtensor.errors import MeshError, RedistributeError
from ms_dtensor.redistribute.plan import plan
from ms_dtensor.tensor.dtensor import AsyncDTensor
from tests.core.test_shard_kinds import Backwards
from tests.msrun import REPORTS
from tests.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import check_against_one_device, counted, equal, refusal, refused_alike
from tests.tiers import sampled


def bytes_sent_are_those_of_the_plan(world):
    engine = comm.get_backend()._engine
    moves = set()
    for mesh in (mesh_1d(), mesh_2d()):
        options = [R, P, S(0), S(1)]
        for src, dst in itertools.product(itertools.product(options, repeat=mesh.ndim),
                                          itertools.product([R, S(0), S(1)], repeat=mesh.ndim)):
            a, b = (Layout(mesh, p, (512, 1024)) for p in (src, dst))
            path = plan(a, b)
            sent = [move for move in path if move.kind != "cut"]
            x = DTensor.from_local(data(1, *a.local_shape()), mesh, src)
            comm.group(range(4)).barrier()
            before = engine.sent
            with comm.record() as events:
                x.redistribute(placements=dst)
            if all(move.kind != "exchange" for move in sent):  # in which some ranks have no part
                assert [(e.op, e.bytes) for e in events] == [(move.kind, move.bytes()) for move in sent], path
                assert engine.sent - before == sum(move.bytes() for move in sent), path
            moves |= {(move.kind, len(move.axes)) for move in path}
    assert {kind for kind, _ in moves} >= {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "cut"}
    assert {axes for kind, axes in moves if kind not in ("cut", "exchange")} == {1, 2}, "flattened axes too"


def tensors_move_between_meshes(world):
    """The same ranks in another shape or order, ranks in common, and none; values, gradients, one exchange each."""
    meshes = {"grid": mesh_2d(), "line": mesh_1d(), "turned": DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("x", "y")),
              "first": DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",)), "last": DeviceMesh("cpu", [3, 2], mesh_dim_names=("b",)),
              "three": DeviceMesh("cpu", [1, 2, 3], mesh_dim_names=("c",))}
    x, weight = data(1, 7, 5), data(2, 7, 5)
    engine = comm.get_backend()._engine
    for shift, ((an, a), (bn, b)) in enumerate(itertools.permutations(meshes.items(), 2)):
        for src, dst in sampled(itertools.product((R, S(0), S(1)), repeat=2), 4, shift):
            what = f"{an} {src} -> {bn} {dst}"
            dx = placed(x, a, *[src] * a.ndim)
            dw = placed(weight, b, *[dst] * b.ndim)
            before = engine.sent
            moved = dx.redistribute(b, [dst] * b.ndim)
            sent = engine.sent - before
            if a.get_coordinate() is None:
                assert sent == 0, what
            if b.get_coordinate() is not None:
                here = tuple(slice(lo, hi) for lo, hi in moved.layout.local_box())
                np.testing.assert_array_equal(moved.to_local().asnumpy(), x.asnumpy()[here], err_msg=what)
            _, grad = value_and_grad(lambda t, b=b, dst=dst, dw=dw: (t.redistribute(b, [dst] * b.ndim) * dw).sum(), 0)(dx)
            if a.get_coordinate() is not None:
                equal(grad.to_local(), weight.asnumpy()[tuple(slice(lo, hi) for lo, hi in dx.layout.local_box())], what)


def partial_tensors_move_to_other_meshes(world):
    """Reduced where they are, then moved; ranks outside a mesh call along and hold nothing."""
    meshes = [mesh_1d(), DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",)), DeviceMesh("cpu", [3, 2], mesh_dim_names=("b",)),
              DeviceMesh("cpu", [1, 2, 3], mesh_dim_names=("c",))]
    for a, b in itertools.permutations(meshes, 2):
        mine = data(10 + world.rank, 7, 5) if world.rank in a.rank_list else Tensor(np.zeros((0, 0), np.float32))
        wanted = sum(data(10 + r, 7, 5).asnumpy() for r in a.rank_list)
        x = DTensor.from_local(mine, a, [P], shape=(7, 5))
        for dst in (R, S(0), S(1)):
            moved = x.redistribute(b, [dst])
            if b.get_coordinate() is not None:
                here = tuple(slice(lo, hi) for lo, hi in moved.layout.local_box())
                np.testing.assert_allclose(moved.to_local().asnumpy(), wanted[here], rtol=1e-5, atol=1e-5)
            x.redistribute(a, [dst])


def moves_between_blocks_are_refused_alike(world, grid):
    """A sub-mesh is another set of ranks on each rank: no two ranks would plan the same exchange."""
    block, x = md.init_device_mesh("cpu", (2,), mesh_dim_names=("block",)), data(1, 7, 5)
    twin = DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))  # what ranks 2 and 3 have as grid["tp"], spelled out
    blocks = [grid["dp"], grid["tp"], block]
    for a, b in itertools.permutations((*blocks, grid, twin), 2):
        if not any(a is m or b is m for m in blocks):
            continue
        dx = placed(x, a, *[S(0), R][:a.ndim])
        text = refused_alike(world, lambda: dx.redistribute(b, [S(1), R][:b.ndim]), RedistributeError)
        assert "another set of ranks" in text, (a, b, text)
    whole = grid["dp", "tp"].flatten("all")  # a sub-mesh of all ranks is one mesh
    equal(placed(x, whole, S(0)).redistribute(grid, [S(1), S(0)]), x)
    last = placed(x, twin, S(0)).redistribute(DeviceMesh("cpu", [0, 1]), [S(1)])
    if world.rank < 2:
        equal(last, x)


def a_mesh_is_made_from_groups_one_per_axis(world):
    for ranks, names in (([[0, 1], [2, 3]], ("dp", "tp")), ([[3, 0], [1, 2]], ("x", "y")), ([[[2], [0]], [[1], [3]]], "abc")):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(names))
        groups = [mesh.get_group(name) for name in names]
        assert DeviceMesh.from_group(groups, "cpu", mesh_dim_names=tuple(names)) == mesh
    one = DeviceMesh.from_group([mesh_2d().get_group("tp")], "cpu", mesh_dim_names=("tp",))
    assert one == mesh_2d()["tp"]
    assert "'mesh'" in refusal(  # ranks instead of groups, and no mesh
        lambda: DeviceMesh.from_group([(0, 1), (0, 2)], "cpu", mesh_dim_names=("dp", "tp")), MeshError)


def a_cut_shares_nothing_with_the_replica(world, grid):
    for shape in ((1,), (1, 3), (3, 1), (4, 3)):
        for src, dst in itertools.product(itertools.product((R, S(0)), repeat=2), itertools.product((R, S(0)), repeat=2)):
            x = placed(data(3, *shape), grid, *src)
            if (y := x.redistribute(placements=dst)) is not x:
                y[:] = 9.0
                equal(x, data(3, *shape), f"{shape} {src} -> {dst}")


def strided_indices_of_nothing_have_gradients(world, line):
    index = (slice(None), slice(0, 3, 2))
    none = (slice(1, 1, 2),)
    for shape, at in (((0, 3), index), ((3, 4), none), ((0, 3), none), ((3, 0), (slice(0, 3, 2),))):
        for placement in (R, S(0), S(1)):
            x = placed(data(4, *shape), line, placement)
            value, grad = value_and_grad(lambda t, at=at: (t[at] * t[at]).sum() + (t * t).sum())(x)
            equal(grad, 2 * data(4, *shape).asnumpy(), f"{shape} {at}")
            equal(x[at], data(4, *shape).asnumpy()[at], f"{shape} {at}")


def cumulative_sums_of_nothing_end_no_process(world, line):
    for shape, d in itertools.product(((1, 0), (0, 1), (3, 0)), (0, 1)):
        for placement, fn in sampled(itertools.product((R, S(0), S(1)), (Tensor.cumsum, mint.cumsum, ops.cumsum)), 2, d):
            x = placed(data(5, *shape), line, placement)
            value, grad = value_and_grad(lambda t, fn=fn, d=d: fn(t, d).sum() + (t * t).sum())(x)
            equal(value, np.zeros(()), f"{shape} {d} {fn}")
            assert grad.shape == shape and fn(x, d).shape == shape, (grad, shape)


def pending(x, placements):
    return x.redistribute(placements=placements, async_op=True)


def values_gradients_and_counts_are_those_of_the_plain_call(world, grid):
    x, weight = data(1, 5, 6), data(2, 5, 6)
    options = [R, S(0), S(1)]
    for src, dst in itertools.product(itertools.product(options, repeat=2), repeat=2):
        dx = placed(x, grid, *src)
        dw = placed(weight, grid, *dst)
        with comm.record() as plain:
            dx.redistribute(placements=dst)
        with comm.record() as later:
            moved = pending(dx, dst)
        assert [(e.op, e.bytes) for e in plain] == [(e.op, e.bytes) for e in later]
        equal(moved, x, f"{src}->{dst}")
        _, grad = value_and_grad(lambda t, dst=dst, dw=dw: (pending(t, dst) * dw).sum(), 0)(dx)
        equal(grad, weight, f"{src}->{dst} gradient")


def the_call_returns_before_the_others_have_come(world, line):
    x = DTensor.from_local(data(3 + world.rank, 300, 200), line, [P])
    wanted = sum(data(3 + r, 300, 200).asnumpy().astype(np.float64) for r in range(4))
    uses = {"to_local": lambda t: t.to_local().asnumpy(), "asnumpy": lambda t: t.asnumpy(), "op": lambda t: (t + 0).asnumpy(),
            "other operand": lambda t: (0 + t).asnumpy(), "index": lambda t: t[0:300].asnumpy(),
            "full": lambda t: t.full_tensor().asnumpy(), "copy": lambda t: t.clone().asnumpy(),
            "redistribute": lambda t: t.redistribute(placements=[S(1)]).full_tensor().asnumpy()}
    for what, use in uses.items():
        returned = Path(os.environ[REPORTS], f"returned from {what}")  # a byte of each rank; no messages, which calls block
        while world.rank == 0 and not (returned.exists() and returned.stat().st_size == 3):
            time.sleep(0.01)
        y = pending(x, [R])
        if world.rank:
            with open(returned, "ab") as file:
                file.write(b".")
        assert type(y) is AsyncDTensor and y.shape == (300, 200) and y.placements == (R,) and y.device_mesh is line
        assert type(y) is AsyncDTensor, "what is known without the data does not wait"
        np.testing.assert_allclose(use(y), wanted, rtol=1e-4, atol=1e-4, err_msg=what)
        assert type(y) is DTensor, what


def calls_keep_their_order(world, line):
    xs = [DTensor.from_local(data(9 + world.rank + k, 64, 4 << k), line, [P]) for k in range(6)]
    ys = [pending(x, [S(k % 2)]) for k, x in enumerate(xs)]
    now = xs[0].redistribute(placements=[R])
    for k in reversed(range(6)):
        equal(ys[k], sum(data(9 + r + k, 64, 4 << k).asnumpy() for r in range(4)), str(k))
    equal(now, sum(data(9 + r, 64, 4).asnumpy() for r in range(4)))
    z = pending(xs[0], [R])
    with SkipDTensorDispatch():
        local = (z * 1).asnumpy()
    equal(local, now)


def moves_without_communication_are_done_at_once(world, line):
    whole = placed(data(5, 8, 8), line, R)
    assert type(pending(whole, [S(0)])) is DTensor
    assert pending(whole, [R]) is whole


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


def whose_data_is_the_truth(world, grid):
    mine = data(80 + world.rank, 5, 4)
    equal(distribute_tensor(mine, grid, [S(0), R]), data(80, 5, 4), "coordinate 0's")
    for placement in (S(0), S(1), R):
        equal(distribute_tensor(mine, mesh_1d(), [placement], src_data_rank=1), data(81, 5, 4), "rank 1's")
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


def a_tensor_of_a_sub_mesh_comes_to_its_root_as_the_error_says(world, grid):
    a, b = data(1, 5, 3), data(2, 5, 3)
    x, y = placed(a, grid, S(0), R), placed(b, grid["dp"], S(0))
    text = refusal(lambda: x * y)
    assert "distribute_tensor(t, mesh, {'dp': Shard(0)})" in text, text
    assert "DTensor.from_local(x.to_local(), mesh, {'dp': Shard(0)}, shape=x.shape)" in text, text

    def loss(y):
        return (x * DTensor.from_local(y.to_local(), grid, {"dp": S(0)}, shape=y.shape)).exp().sum()
    with counted({}):
        got = ms.grad(loss)(y)
    equal(got, ms.grad(lambda t: (a * t).exp().sum())(b))
