# SPDX-License-Identifier: Apache-2.0
"""A dry run communicates what the same program communicates with kernels; its other figures follow from formulas."""
import copy
import sys
import threading
from contextlib import nullcontext
from functools import partial
from math import prod

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.debug import CommDebugMode, dry_run
from ms_dtensor.errors import ConfigError, MixedOperandError, OpRuleError
from ms_dtensor.pipeline import PipelineStage, Schedule1F1B, ScheduleZBH1
from tests.debug import dry_programs as programs
from tests.operands import Built

LAYOUTS = {"single": (1, 1), "tp": (1, 2), "dp": (2, 1), "fsdp": (2, 1), "zero1": (2, 1), "both": (2, 2)}


@pytest.mark.parametrize("program", [name for name in programs.PROGRAMS if not name.startswith("pp")])
def test_events_are_those_of_kernels(program):
    """One by one, forward and backward; a pretended world has this rank's data in the place of the others'."""
    for rank in (0, 3):
        with comm.fake_world(4, rank), CommDebugMode():  # as a dry run names cells
            want = [programs.seen(e) for e in programs.PROGRAMS[program](4)]
        assert [programs.seen(e) for e in programs.same_step_dry(program, 4, rank)] == want
        assert any("backward" in e for e in want) or program == "cp"


