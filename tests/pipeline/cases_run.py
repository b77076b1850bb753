# SPDX-License-Identifier: Apache-2.0
"""Pipelines on real ranks against one device: loss and every gradient, and what was sent."""
import itertools
import math
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.dispatch import recording
from ms_dtensor.errors import ConfigError, LayoutError, ScheduleError
from ms_dtensor.parallel.sharding import reduce
from ms_dtensor.pipeline import (
    Actions,
    Schedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBH1,
    ScheduleZBVZeroBubble,
    gpipe,
    pipeline,
)
from ms_dtensor.pipeline import step as running
from tests.cases import case, cases
from tests.operands import filled
from tests.support import each, refusal, set_trained
from tests.tiers import sampled

RNG = np.random.default_rng(11)
ROWS = 24
X, T = (RNG.normal(size=(ROWS, 4)).astype(np.float32) for _ in range(2))
PLACES = RNG.normal(1, 0.2, size=(ROWS, 4)).astype(np.float32)


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(4, 8), nn.Dense(8, 4)

    def construct(self, x, places=None):
        y = self.down(mint.tanh(self.up(x)))
        return x + (y if places is None else y * places)


class Net(nn.Cell):
    """Blocks in a list, one cell before and one behind."""

    def __init__(self, count: int = 6, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.layers = nn.CellList([Block() for _ in range(count)])
        self.last = nn.Dense(4, 4, has_bias=False)
        if tied:
            self.last.weight = self.first.weight

    def construct(self, x, places=None):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, places)
        return self.last(x)


def loss_fn(y, t):
    return ((y - t) ** 2).mean() + (y ** 3).mean() * 0.1


def one_device(net, places: bool, x=X, t=T):
    extra = (Tensor(PLACES),) if places else ()
    loss, grads = ms.value_and_grad(lambda x: loss_fn(net(x, *extra), Tensor(t)), None, net.trainable_params())(Tensor(x))
    return float(loss), {name: g.asnumpy() for (name, _), g in zip(
        [(n, p) for n, p in net.parameters_and_names() if p.requires_grad], grads)}


def close(got, want, what: str, bar: float = 1e-6) -> None:
    got = got.full_tensor() if isinstance(got, md.DTensor) else got
    got = got.asnumpy() if isinstance(got, Tensor) else got
    off = np.abs(got - want).max() / max(np.abs(want).max(), 1e-3)
    assert off <= bar, f"{what}: off by {off:.2e} of the largest element"


KINDS = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
         "zbh1": (ScheduleZBH1, 1), "zbv": (ScheduleZBVZeroBubble, 2), "dualpipev": (ScheduleDualPipeV, 2)}
VEES = ("zbv", "dualpipev")
IN_PARTS = ("zbh1", *VEES)  # whose backward runs in two parts


def style_of(name: str) -> str:
    return "v" if name in VEES else "loop"


def right(schedule, want, what: str, target=None, bar: float = 2e-6, **given) -> None:
    loss, grads = schedule.step(*given.pop("args", (Tensor(X),)), target=Tensor(T) if target is None else target, **given)
    close(loss, np.array(want[0]), f"{what}: loss", bar)
    # of tied parameters one device has the sum, by the name of the first
    names = {id(p): n for stage in schedule.stages.values() for n, p in stage.module.parameters_and_names()}
    assert len(grads) == len(schedule.params)
    for p, g in zip(schedule.params, grads):
        name = names[id(p)]
        close(g, want[1][name if name in want[1] else "first.weight"], f"{what}: {name}", bar)


UNEVEN = [["first"], [f"layers.{i}" for i in range(5)], [], ["layers.5", "last"]]  # and one without a cell


@cases(2, {"side_inputs_are_cut_by_each_rank": (4, 2, 1, True),
           "tied_weights_of_first_and_last_stage": (4, 2, 0, False, True)})
@cases(4, {"uneven_and_empty_stages": (4, 1, 0, False, False, UNEVEN)})
def every(world, m: int, one_of: int = 1, first: int = 0, places: bool = False, tied: bool = False, split=None) -> None:
    """Kinds of schedules; `one_of`, `first`: at push one of so many of them, from this one on."""
    mesh = md.init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))

    @each((name, m) for name in sampled(KINDS, one_of, first)
          if not (name == "interleaved" and m % world.size or split is not None and KINDS[name][1] > 1))
    def steps(name, m):
        net, (kind, v) = filled(Net(tied=tied)), KINDS[name]
        want = one_device(net, places)
        stages = pipeline(net, mesh, split=split or "cost", n_stages=v * world.size, style=style_of(name))
        schedule = kind(stages, m, loss_fn)
        extra = {"places": Tensor(PLACES)} if places else {}
        for step in range(2):
            with comm.record() as events:
                right(schedule, want, f"step {step}", **extra)
            assert {e.op for e in events} <= {"exchange", "broadcast"}, "nothing but messages, and the loss"
        close(schedule.eval(Tensor(X), target=Tensor(T), **extra), np.array(want[0]), "evaluation", 2e-6)


