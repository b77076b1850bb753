# SPDX-License-Identifier: Apache-2.0
"""The recorder's views on a world of one process: counts, table, trace; backward events carry the forward's line."""
import json
import re
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from mindspore import Tensor, mint

from ms_dtensor import Replicate, Shard, comm, distribute_tensor, init_device_mesh, value_and_grad
from ms_dtensor.comm.record import active
from ms_dtensor.debug import CommDebugMode, explain
from ms_dtensor.debug.comm_mode import human, table
from ms_dtensor.errors import ConfigError

pytestmark = pytest.mark.usefixtures("cpu")
R, S = Replicate(), Shard
A = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def mlp_step(mesh):
    """Colwise, rowwise, loss: the smallest Megatron block, forward and backward; also the lines that communicate."""
    x, up, down = (Tensor(np.ones(s, np.float32)) for s in ((4, 8), (8, 16), (16, 8)))
    args = [distribute_tensor(t, mesh, [p], src_data_rank=None) for t, p in ((x, R), (up, S(1)), (down, S(0)))]

    def loss(x, up, down):
        h = mint.matmul(x * 1.0, up)
        y = mint.matmul(h, down)
        return (y.redistribute(placements=[R]) ** 2).sum()
    return value_and_grad(loss, (0, 1, 2)), args


def recorded(rank: int = 0) -> CommDebugMode:
    """Such a step of four ranks."""
    with comm.fake_world(4, rank=rank):
        step, args = mlp_step(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
        with CommDebugMode() as mode:
            step(*args)
    return mode


def shown(text: str) -> str:
    """Neither line numbers of this file nor widths that follow its path belong in a snapshot."""
    return re.sub(" +", " ", re.sub(r"\S*test_comm_mode\.py:\d+", "HERE", text))


def test_counts_and_bytes_by_any_field():
    mode = recorded()
    assert mode.get_total_counts() == 2
    assert mode.get_comm_counts() == {"all_reduce": 2}
    assert mode.get_comm_counts("op", "phase") == {("all_reduce", "forward"): 1, ("all_reduce", "backward"): 1}
    assert mode.get_comm_bytes("axes") == {("tp",): 2 * 192}  # 2 * 3/4 of 4*8 floats, twice
    assert mode.get_comm_counts("implicit") == {False: 2}
    with pytest.raises(ConfigError, match="no field 'colour'"):
        mode.get_comm_counts("colour")


def test_backward_events_carry_the_forward_line_and_the_table_lists_them():
    mode = recorded()
    forward, backward = mode.events
    assert forward.site.startswith(__file__) and backward.site.startswith(__file__)
    source = Path(__file__).read_text(encoding="utf-8").split("\n")
    assert "y.redistribute" in source[int(forward.site.rsplit(":", 1)[1]) - 1]
    assert "mint.matmul(x * 1.0, up)" in source[int(backward.site.rsplit(":", 1)[1]) - 1]
    lines = shown(mode.table()).split("\n")
    assert lines[0] == "2 collectives, 384 B sent by rank 0: 1 forward, 1 backward, 0 implicit"
    assert [line.split()[1:5] for line in lines[2:]] == [["forward", "all_reduce(tp)", "1", "192"],
                                                        ["backward", "all_reduce(tp)", "1", "192"]]
    assert lines[2].endswith("f32[4, 8]{sum: tp} -> f32[4, 8]")


def test_implicit_communication_is_told():
    with comm.fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(Tensor(A), mesh, [S(0)], src_data_rank=None)
        y = distribute_tensor(Tensor(A), mesh, [S(1)], src_data_rank=None)
        with CommDebugMode() as outer, CommDebugMode() as mode:
            _ = x + y
        assert mode.get_comm_counts("op", "implicit") == {("all_to_all", True): 1}
        assert outer.get_total_counts() == 1
        with CommDebugMode() as mode:
            _ = x + x
    assert mode.table() == "no communication" and mode.get_comm_counts() == {}


def test_explain_a_call_prints_its_report_and_returns_its_result(capsys):
    with comm.fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(Tensor(A), mesh, [S(0)], src_data_rank=None)

        def gathered(t):
            return t.redistribute(placements=[R])
        assert explain(gathered, x).placements == (R,)
        first = shown(capsys.readouterr().out)
        assert explain(gathered)(x).placements == (R,)
        assert shown(capsys.readouterr().out) == first
        explain(x, [R])
        assert capsys.readouterr().out.startswith("f32[4@tp, 6] -> f32[4, 6] on mesh(tp=2)\nplan")
    assert first == dedent("""\
        gathered: 1 collective, 48 B sent by rank 0: 1 forward, 0 backward, 0 implicit
        where phase collective count sent layouts
        HERE forward all_gather(tp) 1 48 B f32[4@tp, 6] -> f32[4, 6]
        """)


def test_chrome_trace_has_one_event_per_collective(tmp_path):
    mode = recorded(rank=3)
    mode.export_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["cat"], e["pid"]) for e in events] == [("all_reduce", "forward", 3), ("all_reduce", "backward", 3)]
    assert events[0]["ts"] + events[0]["dur"] <= events[1]["ts"]
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"} == {"rank 3", "tp"}
    assert events[0]["args"]["bytes"] == 192 and events[0]["args"]["dst"] == "f32[4, 8]"


def test_a_failing_block_still_closes_the_recorder():
    with pytest.raises(RuntimeError), CommDebugMode():
        raise RuntimeError
    assert not active()


def test_text_helpers():
    assert [human(n) for n in (0, 1023, 1536, 3 << 20, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 TiB"]
    assert table([]) == "no communication"