def test_nothing_is_computed():
    """A product of 10^17 operations, and its gradients; MindSpore has no memory for the operands."""
    with dry_run(world=8, rank=5, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        net = md.parallelize_module(nn.Dense(1 << 20, 1 << 20, has_bias=False), mesh,
                                    md.ColwiseParallel(use_local_output=False))
        x = md.zeros(1 << 16, 1 << 20, device_mesh=mesh)
        loss, (grad,) = md.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(x)
        assert (md.zeros(5 << 29, device_mesh=mesh) * 2)._shape == (5 << 29,)  # negative, if it were of 32 bits
    assert grad.shape == (1 << 20, 1 << 20) and grad._shape == (1 << 17, 1 << 20)
    assert run.flops() == 3 * 2 * (1 << 16) * (1 << 20) * (1 << 17)  # MindSpore makes the gradient of x, too
    assert run.memory().end["parameters"] == 4 << 37


def test_refusals_and_values():
    mesh_of = ("cpu", (2,))
    with dry_run(world=2, device="CPU"):
        x = md.zeros(4, device_mesh=md.init_device_mesh(*mesh_of))
        with pytest.raises(OpRuleError, match=r"asks for a value(?s:.*)values=\{'test_dry_run.py:\d+'"):
            float(x.sum())
        with pytest.raises(OpRuleError, match="needs data at .*test_dry_run.py"):
            mint.nonzero(x)
        with pytest.raises(ConfigError, match="another one is under way"), dry_run(world=2):
            pass
    here = f"test_dry_run.py:{test_refusals_and_values.__code__.co_firstlineno + 13}"
    with dry_run(world=2, device="CPU", values={here: 2.5}):
        x = md.zeros(4, device_mesh=md.init_device_mesh(*mesh_of))
        value = float(x.sum())
    assert value == 2.5
    for wrong in ({"world": 2, "rank": 2}, {"world": 0}, {"world": 2, "device": "TPU"}):
        with pytest.raises(ConfigError), dry_run(**wrong):
            pass


class Unseen(md.DFunction):
    """What NumPy does for a local function."""

    @staticmethod
    def forward(ctx, x):
        return Tensor.from_numpy(x.asnumpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return Tensor.from_numpy(grad.asnumpy() * 2)


def test_ops_of_local_functions_are_seen():
    """Forward and backward, on local sizes, beside tables that the function makes; what NumPy does is told."""
    table = Tensor(np.ones((1, 40), np.float32))

    def local(x, w, own):
        h = mint.matmul(x, w) + table
        return mint.softmax(Unseen.apply(h) if own else h, -1) @ mint.permute(w, (1, 0))
    for own in (False, True, "compiled"):
        with dry_run(world=4, device="CPU") as run:
            mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
            x, w = md.zeros(32, 16, device_mesh=mesh, placements=[md.Shard(0)]), md.zeros(16, 40, device_mesh=mesh)
            run_here = ms.jit(partial(local, own=False)) if own == "compiled" else partial(local, own=own)
            mapped = md.local_map(run_here, [md.Shard(0)])
            out, grads = md.value_and_grad(lambda x, w, f=mapped: f(x, w).sum(), (0, 1))(x, w)
        assert run.flops() == 3 * 2 * 2 * 8 * 16 * 40, "two products, each with two gradients, of a quarter of the rows"
        seen = [e.op for e in run.events if e.phase == "forward"]
        assert seen[:4] == ["matmul", "copy_of_view", "copy_of_view", "add"], "a host's kernels copy small operands"
        assert [(e.op, e.phase) for e in run.events if e.is_move] == [("all_reduce", "backward")], "of w"
        assert [tuple(g.shape) for g in grads] == [(32, 16), (16, 40)] and (own is True) == ("Unseen" in run.assumed)
    with dry_run(world=4, device="CPU"):
        x = md.zeros(32, device_mesh=md.init_device_mesh("cpu", (4,)), placements=[md.Shard(0)])
        with pytest.raises(OpRuleError, match="needs data at .*test_dry_run.py"):
            md.local_map(mint.nonzero, [md.Shard(0)])(x)


def test_what_a_step_holds_is_what_kernels_keep():
    """A lookup and a bias keep no operand, a product both, a value out of the gradient nothing; set-up can be left out."""
    with dry_run(world=2, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = md.zeros(16, 64, device_mesh=mesh, placements=[md.Shard(0)])
        rows = md.distribute_tensor(Tensor(np.arange(64, dtype=np.int32)), mesh)
        whole = x.full_tensor()
        run.forget()
        assert not run.events and not run.communication and run.memory().peak == x.to_local().nbytes + whole.nbytes
        del whole
        before, alive = run.memory().end["activations"], []

        def loss(x):
            y = ops.bias_add(ops.gather(x * 2, rows, 1), rows.astype(ms.float32))  # nothing of these is kept
            alive.append(run.memory().end["activations"] - before)
            y = mint.exp(y)  # its result
            alive.append(run.memory().end["activations"] - before)
            return (y * ops.stop_gradient(y * 3)).sum()  # the second operand
        md.value_and_grad(loss)(x)
    assert alive == [x.to_local().nbytes] * 2, alive
    back = [e.op for e in run.events if e.phase == "backward"]
    assert back == ["sum", "mul", "exp", "bias_add", "gather", "mul"], "no identity, and nothing of what is multiplied by 3"


def test_what_hosts_gather_is_written_where_it_stays():
    """A host's ranks write into each other's windows; a device packs, and has what came beside what it is copied to."""
    peaks = {}
    for device in ("CPU", "Ascend"):
        with dry_run(world=2, device=device) as run:
            mesh = md.init_device_mesh("cpu" if device == "CPU" else "npu", (2,), mesh_dim_names=("dp",))
            net = md.fully_shard(mint.nn.Linear(1024, 1024, bias=False), mesh=mesh)
            x = md.zeros(4, 1024, device_mesh=mesh, placements=[md.Shard(0)])
            net(x)
        kinds = [{k: kinds[k] for k in ("gathered", "buffers")} for _, kinds in run.memory().over_time()]
        peaks[device] = run.memory().peak
        assert max(k["gathered"] for k in kinds) == 4 << 20
        product = next(e for e in run.events if e.op in ("linear", "matmul"))
        assert run.events[product.after[0]].op == "all_gather", "what is computed of it waits for it"
        assert [e.mapped for e in run.events if e.op == "all_gather"] == [4 << 20 if device == "CPU" else 0]
    assert peaks["CPU"] + (3 << 20) < peaks["Ascend"]


def test_sums_of_gradients_and_copies_of_views_are_work():
    """Three uses of a value are two sums in its backward; a host's kernels read copies of a view, those of sums, too, of
    what the gradient of a view is; a device's read views."""
    for device, copies in (("CPU", 1), ("Ascend", 0)):
        with dry_run(world=1, device=device) as run:
            x = md.zeros(8, 16, device_mesh=md.init_device_mesh("cpu" if device == "CPU" else "npu", (1,)))
            run.forget()
            md.value_and_grad(lambda x: (mint.exp(x) * mint.sin(x) + mint.permute(x, (1, 0)).exp().sum()).sum())(x)
        seen = {phase: sorted((e.op, e.read, e.written) for e in run.events
                              if e.phase == phase and e.op in ("accumulate", "copy_of_view"))
                for phase in ("forward", "backward")}
        sums, copied = 2 * [("accumulate", 1024, 512)], copies * [("copy_of_view", 512, 512)]
        assert seen == {"forward": copied, "backward": sums + copied}, (device, seen)


def test_ops_of_plain_stages_are_seen():
    """Of cells that are not laid out as of others: three products for each in a step, one in an evaluation, the
    parameters, what waits."""
    messages: dict[str, bytes] = {}
    product, head = 2 * 2 * 6 * programs.WIDTH * programs.HIDDEN, 2 * 2 * 6 * programs.WIDTH * programs.WORDS
    for rank, own in enumerate((6 * product, 6 * product + head)):
        with dry_run(world=2, rank=rank, device="CPU", messages=messages) as run:
            programs.pp(2)
        messages, kinds = run.messages, run.memory()
        assert run.flops() == (3 + 1) * 4 * own, "four micro-batches of two rows"
        weights = 4 * (2 * (3 * programs.WIDTH * programs.HIDDEN + programs.WIDTH) + rank * programs.WIDTH * programs.WORDS)
        assert kinds.at_peak["parameters"] == weights <= kinds.at_peak["gradients"] <= 2 * weights, "sums, and one more"


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBH1])
def test_a_weight_of_a_plain_stage_has_uses_in_both_parts_of_its_backward(kind):
    """What laid it out for one use was run again for the other, and MindSpore refused the second run."""
    ids = Tensor(np.arange(8, dtype=np.int32).reshape(4, 2))
    with dry_run(world=1, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        tied = Built(lambda c, ids: mint.nn.functional.linear(mint.tanh(c.table(ids)), c.table.embedding_table),
                     table=nn.Embedding(24, 16))  # words in and out by one table
        schedule = kind([PipelineStage(tied, 0, 1, mesh)], 2, lambda out, _: out.mean())
        _, (grad,) = schedule.step(ids)
    assert grad.shape == (24, 16) and run.flops() == 3 * 2 * ids.size * 24 * 16


def test_an_array_of_the_users_has_its_values():
    with dry_run(world=2, device="CPU"):
        mesh = md.init_device_mesh("cpu", (2,))
        places = md.DTensor.from_local(Tensor(np.arange(6, dtype=np.int32)), mesh)
        assert places.asnumpy().tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(OpRuleError, match="asks for a value"):
            (places + 1).asnumpy()


def test_a_real_world_is_as_it_was():
    """Plans, memory and values of the world around do not notice."""
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    x = md.distribute_tensor(Tensor(np.arange(4, dtype=np.float32)), mesh)
    before = (x * 3).asnumpy().copy()
    with dry_run(world=4, device="CPU") as run:
        y = md.zeros(4, device_mesh=md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))) * 3
    assert (x * 3).asnumpy().tolist() == before.tolist() == [0, 3, 6, 9]
    del y
    assert run.memory().peak > 0 and not sum(run.memory().end.values())
    assert ms.get_context("device_target") == "CPU"