def schedules_of_two(world):
    for m in sampled((1, 2, 4), 2):
        every(world, m, 1 if m > 1 else 3)  # one in which nothing is beside anything


@case(4, timeout=120)
def schedules_of_four(world):
    for m in sampled((4, 8), 2):
        every(world, m)


def borders_before_and_behind_a_list_of_cells(world):
    """The list is iterated over, never called: each of its cells is one of the chain, whatever is named."""
    for split in (["last"], ["layers"], [["first", "layers"], ["last"]]):
        every(world, 4, 2, 1, split=split)  # those of one stage a rank take names


@cases(2, {"norm_over_stages_of_tied_weights": ("cost", True)})
@cases(4, {"norm_over_stages_of_which_one_is_empty": (UNEVEN, False)})
def normed(world, over_split, tied: bool) -> None:
    """The norm is one device's, on all ranks, also on one without parameters; and gradients are scaled by it."""
    mesh = md.init_device_mesh("cpu", (world.size,), mesh_dim_names=("pp",))
    net = filled(Net(tied=tied))
    _, want = one_device(net, False)
    for norm_type in (2.0, math.inf, 3.0):
        values = [np.abs(g).astype(np.float64) for g in want.values()]
        norm = max(v.max() for v in values) if math.isinf(norm_type) else sum(
            (v ** norm_type).sum() for v in values) ** (1 / norm_type)
        schedule = Schedule1F1B(pipeline(net, mesh, split=over_split), 4, loss_fn)
        _, grads = schedule.step(Tensor(X), target=Tensor(T))
        if grads:
            told(ConfigError, "one stage of a pipeline", lambda g=grads, s=schedule, n=norm: md.optim.clip_grad_norm_(
                zip(s.params, g), n / 2))
        before = [g.asnumpy().copy() for g in grads]
        with comm.record() as events:
            got = md.optim.clip_grad_norm_(zip(schedule.params, grads), norm / 2, norm_type, over=mesh)
        assert abs(got / norm - 1) < 1e-6, (got, norm)
        assert [e.op for e in events] == ["all_reduce"]
        for g, b in zip(grads, before):
            close(g, b / 2, "a clipped gradient", 1e-5)


WAYS = {
    "tp": lambda stage, mesh: md.distribute_module(md.parallelize_module(stage, mesh["tp"], {
        f"layers.*.{name}": style(use_local_output=False)  # one plan for all stages, also where one has no block
        for name, style in (("up", md.ColwiseParallel), ("down", md.RowwiseParallel))}), mesh["tp"]),
    "tp, recompute": lambda stage, mesh: (WAYS["tp"](stage, mesh), [
        md.checkpoint_wrapper(c, save=save) for c, save in zip(stage.layers, (None, [mint.tanh]) * 3)
        if isinstance(c, Block)]),
    "replicate": lambda stage, mesh: md.replicate(stage, mesh=mesh["dp"]),
    "fully_shard": lambda stage, mesh: md.fully_shard(stage, mesh=mesh["dp"]),
    "blocks": lambda stage, mesh: [md.fully_shard(c, mesh=mesh["dp"]) for c in (*stage.layers, stage)
                                   if list(c.get_parameters())],
    "recompute": lambda stage, mesh: (md.replicate(stage, mesh=mesh["dp"]), [
        md.checkpoint_wrapper(c) for c in stage.layers if isinstance(c, Block)]),
    "selective": lambda stage, mesh: (md.replicate(stage, mesh=mesh["dp"]), [
        md.checkpoint_wrapper(c, save=[mint.tanh]) for c in stage.layers if isinstance(c, Block)]),
}


