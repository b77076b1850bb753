# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what CommDebugMode counts is what was communicated, on every rank, backward included."""
from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, Layout, comm, replicate, value_and_grad
from ms_dtensor.debug import CommDebugMode
from ms_dtensor.debug.predict.hardware import parse
from ms_dtensor.dispatch.operands import redistribute, wrap
from ms_dtensor.redistribute.plan import plan
from ms_dtensor.tools import host, machine
from tests.cases import case
from tests.debug import dry_programs
from tests.dist.operands import Built, P, R, S, data
from tests.dist.support import same_on_all_ranks
from tests.tiers import sampled


def a_step_is_counted_alike_on_all_ranks(world, line):
    args = [md.distribute_tensor(t, line, [p], src_data_rank=None)
            for t, p in ((data(1, 4, 8), R), (data(2, 8, 16), S(1)), (data(3, 16, 8), S(0)))]

    def loss(x, up, down):
        h = mint.matmul(x * 1.0, up)
        return (mint.matmul(h, down).redistribute(placements=[R]) ** 2).sum()
    with CommDebugMode() as mode:
        value_and_grad(loss, (0, 1, 2))(*args)
    assert mode.get_comm_counts("op", "axes", "phase") == {
        ("all_reduce", ("tp",), "forward"): 1, ("all_reduce", ("tp",), "backward"): 1}
    assert mode.get_comm_bytes() == {"all_reduce": 2 * 2 * 3 * 4 * 8}  # twice 2 * 3/4 of 4 * 8 floats
    assert all(e.site.startswith(__file__) for e in mode.events), [e.site for e in mode.events]
    same_on_all_ranks(world, mode.table().split("\n", 1)[1])
    with tempfile.TemporaryDirectory() as folder:
        mode.export_chrome_trace(Path(folder) / "trace.json")
        assert (Path(folder) / "trace.json").stat().st_size > 100


def dry_runs_communicate_what_ranks_do(world):
    """Every event, forward and backward: of the programs of all kinds of parallelism, one after another."""
    for program in sampled(dry_programs.PROGRAMS, 4, 1):
        with CommDebugMode():  # as a dry run names cells
            real = [dry_programs.seen(e) for e in dry_programs.PROGRAMS[program](world.size)]
        dry = [dry_programs.seen(e) for e in dry_programs.same_step_dry(program, world.size, world.rank)]
        assert len(real) == len(dry) > 0, (program, len(real), len(dry))
        for i, (a, b) in enumerate(zip(real, dry)):
            assert a == b, f"{program}, event {i}: real {a}, dry {b}"


def _block(width: int = 8):
    """Attention-like and MLP-like halves, under the names of a Llama."""
    wq, wo = (nn.Dense(width, width, has_bias=False) for _ in range(2))
    return Built(lambda c, x: x + c.wo(mint.tanh(c.wq(c.norm(x)))), norm=nn.LayerNorm((width,)), wq=wq, wo=wo)


class _Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([_block(), _block()])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def each_cell_is_charged_with_its_own_communication(world, grid):
    x = data(3 + grid.get_local_rank("dp"), 2, 8)  # this rank's rows
    plan_ = {"layers.*.wq": ColwiseParallel(), "layers.*.wo": md.RowwiseParallel(use_local_output=False)}
    net = replicate(md.parallelize_module(_Net(), grid["tp"], plan_), mesh=grid["dp"])
    net(x)  # makes what is made once
    with comm.record() as plainly:
        value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(x)
    with CommDebugMode() as mode:
        value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(x)
    assert [(e.op, e.bytes, e.phase) for e in mode.events] == [(e.op, e.bytes, e.phase) for e in plainly]
    counts = mode.get_comm_counts("module", "op", "axes", "phase")
    for i in (0, 1):
        assert counts.pop((f"layers.{i}.wo", "all_reduce", ("tp",), "forward")) == 1, counts
        assert counts.pop((f"layers.{i}.wq", "all_reduce", ("tp",), "backward")) == 1, counts
    assert counts.pop(("_Net", "all_gather_object", ("dp",), "forward")) == 1, counts  # how many rows each rank brings
    assert set(counts) == {("", "all_reduce", ("dp",), "backward")}, counts  # the gradient buckets, of no cell
    sizes = mode.get_comm_bytes("module")
    assert sizes["layers.0.wo"] == 2 * 2 * 8 * 4 // 2, sizes  # 2 * 1/2 of a shard of 2 rows of 8 floats
    lines = mode.generate_comm_debug_tracing_table(0).split("\n")
    assert lines[1].split()[:2] == ["(in", "no"] and lines[2].split()[:2] == ["_Net", "3"], lines
    same_on_all_ranks(world, "\n".join(lines))
    assert mode.get_sharding_info()["layers.1.wo.weight"] == (R, S(1))


