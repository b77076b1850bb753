# SPDX-License-Identifier: Apache-2.0
"""Which cell communicated what: names are the plan's, a backward is its forward's; and the recorder's counts and tables."""
import json
import re
from pathlib import Path
from textwrap import dedent

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, comm, distribute_tensor, init_device_mesh, value_and_grad
from ms_dtensor.comm.record import active
from ms_dtensor.debug import CommDebugMode, explain
from ms_dtensor.debug.comm_mode import human, table
from ms_dtensor.errors import ConfigError

X = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
PLAN = {"layers.*.up": md.ColwiseParallel(), "layers.*.down": md.RowwiseParallel(use_local_output=False)}


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Dense(8, 16), nn.Dense(16, 8)

    def construct(self, x):
        return x + self.down(self.up(x))


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Block(), Block()])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture()
def mesh():
    with md.comm.fake_world(4):
        yield md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


class Summed(md.DFunction):
    """Communicates by itself, as a ring does."""

    @staticmethod
    def forward(ctx, x, group):
        return group.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, dout):
        return dout, None


class Sums(nn.Cell):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def construct(self, x):
        return Summed.apply(x, self.group)


def test_a_function_that_communicates_is_its_callers(mesh):
    """MindSpore has a cell of ours behind it, which no user knows: outside of all cells there is no name."""
    group = mesh.get_group()
    for run, name in ((Sums(group), "Sums"), (lambda x: Summed.apply(x, group), "")):
        with CommDebugMode() as mode:
            ms.grad(lambda x, run=run: run(x).sum())(X)
        assert [(e.op, e.module) for e in mode.events] == [("all_reduce", name)]


def test_forward_and_backward_are_the_cells(mesh):
    net = md.parallelize_module(Net(), mesh, PLAN, src_data_rank=None)
    step = md.value_and_grad(lambda x: (net(x) ** 2).mean(), 0, net.trainable_params())
    with CommDebugMode() as mode:
        step(md.distribute_tensor(X, mesh, [md.Replicate()], src_data_rank=None))
    assert mode.get_comm_counts("module", "phase") == {
        ("layers.0.down", "forward"): 1, ("layers.1.down", "forward"): 1,
        ("layers.1.down", "backward"): 1, ("layers.1.up", "backward"): 1,  # the bias of `down`, the input of `up`
        ("layers.0.down", "backward"): 1, ("layers.0.up", "backward"): 1}
    assert mode.generate_comm_debug_tracing_table(0).split("\n") == [
        "cell        forward    backward",
        "Net         2 (384 B)  4 (480 B)",
        "  layers    2 (384 B)  4 (480 B)",
        "    0       1 (192 B)  2 (240 B)",
        "      up               1 (192 B)",
        "      down  1 (192 B)  1 (48 B)",
        "    1       1 (192 B)  2 (240 B)",
        "      up               1 (192 B)",
        "      down  1 (192 B)  1 (48 B)"]
    quiet, layouts, parameters, lines = map(mode.generate_comm_debug_tracing_table, range(4))
    assert len(quiet) < len(layouts) < len(parameters) < len(lines)
    assert "* all_reduce(tp)" in layouts and "f32[4, 8]{sum: tp} -> f32[4, 8]" in layouts and "test_cell_tree.py:" in lines
    assert ". weight" not in layouts and ". weight" in parameters and "f32[8, 16@tp] on mesh(tp=4)" in parameters
    assert mode.generate_comm_debug_tracing_table() == lines


def test_json_holds_the_tree(mesh, tmp_path):
    net = md.parallelize_module(Net(), mesh, PLAN, src_data_rank=None)
    with CommDebugMode() as mode:
        net(md.distribute_tensor(X, mesh, [md.Replicate()], src_data_rank=None))
    mode.generate_json_dump(tmp_path / "all.json")
    mode.generate_json_dump(tmp_path / "little.json", noise_level=0)
    mode.log_comm_debug_tracing_table_to_file(tmp_path / "log.txt", noise_level=1)
    tree = json.loads((tmp_path / "all.json").read_text())
    assert tree["forward"] == {"count": 2, "bytes": 384} and [c["fqn"] for c in tree["children"]] == ["Net"]
    block = tree["children"][0]["children"][0]["children"][1]
    down = block["children"][1]
    assert (block["fqn"], block["module_type"], down["fqn"]) == ("layers.1", "Block", "layers.1.down")
    assert down["module_parameters"] == {"weight": "f32[8, 16@tp] on mesh(tp=4)", "bias": "f32[8] on mesh(tp=4)"}
    (event,) = down["collectives"]
    assert event.pop("site").rsplit(":", 1)[0].endswith("test_cell_tree.py")
    assert event == {"phase": "forward", "op": "all_reduce", "axes": ["tp"], "count": 1, "bytes": 192, "implicit": False,
                     "src": "f32[4, 8]{sum: tp}", "dst": "f32[4, 8]"}
    little = json.loads((tmp_path / "little.json").read_text())["children"][0]
    assert little["collectives"] == [] and [c["fqn"] for c in little["children"][0]["children"]] == ["layers.0", "layers.1"]
    assert (tmp_path / "log.txt").read_text() == mode.generate_comm_debug_tracing_table(1) + "\n"