def beside(world, way: str, name: str) -> None:
    kind, v = KINDS[name]
    other = "tp" if way.startswith("tp") else "dp"
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", other))
    net = filled(Net())
    want = one_device(net, False)
    stages = pipeline(net, mesh["pp"], n_stages=2 * v, style=style_of(name))
    for stage in stages:
        WAYS[way](stage.module, mesh)
    here, m = mesh[other], 4
    rows = [md.Replicate() if other == "tp" else md.Shard(0)]
    x, t = (md.distribute_tensor(Tensor(a), here, rows, src_data_rank=None) for a in (X, T))
    schedule = kind(stages, m, loss_fn)
    for step in range(2):
        with comm.record() as events:
            right(schedule, want, f"step {step}", t, args=(x,))
        sums = [e for e in events if e.phase == "backward" and e.axes == ("dp",) and e.op in ("all_reduce", "reduce_scatter")
                and "gradient" in e.src + e.dst]
        units = sum(len(s.module.trainable_params()) > 0 for s in stages) if way != "blocks" else 1 + sum(
            bool(list(c.get_parameters())) for s in stages for c in (*s.module.layers, s.module))
        if other == "dp":
            assert 0 < len(sums) <= units, f"reduced once a step, not once a microbatch: {len(sums)} of {units}"


def beside_other_axes(world, names, first: int) -> None:
    """`first`: at push those in one part and those in several take turns with the ways, and every name has one."""
    each(sampled(itertools.product(WAYS, names), 8, first))(lambda way, name: beside(world, way, name))


@case(4, timeout=180)
def pipelines_beside_other_axes(world):
    beside_other_axes(world, ("gpipe", "1f1b", "interleaved"), 0)


@cases(2, {"one_data_rank_holds_no_gradient_back": (1, reduce, "fresh", ("1f1b", "1f1b"))})
@cases(4, {"zeros_of_gradients_held_back_are_not_added_up": (2, running, "added", ("1f1b", "zbh1"))})
def without_zeros(world, data_ranks: int, module, makes: str, names) -> None:
    """On one data rank nothing is waited for, so no zeros are handed out: each micro-batch's gradients are the step's own.

    Of several, what micro-batches owe comes with the last one, so a step has nothing to add.
    """
    mesh = md.init_device_mesh("cpu", (2, data_ranks), mesh_dim_names=("pp", "dp"))
    x, t = (md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (X, T))
    for way, name in zip(("blocks", "replicate"), names):
        net = filled(Net())
        want, stages = one_device(net, False), pipeline(net, mesh["pp"])
        WAYS[way](stages[0].module, mesh)
        for step in range(2):
            with mock.patch.object(module, makes, side_effect=AssertionError(makes)):
                right(KINDS[name][0](stages, 4, loss_fn), want, f"{way}, step {step}", t, args=(x,))


@case(4, timeout=180)
def tied_over_two_stages_of_one_rank_beside_data_ranks(world):
    """Each stage has a unit of its own for the same parameter, and one holds it back while the other does not."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    x, t = (md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (X, T))

    @each(sampled(itertools.product(("fully_shard", "replicate", "blocks"), VEES), 2))  # each way at push
    def steps(way, name):
        net = filled(Net(tied=True))
        want, stages = one_device(net, False), pipeline(net, mesh["pp"], n_stages=4, style="v")
        for stage in stages:
            WAYS[way](stage.module, mesh)
        schedule = KINDS[name][0](stages, 4, loss_fn)
        for step in range(2):
            right(schedule, want, f"step {step}", t, args=(x,))


class Scaled(nn.Cell):
    """What is done between cells: nothing, a scale behind the first, a residual around the second, a shift at the end."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between, self.a, self.b, self.c = between, nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        y = self.a(x)
        y = y * 2 if self.between == "scale" else y
        y = y + self.b(mint.tanh(y)) if self.between == "residual" else self.b(y)
        y = self.c(y)
        return y + 1 if self.between == "shift" else y


