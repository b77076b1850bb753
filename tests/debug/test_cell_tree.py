# SPDX-License-Identifier: Apache-2.0
"""Which cell communicated what: names are the plan's, a backward is its forward's, nothing is left behind."""
import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor.debug import CommDebugMode
from ms_dtensor.errors import ConfigError

pytestmark = pytest.mark.usefixtures("cpu")
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
