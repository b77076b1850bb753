# SPDX-License-Identifier: Apache-2.0
"""Real ranks: every single move sends what the textbook says it must, between meshes and asynchronously, too."""
import itertools
import os
import time
from pathlib import Path

import numpy as np
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DeviceMesh, DTensor, Layout, SkipDTensorDispatch, comm, value_and_grad
from ms_dtensor.errors import MeshError, RedistributeError
from ms_dtensor.redistribute.plan import plan
from ms_dtensor.tensor.dtensor import AsyncDTensor
from tests.dist.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.dist.support import equal, refusal, refused_alike
from tests.msrun import REPORTS
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