def what_is_done_beside_missing_cells_is_refused(world):
    """Only where a border is: within a stage it is the model's business."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    @each([("", "b", ()), ("", "c", ()), ("scale", "b", (0, 1)), ("scale", "c", (1,)), ("residual", "b", (0, 1)),
           ("residual", "c", (0, 1)), ("shift", "b", (0,)), ("shift", "c", (0,))])
    def steps(between, at, refused):
        net = filled(Scaled(between))
        stage, = pipeline(net, mesh, split=[at])
        if not refused:
            right(Schedule1F1B(stage, 4, loss_fn), one_device(filled(Scaled(between)), False), at)
        elif world.rank in refused:  # each stage by itself: what it would be handed is of the same shape
            told(LayoutError, "is not what", lambda: stage.module(Tensor(X)))
        else:
            stage.module(Tensor(X))


def parameters_frozen_and_unfrozen_between_steps(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    for name in ("1f1b", *IN_PARTS):
        net, plain = filled(Net()), filled(Net())
        schedule = KINDS[name][0](pipeline(net, mesh, style=style_of(name)), 4, loss_fn)
        for trained in (True, False, True):
            set_trained(trained, net.layers[0], plain.layers[0])
            right(schedule, one_device(plain, False), f"{name}, {trained=}")


class Stopped(Block):
    def construct(self, x, places=None):
        return ops.stop_gradient(super().construct(x, places))


def frozen_stages_that_stop_gradients_have_no_backward(world):
    """As docs/pipeline.md says; their messages are sent all the same. Without the stop that of the second one runs."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def calls(name: str, split: list, stop: bool) -> int:
        net = Net()
        if stop:
            net.layers[2] = Stopped()
        filled(net)
        set_trained(False, net.first, *net.layers[:3])
        want = one_device(net, False)
        schedule = KINDS[name][0](pipeline(net, mesh, split=split, style=style_of(name)), 4, loss_fn)
        ran = mock.patch.object(recording, "run_backward", side_effect=recording.run_backward)
        with ran as run, comm.record() as events:
            right(schedule, want, f"{name}, {stop=}")
        borders = len(split)
        assert sum(e.op == "exchange" and e.shape == (6, 4) for e in events) == 4 * (borders - (name == "zbv")), events
        return run.call_count
    for name in ("1f1b", "zbh1"):  # nobody wants the gradient of the batch
        assert (not calls(name, ["layers.3"], False)) == (world.rank == 0), name
    for name in ("interleaved", "zbv"):
        stopped, not_stopped = (calls(name, ["layers.1", "layers.3", "layers.5"], stop) for stop in (True, False))
        assert (stopped < not_stopped) == (world.rank == 1), (name, stopped, not_stopped)


def batches_of_ints_and_losses_of_doubles(world):
    """An int batch that a plain gradient has met is marked by MindSpore; and a loss has the dtype that it has."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def model():
        net = nn.SequentialCell(nn.Embedding(10, 4), nn.Dense(4, 4))
        return filled(net)
    ids = Tensor(np.arange(24) % 10, ms.int32)
    plain = model()
    value, grads = ms.value_and_grad(lambda x: loss_fn(plain(x), Tensor(T)), None, plain.trainable_params())(ids)
    schedule = Schedule1F1B(pipeline(model(), mesh, split=["1"]), 3, loss_fn)
    loss, mine = schedule.step(ids, target=Tensor(T))
    close(loss, value.asnumpy(), "loss")
    close(mine[0], grads[0 if world.rank == 0 else 1].asnumpy(), "gradient")
    def square(y, t):
        return (y.astype(ms.float64) ** 2).mean()
    loss, _ = Schedule1F1B(pipeline(model(), mesh, split=["1"]), 3, square).step(ids, target=Tensor(T))
    assert loss.dtype == ms.float64
    # a third of each: a Python number would be rounded to float32 beside it
    close(loss, np.mean([square(plain(Tensor(part)), None).asnumpy() for part in np.split(ids.asnumpy(), 3)]),
          "loss in float64", 1e-14)


def told(kind, text: str, call) -> None:
    assert text in refusal(call, kind)


def refusals_before_anything_is_sent(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stages = pipeline(filled(Net()), mesh)
    with comm.record() as events:
        told(LayoutError, "24 rows are not cut into 5", lambda: Schedule1F1B(stages, 5, loss_fn).step(
            Tensor(X), target=Tensor(T)))
        told(LayoutError, "a tensor has 12 rows, and the batch 24", lambda: Schedule1F1B(stages, 4, loss_fn).step(
            Tensor(X), target=Tensor(T[:12])))
        told(LayoutError, "a NumPy array was given", lambda: Schedule1F1B(stages, 4, loss_fn).step(Tensor(X), target=T))
        told(ScheduleError, "no loss function", lambda: Schedule1F1B(stages, 4).step(Tensor(X)))
        told(ScheduleError, "are not those of the order", lambda: Schedule(stages, 4, loss_fn, actions=gpipe(4, 4)))
        told(ScheduleError, "are not those of the order", lambda: ScheduleZBVZeroBubble(stages, 4, loss_fn))
        told(ScheduleError, "has 1 faults", lambda: Schedule(stages, 2, loss_fn, actions=Actions.parse(
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")))
        told(ScheduleError, "3 weights", lambda: Schedule1F1B(stages, 4, loss_fn).step(
            Tensor(X), target=Tensor(T), weights=[1, 2, 3]))
    assert not events
    right(Schedule1F1B(stages, 4, loss_fn), one_device(filled(Net()), False), "a step after them")