def kept_by_forward(layout: str, recompute: bool, width: int, run=None) -> tuple[int, int]:
    """Bytes of the parameters of rank 0, and of what a forward leaves behind for its backward; by kernels without `run`."""
    mesh = md.init_device_mesh("cpu", LAYOUTS[layout], mesh_dim_names=("dp", "tp"))
    net = programs.tensor_parallel(programs.Net(width=width, hidden=2 * width), mesh["tp"], layout == "both")
    wraps = {"fsdp": programs.fully_sharded, "zero1": lambda net, mesh: md.replicate(net, mesh=mesh, zero1=True)}
    net = wraps.get(layout, lambda net, mesh: md.replicate(net, mesh=mesh))(net, mesh["dp"])
    for layer in net.layers if recompute else ():
        layer.recompute()
    x, w = (md.distribute_tensor(t, mesh, [md.Shard(0), md.Replicate()]) 
            for t in programs.batch(width, rows=64 * mesh.shape[0]))
    saved, found = dict[int, int](), list[int]()
    before = run.memory().end["activations"] if run else 0

    def save(t: Tensor) -> Tensor:
        if t.ndim == 3 or prod(t._shape) < 2**16:  # activations, and small weights, of whose views kernels make copies
            saved[Tensor.data_ptr(t)] = prod(t._shape) * t.itemsize
        return t

    def loss(x):
        total = (net(x) * w).sum()
        saved[Tensor.data_ptr(total)] = total.itemsize
        found.append(run.memory().end["activations"] - before if run else 0)
        return total
    with nullcontext() if run else ms.saved_tensors_hooks(save, lambda t: t):
        md.value_and_grad(loss, None, net.trainable_params())(x)
    params = net.trainable_params()
    for t in (x, w, *params):
        saved.pop(Tensor.data_ptr(t), None)
    return sum(prod(p.local_shape) * 4 for p in params), found[0] if run else sum(saved.values())