def axis_orders_and_helpers_arrive(world, grid):
    """Plans that use replicated axes as helpers, other axis orders and sums that stay partial, on real ranks."""
    shape = (513, 129)  # large enough that bytes decide
    whole = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    here = grid.get_coordinate()
    def placed(*pairs):
        return [Layout(grid, p, shape, order=order) for p, order in pairs]
    ab, ba = (0, 1), (1, 0)
    sources = placed(([P, R], ab), ([R, P], ab), ([P, P], ab), ([S(0), S(0)], ab), ([S(0), S(0)], ba), ([S(0), P], ab))
    targets = placed(([R, R], ab), ([S(0), S(0)], ba), ([S(1), R], ab), ([S(1), S(1)], ab), ([S(1), S(0)], ab),
                     ([S(1), P], ab))
    for src, dst in itertools.product(sources, targets):
        if dst.has_partial() and not src.placements[1].is_partial():
            continue
        share = np.prod([0.25 + 0.5 * here[a] for a in src.partial_axes])  # 1/4 and 3/4 of the value
        box = tuple(slice(lo, hi) for lo, hi in src.local_box())
        y = redistribute(wrap(Tensor((whole[box] * share).astype(np.float32)), src), dst)
        kept = np.prod([0.25 + 0.5 * here[a] for a in dst.partial_axes])
        box = tuple(slice(lo, hi) for lo, hi in dst.local_box())
        got = y.to_local().asnumpy()
        assert got.shape == whole[box].shape, (src, dst)
        assert np.allclose(got, whole[box] * kept, atol=1e-5), (src, dst, plan(src, dst))


@case(world_size=2)
def a_machine_is_measured_alike_on_all_ranks(world):
    """What `calibrate --hardware` writes is a machine's file; of sizes that take milliseconds."""
    group = comm.group(tuple(range(world.size)))

    def agree(mine: float) -> float:
        return max(group.all_gather_object(mine))
    with pytest.MonkeyPatch.context() as small:
        small.setattr(machine, "PRODUCTS", ((8, 8, 8), (64, 64, 64)))
        small.setattr(machine, "VECTORS", (64, 4096))
        small.setattr(machine, "REPEATS", 3)
        small.setattr(machine, "LARGE", 1 << 16)
        small.setattr(machine, "WHILE", 0.001)
        small.setattr(machine, "ROUNDS", 1)
        for name, value in (("JUNK", 1 << 10), ("CHAIN", 3), ("ROUNDS", 2)):
            small.setattr(host, name, value)
        told = machine.measure_machine("cpu", agree, group)
    found = parse("mine", yaml.safe_load(yaml.safe_dump(told)))
    assert found.links[0].factors["all_gather"] == 1 and found.links[0].processor == 1 and 0 < found.launch < 1
    assert "mapping" in found.kernels
    assert set(found.host) == {"op", "view"} and 0 < found.host["op"][0] < 1
    assert [size for size, _ in found.matrix.steps] == pytest.approx([5.24e5, 0])
    assert max(share for _, share in found.memory.steps) == 1
    same_on_all_ranks(world, str(told))
