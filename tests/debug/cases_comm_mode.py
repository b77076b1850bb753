# SPDX-License-Identifier: Apache-2.0
"""Real ranks: CommDebugMode counts what was communicated, backward included; `checks()` finds false claims of replicas."""
import itertools

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, Layout, comm, distribute_tensor, local_map, replicate, value_and_grad
from ms_dtensor.debug import CommDebugMode, checks
from ms_dtensor.debug.predict.hardware import parse
from ms_dtensor.dispatch.dispatcher import clear_cache
from ms_dtensor.dispatch.operands import redistribute, wrap
from ms_dtensor.errors import LayoutError
from ms_dtensor.ops.rules import RULES
from ms_dtensor.ops.rules.spec import Case, OpSpec
from ms_dtensor.redistribute.plan import plan
from ms_dtensor.tools import host, machine
from tests.cases import case
from tests.debug import dry_programs
from tests.operands import Built, P, R, S, data, mesh_2d, placed
from tests.support import counted, equal, refusal, same_on_all_ranks
from tests.tiers import sampled


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


def a_rule_that_is_wrong_is_found_on_all_ranks_or_none(world, line):
    """The last rank's shard is empty, and what it is handed has any shape that is asked for."""
    before = RULES["tril"]
    x = placed(data(1, 3, 5), line, S(0))
    RULES["tril"] = lambda call: OpSpec(((3, 7),), (Case((S(0),), (S(0),)),))
    try:
        text = refusal(lambda: x.tril(-2))
    finally:
        RULES["tril"] = before
        clear_cache()
    assert "the rule says" in text