@pytest.mark.parametrize("width", [192, 256])  # below 64 Ki elements the library copies where it else makes views
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_forward_keeps(layout, recompute, width):
    """Of each op what MindSpore's own saves, and no more alive than that: to the byte where parameters are not cut.

    Between layers that keep nothing lies what the second is given, which no op saves.
    """
    n = prod(LAYOUTS[layout])
    with comm.fake_world(n):
        want = kept_by_forward(layout, recompute, width)
    with dry_run(n, device="CPU") as run:
        got = kept_by_forward(layout, recompute, width, run)
    between = recompute * 64 * 6 * width * 4 // (2 if layout == "both" else 1)
    assert got[0] == want[0]
    # what a cut cell returns passes a node, where MindSpore's CPU makes a second one of it
    twice = 64 * 6 * 4 * (programs.WORDS + 2 * width * (layout == "fsdp" and not recompute))
    cut = layout in ("fsdp", "zero1")
    assert 0 <= want[1] + between - got[1] <= cut * (twice + 4096)


def test_plain_tensors_without_data_are_not_asked_for_values():
    """A shard or a gathered tensor as a plain one: its value is told or refused, and what is made of a shard is said."""
    with dry_run(world=2, device="CPU", values={"test_dry_run.py": 0}) as run:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = md.zeros(4, device_mesh=mesh, placements=[md.Shard(0)]) + 1
        total = x.full_tensor()
        for ask in (float, bool, int, Tensor.item, Tensor.tolist):
            with pytest.raises(OpRuleError, match=r"asks for a value.*\n.*float32\[\]"):
                ask(mint.sum(x).full_tensor())
        with pytest.raises(OpRuleError, match="asks for a value"):
            total.tolist()
        assert not run.assumed
        mine = x.to_local()
        assert mine.shape == (2,)
        (said,), data = run.assumed, Tensor(np.array([2.5], np.float32))
        assert said.startswith("to_local at ") and "test_dry_run.py" in said
        assert data.item() == float(data) == 2.5 and data.tolist() == [2.5], "what has values gives them"
    assert np.isnan(mine.asnumpy()).all() and np.isnan(float(mine.sum())), "what is printed after the run is no number"
    frame = sys._getframe().f_lineno
    with dry_run(world=2, device="CPU", values={f"test_dry_run.py:{frame + 3}": 4.0}):
        x = md.zeros(4, device_mesh=md.init_device_mesh("cpu", (2,)), placements=[md.Shard(0)])
        assert float(mint.sum(x).full_tensor()) == 4.0
    assert float(Tensor(3.0)) == 3.0
    for rank in (True, 1.0):
        with pytest.raises(ConfigError, match="is not in a world of 2"), dry_run(world=2, rank=rank):
            pass