def test_names_with_wrappers_and_cells_outside_of_the_model(mesh):
    net = md.parallelize_module(Net(), mesh, PLAN, src_data_rank=None)
    loss = nn.MSELoss()
    whole = md.distribute_tensor(X, mesh, [md.Replicate()], src_data_rank=None)
    split = md.distribute_tensor(X, mesh, [md.Shard(0)], src_data_rank=None)

    class Odd(nn.Cell):
        """Holds a cell where MindSpore does not see it."""

        def __init__(self):
            super().__init__()
            self.inner = (Gather(),)

        def construct(self, x):
            return self.inner[0](x)

    class Gather(nn.Cell):
        def construct(self, x):
            return x.redistribute(placements=[md.Replicate()])

    with CommDebugMode() as mode:
        nn.WithLossCell(net, loss)(whole, whole)
        loss(split, whole).full_tensor()
        Odd()(split)
        Gather()(split)
        Gather()(split)
    assert mode.get_comm_counts("module") == {"layers.0.down": 1, "layers.1.down": 1, "": 1, "Odd.Gather": 1, "Gather": 1,
                                              "Gather (2)": 1}
    with CommDebugMode(module=net) as mode:
        Odd()(split)
        nn.WithLossCell(net, loss)(whole, whole)
    assert mode.get_comm_counts("module") == {"Odd.Gather": 1, "layers.0.down": 1, "layers.1.down": 1}
    assert [line.split()[0] for line in mode.generate_comm_debug_tracing_table(0).split("\n")[1:]] == [
        "Odd", "Gather", "Net", "layers", "0", "down", "1", "down"]


def test_names_that_another_block_gave(mesh):
    """A block inside another's call, and a backward whose forward ran in an earlier block."""
    net = md.parallelize_module(Net(), mesh, PLAN, src_data_rank=None)
    whole = md.distribute_tensor(X, mesh, [md.Replicate()], src_data_rank=None)

    class Watches(nn.Cell):
        def construct(self, x):
            with CommDebugMode(net) as self.__dict__["inner"]:
                return net(x)
    cell = Watches()
    with CommDebugMode() as outer:
        cell(whole)
    names = {"layers.0.down": 1, "layers.1.down": 1}
    assert cell.inner.get_comm_counts("module") == outer.get_comm_counts("module") == names
    assert [line.split()[0] for line in outer.generate_comm_debug_tracing_table(0).split("\n")[1:]] == list(names)
    with CommDebugMode() as unnamed:
        x = md.distribute_tensor(X, mesh, [md.Shard(0)], src_data_rank=None)
        with md.comm.annotate(module="gone.0"):
            x.full_tensor()
    assert unnamed.generate_comm_debug_tracing_table(0).split("\n")[1].split()[0] == "gone.0"


def test_parameters_and_their_layouts(mesh):
    net = md.parallelize_module(Net(), mesh, {"layers.0.up": md.ColwiseParallel()}, src_data_rank=None)
    with CommDebugMode() as mode:
        net.layers[0].up(X)
    assert mode.get_parameter_info() == {"Dense": {"weight": net.layers[0].up.weight, "bias": net.layers[0].up.bias}}
    assert mode.get_sharding_info() == {"Dense.weight": (md.Shard(0),), "Dense.bias": (md.Shard(0),)}
    with CommDebugMode(net) as mode:
        net.layers[0].up(X)
    assert mode.get_sharding_info() == {"layers.0.up.weight": (md.Shard(0),), "layers.0.up.bias": (md.Shard(0),)}


def test_nothing_is_left_behind(mesh):
    ours, theirs = nn.Cell.__call__, nn.Dense.__dict__.get("__call__")

    class Raises(nn.Cell):
        def construct(self, x):
            raise ZeroDivisionError

    x = md.distribute_tensor(X, mesh, [md.Shard(0)], src_data_rank=None)
    with pytest.raises(ZeroDivisionError), CommDebugMode():
        Raises()(x)
    with CommDebugMode() as outer, CommDebugMode() as inner:
        assert nn.Cell.__call__ is not ours
        with pytest.raises(ZeroDivisionError):
            Raises()(x)
        x.full_tensor()  # the call above is over
    assert inner.get_comm_counts("module") == outer.get_comm_counts("module") == {"": 1}
    assert nn.Cell.__call__ is ours and nn.Dense.__dict__.get("__call__") is theirs
    assert inner.generate_comm_debug_tracing_table(0).split("\n")[1].split() == ["(in", "no", "cell)", "1", "(96", "B)"]
    assert CommDebugMode().generate_comm_debug_tracing_table() == "no communication"


def test_refusals(mesh):
    with pytest.raises(ConfigError, match="'module' must be a Cell, but got dict"):
        CommDebugMode({})
    for level in (4, -1, True, "1"):
        with pytest.raises(ConfigError, match="'noise_level' must be 0 to 3"):
            CommDebugMode().generate_comm_debug_tracing_table(level)


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
    return re.sub(" +", " ", re.sub(r"\S*test_cell_tree\.py:\d+", "HERE", text))


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
