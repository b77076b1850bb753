# SPDX-License-Identifier: Apache-2.0
"""Pictures of layouts: every block with its ranks, uneven and empty shards, replicas, many dims. No MindSpore needed."""
import sys
import types
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ms_dtensor import DeviceMesh, Layout, Partial, Replicate, Shard
from ms_dtensor.debug.visualize import plane, visualize_sharding
from ms_dtensor.errors import LayoutError

LINE = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
R, S, P = Replicate(), Shard, Partial()


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