def test_whole_numbers_made_of_what_has_no_data_are_refused():
    """Floating ones read as NaN; counts, choices and truths read 0, which took a branch and gave a sum without a word."""
    seen = md.comm.fake_world(2), dry_run(world=2, device="CPU")
    for kernels, world in zip((True, False), seen, strict=True):
        with world:
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            ids = md.full((6,), 3, device_mesh=mesh, placements=[md.Shard(0)], dtype=ms.int32)
            scores = md.full((4, 3), 2.0, device_mesh=mesh)
            mine, whole = ids.to_local(), scores.full_tensor()
            fresh = mine + 1  # written in place below
            fresh[0] = 5
            made = {"sum": (mine + 1).sum(), "index": mine[1], "row": next(iter(mine.reshape(3, 1))).reshape(()),
                    "equal": (mine == 3).all(), "cast": whole.astype(ms.int32).sum(), "choice": whole.argmax(-1)[0],
                    "above": (whole > 1).any(), "float of ints": mine.astype(ms.float32).mean(),
                    "beside data": (ops.ones(3, ms.int32) * mine).sum(), "split": mint.split(mine, 1)[2].reshape(()),
                    "kernel": ops.ReduceSum()(mine), "written": fresh.sum(),
                    "list": ops.stack((mine, mine)).sum(), "by name": mint.add(input=mine, other=1).sum(),
                    "in place": ops.ones(3, ms.int32).add_(mine).sum()}
            for name, x in made.items():
                for ask in (int, float, bool, Tensor.item, Tensor.tolist, Tensor.asnumpy):
                    if kernels:
                        assert ask(x) is not None, name
                    else:
                        with pytest.raises(OpRuleError, match=r"asks for a value.*\n.*\[\]\n"):
                            pytest.fail(f"{name}: {ask(x)}")
            assert (whole * 2).sum().item() == 48 if kernels else np.isnan((whole * 2).sum().item())
            again = md.DTensor.from_local(mine + 1, mesh, [md.Shard(0)])  # what is unknown goes back: an operand as any
            assert (again + ids).placements == (md.Shard(0),) and type((again + ids).to_local() * 2).__name__ == (
                "Tensor" if kernels else "Unknown")
            own = Tensor(np.arange(3)) + 1
            assert int(own.sum()) == 6 and own.tolist() == [1, 2, 3], "what has values gives them"
            back = md.DTensor.from_local(Tensor(np.arange(3)), mesh, [md.Shard(0)]).to_local()
            assert int(back.sum()) == 3 and (back + 1).asnumpy().tolist() == [1, 2, 3]
            with pytest.raises(MixedOperandError):
                ids * mine
            gradient = ms.grad(lambda x: (x.to_local() ** 2).sum())(scores)  # its nodes are MindSpore's own
            assert gradient.shape == (4, 3)
    line = sys._getframe().f_lineno
    with dry_run(world=2, device="CPU", values={f"test_dry_run.py:{line + 3}": 7}):
        x = md.full((4,), 3, device_mesh=md.init_device_mesh("cpu", (2,)), dtype=ms.int32)
        assert int((x.to_local() + 1).sum()) == 7


