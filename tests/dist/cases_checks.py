# SPDX-License-Identifier: Apache-2.0
"""`debug.checks()` on real ranks: a false claim that a value is replicated is found, on all ranks alike."""
from __future__ import annotations

import mindspore as ms

import ms_dtensor as md
from ms_dtensor import DTensor, comm, distribute_tensor, local_map, value_and_grad
from ms_dtensor.debug import checks
from ms_dtensor.errors import LayoutError
from tests.dist.operands import P, R, S, data, mesh_2d
from tests.dist.support import counted, equal, refusal, same_on_all_ranks


def a_false_claim_of_replicas_is_found_inside_checks(world):
    mesh = mesh_2d()  # dp=2, tp=2
    x, whole = data(1, 8, 4), [R, R]
    dx = distribute_tensor(x, mesh, [S(0), S(1)])
    tp, everyone = mesh.get_group("tp"), mesh.get_group()
    claims = {
        "dp, tp": [lambda a: a.sum(), lambda a: a.argmax(), lambda a: a.sum() > 0,
                   lambda a: a * 0 + float("nan") if world.rank == 2 else a * 0],
        "dp": [lambda a: tp.all_reduce(a.sum(), "sum"), lambda a: a[0] * 0 + world.rank // 2],
        "tp": [lambda a: a[:, 0] * 0 + world.rank % 2],
    }
    for axes, functions in claims.items():
        for fn in functions:
            fn.__name__ = "claims"
            local_map(fn, whole, ([S(0), S(1)],))(dx)  # as in PyTorch: outside the caller is believed
            for grad in (False, True):
                mapped = local_map(lambda a, fn=fn: (a * 2, fn(a)), ([S(0), S(1)], whole), ([S(0), S(1)],))
                with checks():
                    text = refusal(lambda: value_and_grad(lambda t: mapped(t)[0].sum(), 0)(dx) if grad else mapped(dx), LayoutError)
                assert "result 1" in text and any(f"'{a}'" in text for a in axes.split(", ")) and text.count("\n") >= 3, text
                same_on_all_ranks(world, text)
    with checks():  # ranks do not even agree on the shape
        same_on_all_ranks(world, refusal(
            lambda: local_map(lambda a: a[:world.rank // 2 + 1, 0], whole, ([S(0), S(1)],))(dx), LayoutError))
    with counted() as count, comm.record() as events, checks(), md.redistribution_policy("explicit"):
        total = local_map(lambda a: everyone.all_reduce(a.sum(), "sum"), whole, ([S(0), S(1)],))(dx)
    equal(total, x.sum())
    assert count == {("all_reduce", "forward"): 1, ("all_gather_object", "forward"): 1}, count
    told = [e for e in events if e.op == "all_gather_object"]
    assert told[0].dst == "debug.checks()" and not told[0].implicit
    with checks():  # rounding is no lie; summands and pieces claim nothing
        local_map(lambda a: a * 0 + 3 * (1 + world.rank * 1e-7), whole, ([S(0), S(1)],))(dx)
        local_map(lambda a: a.sum(), [P, P], ([S(0), S(1)],))(dx)
        local_map(lambda a: a * world.rank, [S(0), S(1)], ([S(0), S(1)],))(dx)


def from_local_inside_checks_compares_replicas(world, grid):
    mine = data(world.rank, 4, 2)
    for placements, axis in (([R, R], "dp"), ([S(0), R], "tp"), ([R, P], "dp"), ({"tp": S(1)}, "dp")):
        DTensor.from_local(mine, grid, placements)
        with checks():
            text = refusal(lambda: DTensor.from_local(mine, grid, placements), LayoutError)
        assert f"'{axis}'" in same_on_all_ranks(world, text), text
    with checks(), counted() as count:
        DTensor.from_local(mine, grid, [S(0), P])
        assert DTensor.from_local(data(1, 4, 2), grid, [R, R]).layout.is_replicated()
        for kind in (ms.float16, ms.bfloat16, ms.int32, ms.bool_):
            DTensor.from_local(data(1, 4, 2).astype(kind), grid, [R, R])
        value_and_grad(lambda t: DTensor.from_local(t * 2, grid, [R, R]).sum(), 0)(data(1, 4, 2))
    assert count == {("all_gather_object", "forward"): 6 + 7}, count  # what replicas hold, and all shards' shapes
    for kind in (ms.float16, ms.bfloat16, ms.int32, ms.bool_):
        other = (mine > 0) if kind is ms.bool_ else (mine * 3).astype(kind)
        with checks():
            same_on_all_ranks(world, refusal(lambda: DTensor.from_local(other, grid, [R, R]), LayoutError))
