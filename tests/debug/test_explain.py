# SPDX-License-Identifier: Apache-2.0
"""`explain` on layouts: the strip, word for word; the naive plan is a right one, and cheaper only where it holds more.

Pictures of layouts: every block with its ranks, uneven and empty shards, replicas, many dims.
"""
import itertools
import sys
import types
import xml.etree.ElementTree as ET
from textwrap import dedent

import numpy as np
import pytest
from mindspore import Tensor

from ms_dtensor import DeviceMesh, Layout, Partial, Replicate, Shard, comm, distribute_tensor, init_device_mesh
from ms_dtensor.debug import explain
from ms_dtensor.debug.plans import _peak, naive, plan_text
from ms_dtensor.debug.visualize import plane, visualize_sharding
from ms_dtensor.errors import ConfigError, LayoutError
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


# -- pictures of layouts, which need no MindSpore ----------------------------------------------------------------------
LINE = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


def drawn(layout, **kwargs):
    return visualize_sharding(layout, style="plain", show=False, **kwargs)


def test_uneven_and_empty_shards():
    assert drawn(Layout(LINE, [S(0)], (5, 2))) == """\
f32[5@tp, 2] on mesh(tp=4)
+-----+--------+
|     | 0:2    |
+-----+--------+
| 0:2 | rank 0 |
+-----+--------+
| 2:4 | rank 1 |
+-----+--------+
| 4:5 | rank 2 |
+-----+--------+
nothing on rank 3"""


def test_replicas_and_partial_sums():
    text = drawn(Layout(GRID, [P, S(1)], (2, 4)))
    assert "| 0:2 | ranks 0 2 | ranks 1 3 |" in text and text.endswith("each rank of dp holds a part of the sum")
    assert "ranks 0-3" in drawn(Layout(LINE, [R], (2, 4)))


def test_two_axes_one_dim_and_both_dims():
    assert "| rank 0 | rank 1 | rank 2 | rank 3 |" in drawn(Layout(GRID, [S(1), S(1)], (2, 8)))
    text = drawn(Layout(GRID, [S(0), S(1)], (4, 4)))
    assert "| 0:2 | rank 0 | rank 1 |" in text and "| 2:4 | rank 2 | rank 3 |" in text
    text = drawn(Layout(GRID, [S(0), S(0)], (4, 4), order=("tp", "dp")))
    assert [line.split("|")[2].strip() for line in text.splitlines() if "rank" in line] == [
        "rank 0", "rank 2", "rank 1", "rank 3"]


def test_vectors_scalars_and_nothing():
    assert "|  | rank 0 | rank 1 | rank 2 | rank 3 |" in drawn(Layout(LINE, [S(0)], (8,)))
    assert "ranks 0-3" in drawn(Layout(LINE, [R], ()))
    assert "nothing on ranks 0-3" in drawn(Layout(LINE, [S(0)], (0, 3)))


def test_many_dims_by_picking_two():
    layout = Layout(GRID, [S(3), S(1)], (2, 4, 6, 8))
    text = drawn(layout)  # the sharded ones by themselves
    assert "dims 1 and 3, through dim 0 at 0, dim 2 at 0" in text and "| 2:4 | rank 1 | rank 3 |" in text
    text = drawn(layout, dims=(0, -1), at={1: 3})
    assert "| 0:2 | rank 1 | rank 3 |" in text and "not in this plane: ranks 0 2" in text
    assert plane(layout, (1, 3), {}).elsewhere == ()


@pytest.mark.parametrize("kwargs", [{"dims": (0,)}, {"dims": (0, 0)}, {"dims": (0, 7)}, {"at": {0: 9}}, {"at": {1: 0}},
                                    {"style": "jpeg"}])
def test_refusals(kwargs):
    with pytest.raises(LayoutError):
        visualize_sharding(Layout(GRID, [S(1), S(2)], (2, 4, 6)), show=False, **kwargs)


def test_only_tensors_and_layouts():
    with pytest.raises(LayoutError, match="must be a DTensor or a Layout"):
        visualize_sharding(3)


def test_svg_is_xml_to_scale(tmp_path):
    layout = Layout(GRID, [S(0), P], (3, 4))
    text = visualize_sharding(layout, style="svg", show=False)
    root = ET.fromstring(text)
    boxes = [e for e in root.iter() if e.tag.endswith("rect")]
    assert [float(b.get("height")) for b in boxes] == [pytest.approx(320 * 2 / 3, abs=0.1), pytest.approx(320 / 3, abs=0.1)]
    assert len({b.get("fill") for b in boxes}) == 2 and "ranks 0 1" in text and "part of the sum" in text
    path = tmp_path / "layout.svg"
    assert visualize_sharding(layout, file=path) == text and ET.parse(path)
    assert visualize_sharding(layout, file=tmp_path / "a.txt", style="plain").startswith("f32[3@dp, 4]")


def test_prints_and_returns_the_same(capsys):
    text = visualize_sharding(Layout(LINE, [S(0)], (8, 2)))
    assert capsys.readouterr().out == text + "\n"


def test_rich_where_it_is_there(monkeypatch, capsys):
    layout = Layout(LINE, [S(0)], (8, 2))
    monkeypatch.setattr("ms_dtensor.debug.visualize._has_rich", lambda: False)
    with pytest.raises(LayoutError, match="needs the package rich"):
        visualize_sharding(layout, style="rich")
    monkeypatch.setattr("ms_dtensor.debug.visualize._has_rich", lambda: True)
    rows = []
    table = type("Table", (), {"__init__": lambda self, **k: None, "add_column": lambda self, text: None,
                               "add_row": lambda self, *cells: rows.append(cells)})
    console = type("Console", (), {"__init__": lambda self, **k: None, "print": lambda self, what: None,
                                   "export_text": lambda self: "coloured"})
    for name, content in (("rich", {}), ("rich.console", {"Console": console}), ("rich.table", {"Table": table})):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    assert visualize_sharding(layout, style="rich") == "coloured"
    assert [r[0] for r in rows] == ["0:2", "2:4", "4:6", "6:8"] and "rank 3" in rows[3][1] and len({r[1] for r in rows}) == 4


def test_thousands_of_ranks_in_one_process():
    mesh = DeviceMesh("npu", np.arange(4096).reshape(64, 64), mesh_dim_names=("dp", "tp"))
    picture = plane(Layout(mesh, [R, S(0)], (128, 2)), None, {})
    assert len(picture.blocks) == 64 and len(picture.blocks[0].ranks) == 64