def _totals(changes):
    total = 0
    for change in changes:
        total += change.bytes
        yield change.at, total


def test_experts_of_a_host_are_one_node():
    """As with kernels: products there and back; two hidden rows of each choice are kept beside its operands, and memory for
    the expert that has most is there while a backward runs."""
    rows, k, d, f = 16, 2, 8, 12
    with dry_run(world=1, device="CPU", values={"experts": 4}) as run:
        mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
        x, weights = (md.zeros(rows, n, device_mesh=mesh) for n in (d, k))
        ws = [md.zeros(*shape, device_mesh=mesh) for shape in ((4, f, d), (4, d, f), (4, f, d))]
        chosen = md.DTensor.from_local(Tensor(np.zeros((rows, k), np.int32)), mesh)
        held = []

        def loss(x, weights, *ws):
            before = run.memory().end["activations"]
            y = md.moe(x, weights, chosen, *ws)
            held.append(run.memory().end["activations"] - before)
            return y.sum()
        _, grads = md.value_and_grad(loss, (0, 1, 2, 3, 4))(x, weights, *ws)
    at = next(i for i, e in enumerate(run.events) if e.op == "swiglu_rows" and e.phase == "backward") + 1
    held_at = {n: sum(kinds.values()) for n, kinds in run.memory().over_time()}
    scratch, given = 4 * (rows * k // 4) * (3 * d + 4 * f), 4 * (rows * d + rows * k + 12 * f * d)
    most = max(now for n, now in _totals(run.memory().changes) if n == at)
    assert most - held_at[at - 1] == scratch + given
    found = [(e.phase, e.flops) for e in run.events if e.op == "swiglu_rows"]
    assert found == [("forward", 6 * rows * k * d * f), ("backward", 12 * rows * k * d * f)]
    assert held == [4 * (rows * d + 2 * rows * k * f)]
    assert [tuple(g.shape) for g in grads] == [(rows, d), (rows, k), (4, f, d), (4, d, f), (4, f, d)]


@pytest.mark.parametrize("how", [{"dedup": False}, {"dedup": True}, {"room": 4}])
def test_experts_of_a_device(how):
    """Its grouped products are seen, and what waits for tokens; shared experts lie between; also in a second dry run."""
    rows, k, d, f = 16, 2, 8, 12
    for behind in (False, True, True):
        with dry_run(world=2, device="Ascend", values={"experts": 4}) as run:
            mesh = md.init_device_mesh("npu", (2,), mesh_dim_names=("ep",))
            x, weights = (md.zeros(rows, n, device_mesh=mesh, placements=[md.Shard(0)]) for n in (d, k))
            ws = [md.zeros(*s, device_mesh=mesh, placements=[md.Shard(0)]) for s in ((4, f, d), (4, d, f), (4, f, d))]
            chosen = md.DTensor.from_local(Tensor(np.zeros((rows // 2, k), np.int32)), mesh, [md.Shard(0)])
            shared = {} if behind else {"shared": mint.tanh}

            def loss(x, weights, *ws):
                y = md.moe(x, weights, chosen, *ws, **how, **shared)  # noqa: B023
                return (y + mint.tanh(x) if behind else y).sum()  # noqa: B023
            _, grads = md.value_and_grad(loss, (0, 1, 2, 3, 4))(x, weights, *ws)
        assert [tuple(g.shape) for g in grads] == [(rows, d), (rows, k), (4, f, d), (4, d, f), (4, f, d)]
        ops, back = ([e.op for e in run.events if e.phase == phase] for phase in ("forward", "backward"))
        assert ops.count("grouped_matmul") == back.count("grouped_matmul") == 3
        last_sent = [i for i, op in enumerate(ops) if op == "all_to_all"][-2]  # behind it they come home
        assert (last_sent < ops.index("tanh") < ops.index("grouped_matmul")) != behind, ops
        products, sent = (max(i for i, op in enumerate(back) if op == what) for what in ("grouped_matmul", "all_to_all"))
        assert (products < sent < back.index("tanh")) != behind, back
        sent_there = [i for i, e in enumerate(run.events) if e.op == "all_to_all" and e.phase == "forward"]
        dispatch = sent_there[-4 if how.get("dedup") else -2]  # weights and choices go behind tokens
        assert any(dispatch in e.after for e in run.events), "what is made of tokens waits for them"


def test_methods_of_tensors_are_mindspores_again_behind_a_dry_run():
    """Also where the step raised: every program that comes after would pay for them."""
    names = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")
    before = [getattr(ms.Tensor, name) for name in names]
    with pytest.raises(KeyError), md.debug.dry_run(world=2):
        assert ms.Tensor.item is not before[0]
        raise KeyError
    assert [getattr(ms.Tensor, name) for name in names] == before


def test_what_has_no_data_is_neither_read_nor_written(tmp_path):
    """Each of these gave zeros, wrote them, or wrote where there is no memory."""
    with dry_run(world=4, device="CPU"):
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        net = md.parallelize_module(mint.nn.Linear(64, 256), mesh, md.ColwiseParallel(use_local_output=False))
        x = md.zeros(8, 64, device_mesh=mesh, placements=[md.Shard(0)])
        _, grads = ms.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(x)
        whole = x.full_tensor()
        alike = md.zeros(8, 64, device_mesh=mesh)
        for asks, said in ((lambda: whole.asnumpy(), "'asnumpy' at .*test_dry_run.py"),
                           (lambda: np.asarray(whole), "'__array__' at .*test_dry_run.py"),
                           (lambda: alike[alike > 0], "of a mask' at .*test_dry_run.py"),
                           (lambda: nn.Adam(net.trainable_params())(grads), "MindSpore's Adam is not known"),
                           (lambda: md.checkpoint.save({"net": net}, tmp_path / "ours"), "'save', a dry run is under way"),
                           (lambda: md.checkpoint.load({"net": net}, tmp_path / "ours"), "'load', a dry run is under way"),
                           (lambda: ms.save_checkpoint(net, str(tmp_path / "theirs.ckpt")), "'save_checkpoint', a dry run")):
            with pytest.raises(OpRuleError, match=said):
                asks()
    assert not list(tmp_path.iterdir())


def test_writes_take_no_memory_and_copies_count():
    with dry_run(world=4, device="CPU") as run:
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        net = md.parallelize_module(mint.nn.Linear(64, 256, bias=False), mesh, md.ColwiseParallel())
        p, z = net.weight, md.zeros(256, 64, device_mesh=mesh, placements=[md.Shard(0)])
        run.forget()
        before = run.memory().end
        p.copy_(z)
        ms.ops.assign(p, z)
        p[0] = 1.0
        p.add_(1.0)
        assert run.memory().end == before and not any(Tensor.stride(p))
        copied = copy.deepcopy(net)
        assert not any(Tensor.stride(copied.weight)) and copied.weight.placements == p.placements
        assert run.memory().end["parameters"] == 2 * before["parameters"]


def test_one_at_a_time_told_by_name_and_what_is_plain_is_said():
    said = []

    def other():
        try:
            with dry_run(world=2, device="CPU"):
                pass
        except ConfigError as error:
            said.append(str(error))
    with dry_run(world=2, device="CPU"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another one is under way" in said[0]
    with dry_run(world=2, device="CPU") as run:
        mint.matmul(Tensor(np.ones((2, 2), np.float32)), Tensor(np.ones((2, 2), np.float32)))
    assert run.flops() == 0 and "not counted" in run.assumed["plain tensors"]
    for wrong in ({"values": [1]}, {"messages": "x"}):
        with pytest.raises(ConfigError, match="has a name"), dry_run(world=2, **wrong):
            pass
