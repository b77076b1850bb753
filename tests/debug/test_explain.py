# SPDX-License-Identifier: Apache-2.0
"""`explain` on layouts: the strip, word for word; the naive plan is a right one, and cheaper only where it holds more."""
import itertools
from textwrap import dedent

import numpy as np
import pytest
from mindspore import Tensor

from ms_dtensor import DeviceMesh, Layout, Partial, Replicate, Shard, comm, distribute_tensor, init_device_mesh
from ms_dtensor.debug import explain
from ms_dtensor.debug.plans import _peak, naive, plan_text
from ms_dtensor.errors import ConfigError
from ms_dtensor.redistribute.plan import cost, plan
from tests.pure.test_plan import arrives, layouts, mesh_of

R, S, P = Replicate(), Shard, Partial()


def test_the_strip_shows_moves_bytes_and_memory_beside_the_naive_way(capsys):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    explain(Layout(mesh, [P, S(0)], (4096, 1024)), [S(0), S(1)])
    assert capsys.readouterr().out == dedent("""\
        f32[4096@tp, 1024]{sum: dp} -> f32[4096@dp, 1024@tp] on mesh(dp=2, tp=2)
        plan                             holds    sends     cost
          f32[4096@tp, 1024]{sum: dp}  8.0 MiB
          | reduce_scatter(dp)                  4.0 MiB  1.07 ms
          f32[4096@tp, 1024@dp]        4.0 MiB
          | exchange                            4.0 MiB  1.13 ms
          f32[4096@dp, 1024@tp]        4.0 MiB
          2 moves                               8.0 MiB  2.20 ms
        naive                             holds     sends     cost
          f32[4096@tp, 1024]{sum: dp}   8.0 MiB
          | all_reduce(dp)                        8.0 MiB  2.12 ms
          f32[4096@tp, 1024]            8.0 MiB
          | all_gather(tp)                        8.0 MiB  2.54 ms
          f32[4096, 1024]              16.0 MiB
          | cut(dp)                                   0 B  0.42 ms
          f32[4096@dp, 1024]            8.0 MiB
          | cut(tp)                                   0 B  0.21 ms
          f32[4096@dp, 1024@tp]         4.0 MiB
          4 moves                                16.0 MiB  5.28 ms
        the plan sends 2.0x less, takes 2.4x less, holds 2.0x less
        """)


def test_what_is_there_already_and_what_cannot_be_bettered():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    whole, rows = Layout(mesh, [R], (4, 4)), Layout(mesh, [S(0)], (4, 4))
    assert plan_text(whole, whole) == "f32[4, 4] -> f32[4, 4] on mesh(tp=2)\nnothing to do"
    assert plan_text(rows, whole).endswith("the naive way is the best one")
    other = DeviceMesh("cpu", [1, 0, 2], mesh_dim_names=("x",))
    assert "on mesh(tp=2) -> mesh(x=3)" in plan_text(rows, Layout(other, [S(1)], (4, 4)))


def test_the_naive_plan_is_right_and_cheaper_only_with_more_memory():
    mesh, shape = mesh_of((2, 3)), (5, 7)
    whole = np.random.default_rng(0).normal(size=shape)
    for src, dst in itertools.product(layouts(mesh, shape, ("sum",)), layouts(mesh, shape)):
        moves = naive(src, dst)
        arrives(src, dst, whole, moves)
        best = plan(src, dst)
        if best and _peak(moves) <= _peak(best):
            assert cost(best) <= cost(moves) * (1 + 1e-9), (best, moves)


@pytest.mark.usefixtures("cpu")
def test_a_dtensor_may_be_the_target(capsys):
    with comm.fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        values = Tensor(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
        x = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        y = distribute_tensor(values, mesh, [Shard(1)], src_data_rank=None)
        explain(x, y)
        assert "all_to_all(tp)" in capsys.readouterr().out
        for target in (distribute_tensor(values.T, mesh, [Shard(1)], src_data_rank=None),
                       Layout(mesh, [Shard(0)], (4, 8))):
            with pytest.raises(ConfigError, match="another shape"):
                explain(x, target)
        with pytest.raises(ConfigError, match="a target is a Layout, a DTensor or placements, but got Tensor"):
            explain(x, Tensor([1.0]))


def test_wrong_arguments_are_told():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    with pytest.raises(ConfigError, match="exactly one target"):
        explain(Layout(mesh, [R], (4,)))
    with pytest.raises(ConfigError, match="a Layout, a DTensor or a function"):
        explain(3)
