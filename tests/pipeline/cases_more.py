# SPDX-License-Identifier: Apache-2.0
"""Pipelines with what is less usual: hyper_parallel's names; several tensors over borders, and empty ones, in all orders;
cells at several places; stages for which a plan says nothing, that share weights, or whose actions are timed.
"""
import time

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.compat import hyper_parallel as hyper
from ms_dtensor.compat.backward import enable_mindspore_backward_compat
from ms_dtensor.errors import CollectiveMismatch, ConfigError, LayoutError, PeerLost
from ms_dtensor.pipeline import PipelineStage, Schedule1F1B, draw, pipeline, simulate
from ms_dtensor.pipeline.actions import computing
from tests.cases import case
from tests.operands import Built, filled
from tests.pipeline.cases_run import KINDS, Net, T, X, close, loss_fn, one_device, right, style_of
from tests.support import each, refusal
from tests.tiers import sampled


def none(x):
    """No rows of it; of `x[:0]` MindSpore's CPU kernel refuses the gradient."""
    return mint.narrow(x, 0, 0, 0)


class Part(nn.Cell):
    """A stage that hands on a tensor of floats, another one, one without elements, a number of floats, and ints."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(Tensor(np.zeros((4, 4), np.float32)), name="w")
        self.b = Parameter(Tensor(np.zeros(4, np.float32)), name="b")

    def construct(self, x, y=None, empty=None, scale=None, ids=None):
        if y is None:
            y, empty, scale, ids = x * 0.5, none(x) * 2, x.mean(), Tensor([1, 2], ms.int32)
        z = mint.tanh(mint.matmul(x, self.w)) + self.b
        return z + y * ids.sum(), y * 1.5 - x, mint.cat([empty, none(x)]), scale * z.sum(), ids


def loss(out, t):
    # not a sum of the empty one: on CPU MindSpore 2.10 gives what was in memory before
    return loss_fn(mint.cat([out[2], out[0] + out[1]]), t) + out[3] * 0.1


def several_and_empty_tensors_in_all_orders(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    @each(sampled(KINDS, 3, 2))
    def steps(name):
        kind, v = KINDS[name]
        owner = [0, 1] * v if v == 1 or name == "interleaved" else [0, 1, 1, 0]
        nets, m = [filled(Part(), seed) for seed in range(len(owner))], 4

        def whole(x, t):
            out = (x,)
            for net in nets:
                out = net(*out)
            return loss(out, t)
        value, grads = 0.0, [0.0] * (2 * len(nets))
        for x, t in zip(np.split(X, m), np.split(T, m)):  # a mean of the batch is not one of its parts
            params = [p for n in nets for p in (n.w, n.b)]
            one, some = ms.value_and_grad(whole, None, params)(Tensor(x), Tensor(t))
            value, grads = value + float(one) / m, [a + b.asnumpy() / m for a, b in zip(grads, some)]
        stages = [PipelineStage(nets[s], s, len(owner), mesh) for s, rank in enumerate(owner) if rank == world.rank]
        schedule = kind(stages, m, loss)
        for _ in range(2):
            got, mine = schedule.step(Tensor(X), target=Tensor(T))
            close(got, np.array(value), "loss", 2e-6)
            want = [grads[2 * stage.stage_index + i] for stage in stages for i in (0, 1)]
            for i, (a, b) in enumerate(zip(mine, want)):
                close(a, b, f"parameter {i}", 2e-6)


def chunk(last: bool) -> nn.Cell:
    """hyper_parallel's last stage has the loss in it."""
    return Built(lambda c, x: (mint.tanh(c.layer(x)) ** 2).mean() if last else mint.tanh(c.layer(x)), layer=nn.Dense(4, 4))


class Halved(hyper.PipelineStage):
    def get_last_stage_sens(self, last_stage_outputs):
        return 0.5


def a_cell_at_several_places_is_one_of_each_stage(world):
    """An activation, and a norm, whose gradient is that of all places."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    @each(sampled(KINDS, 2))
    def steps(name):
        kind, v = KINDS[name]
        act, norm = nn.Tanh(), nn.LayerNorm((4,))
        first, second, third, last = (nn.Dense(4, 4) for _ in range(4))
        net = filled(nn.SequentialCell(first, act, norm, second, act, norm, third, act, last))
        params = net.trainable_params()
        loss, grads = ms.value_and_grad(lambda x: loss_fn(net(x), Tensor(T)), None, params)(Tensor(X))
        want = {id(p): g.asnumpy() for p, g in zip(params, grads)}
        schedule = kind(pipeline(net, mesh, n_stages=2 * v, style=style_of(name)), 2, loss_fn)
        for _ in range(2):
            got, grads = schedule.step(Tensor(X), target=Tensor(T))
            close(got, loss.asnumpy(), "loss")
            for p, g in zip(schedule.params, grads, strict=True):
                close(g, want[id(p)], p.name)


def twice() -> nn.Cell:
    """Calls a cell once more, behind one that comes later."""
    return Built(lambda c, x: c.act(c.second(c.act(c.first(x)))), first=nn.Dense(4, 4), act=nn.Tanh(), second=nn.Dense(4, 4))


def cells_that_run_in_another_order_than_stages_are_refused(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule = Schedule1F1B(pipeline(filled(twice()), mesh, split=["second"]), 2, loss_fn)
    text = refusal(lambda: schedule.step(Tensor(X), target=Tensor(T)), (LayoutError, PeerLost))
    assert "'act' is called behind 'second'" in text, text
    net = filled(twice())
    loss = loss_fn(net(Tensor(X)), Tensor(T))
    for split in (["act"], ["first"]):
        schedule = Schedule1F1B(pipeline(net, mesh, split=split), 2, loss_fn)
        close(schedule.step(Tensor(X), target=Tensor(T))[0], loss.asnumpy(), f"{split}")


def hyper_parallels_names(world):
    """The first rank passes the batch; the last has the losses; gradients are sums over microbatches."""
    nets, m = [filled(chunk(s == 1), s) for s in range(2)], 4
    plain = [filled(chunk(s == 1), s) for s in range(2)]
    params = [p for n in plain for p in n.trainable_params()]
    losses, sums = [], [0.0] * len(params)
    for x in np.split(X, m):
        one, some = ms.value_and_grad(lambda x: plain[1](plain[0](x)), None, params)(Tensor(x))
        losses, sums = [*losses, float(one)], [a + b.asnumpy() for a, b in zip(sums, some)]
    mine = sums[2 * world.rank:2 * world.rank + 2]
    for kind, sens, scale in ((hyper.Schedule1F1B, hyper.PipelineStage, 1.0), (hyper.ScheduleGPipe, Halved, 0.5)):
        schedule = kind(sens(nets[world.rank], world.rank, 2), m)
        with comm.record() as events:
            got, grads = schedule.run(*([Tensor(X)] if world.rank == 0 else []))
        assert {e.op for e in events} == {"exchange", "broadcast"}
        assert len(got) == (m if world.rank == 1 else 0)
        for a, b in zip(got, losses):
            close(a, np.array(b), "loss", 2e-6)
        for a, b in zip(grads, mine, strict=True):
            close(a, b * scale, "gradient", 2e-6)
    with enable_mindspore_backward_compat():  # as MindFormers runs it: outputs alone, and gradients are added to .grad
        for times in (1.0, 2.0):
            got = schedule.run(*([Tensor(X)] if world.rank == 0 else []))
            assert isinstance(got, list) and len(got) == (m if world.rank == 1 else 0)
            for p, b in zip(schedule.params, mine, strict=True):
                close(p.grad, b * 0.5 * times, "gradient in .grad", 4e-6)
    stage = hyper.PipelineStage(nets[0], 0, 2)
    for used in (lambda: setattr(schedule, "micro_batch_num", 8), lambda: schedule.register_custom_function("B_F", print),
                 lambda: hyper.PipelineStage(nets[0], 0, 2, has_backward=False),
                 *(lambda how=how: hyper.Schedule1F1B(stage, m, **{how: True})
                   for how in ("overlap_b_f", "enable_dxdw_split", "swap"))):
        assert "not offered" in refusal(used, ConfigError)
    assert schedule.micro_batch_num == m and "0F0" in schedule.exec_order
    seed = stage.get_last_stage_sens
    assert (seed(Tensor(1.0)), seed((Tensor(1.0), Tensor(2.0)))) == (1.0, [1.0, 1.0])


def hyper_parallels_interleaved_stages(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    nets, plain = ([filled(chunk(s == 3), s) for s in range(4)] for _ in range(2))
    params = [p for n in plain for p in n.trainable_params()]

    def whole(x):
        for net in plain:
            x = net(x)
        return x
    _, want = ms.value_and_grad(whole, None, params)(Tensor(X))  # a mean over as many rows each, so four times that
    stages = [hyper.PipelineStage(nets[s], s, 4, mesh=mesh) for s in (world.rank, world.rank + 2)]
    _, grads = hyper.ScheduleInterleaved1F1B(stages, 4).run(*([Tensor(X)] if world.rank == 0 else []))
    mine = [want[2 * s + i].asnumpy() * 4 for s in (world.rank, world.rank + 2) for i in (0, 1)]
    for a, b in zip(grads, mine, strict=True):
        close(a, b, "gradient", 2e-6)


@case(4)
def a_plan_for_one_stage_alone(world):
    """What lies over data axes alone on the others meets it all the same, whichever of the two comes first."""
    mesh = md.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    plan = {"layers.1.up": md.ColwiseParallel(use_local_output=False),
            "layers.1.down": md.RowwiseParallel(use_local_output=False)}
    x, t = (md.distribute_tensor(Tensor(a), mesh["dp", "tp"], [md.Shard(0), md.Replicate()]) for a in (X, T))

    @each((way, parts) for way in ("fully_shard", "replicate", "zero1") for parts in (["layers.1"], ["layers.2"]))
    def steps(way, parts):
        net = filled(Net(3))
        want = one_device(net, False)
        stages = pipeline(net, mesh["pp"], split=parts)
        for stage in stages:
            md.parallelize_module(stage.module, mesh["tp"], plan)
            if way == "fully_shard":
                md.fully_shard(stage.module, mesh=mesh["dp"])
            else:
                md.replicate(stage.module, mesh=mesh["dp"], zero1=way == "zero1")
        right(KINDS["interleaved"][0](stages, 2, loss_fn), want, "step", t, args=(x,))


def four(*ties: tuple[int, int]) -> nn.Cell:
    """Four layers, a stage each; of a pair of them the weight is one."""
    net = nn.SequentialCell(*(nn.Dense(4, 4, activation="tanh") for _ in range(4)))
    for first, other in ties:
        net[other].weight = net[first].weight
    return filled(net)


def stepped(schedule, net, ties, what: str) -> None:
    """A step against one device, whose names of tied weights are the first's."""
    loss, grads = one_device(net, False)
    again = {f"{b}.weight": grads[f"{a}.weight"] for a, b in ties if f"{a}.weight" in grads}
    right(schedule, (loss, grads | again), what, bar=1e-6)


def tied_weights_that_ranks_come_to_in_another_order(world):
    """Rank 0 has the first of one pair and the second of the other; in the order of its stages it would exchange them
    crosswise, and as they are of one size nobody would notice."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    @each([("zbv", ((0, 2), (1, 3))), ("dualpipev", ((0, 2), (1, 3))), ("interleaved", ((0, 3), (1, 2)))])
    def steps(name, ties):
        kind, _ = KINDS[name]
        stages = pipeline(four(*ties), mesh, split=["1", "2", "3"], style=style_of(name))
        schedule = kind(stages, 4, loss_fn)
        with comm.record() as events:
            stepped(schedule, four(*ties), ties, name)
        assert sum(e.op == "exchange" and e.shape == (4, 4) for e in events) == 2, "one for each pair"


def tied_weights_that_are_frozen(world):
    """On all ranks that have it, a step goes on without it; on one of them it is refused on all, by name."""
    mesh, ties = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), ((0, 3),)
    net = four(*ties)
    schedule = KINDS["1f1b"][0](pipeline(four(*ties), mesh, split=["2"]), 4, loss_fn)
    tied = next(p for p in schedule.params if p.shape == (4, 4) and p.name.startswith("0."))
    for trained in (True, False, True):
        tied.requires_grad = net[0].weight.requires_grad = trained
        stepped(schedule, net, ties, f"{trained=}")
    tied.requires_grad = world.rank == 0
    text = refusal(lambda: schedule.step(Tensor(X), target=Tensor(T)), CollectiveMismatch)
    assert "tied weight '0.weight' is frozen" in text and "tied weight '0.weight' is trained" in text
    tied.requires_grad = True
    stepped(schedule, net, ties, "after it")


@case(4)
def tied_weights_of_which_ranks_have_other_rows(world):
    """Parts of one size were added up, whatever their rows; now the step is refused on all ranks, with the rows of each."""
    mesh, ties = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), ((0, 3),)
    x, t = (md.distribute_tensor(Tensor(values), mesh["dp"], [md.Shard(0)]) for values in (X, T))

    def schedule(*fused: bool):
        stages = pipeline(four(*ties), mesh["pp"], split=["2"])
        for stage in stages:
            by_halves = fused[stage.stage_index]
            md.fully_shard(stage.module, mesh=mesh["dp"], shard_placement_fn=lambda p, by_halves=by_halves: (
                md.FusedShard(0, (2, 2)) if by_halves and p.ndim == 2 else None))
        return KINDS["1f1b"][0](stages, 4, loss_fn)
    alike, other = schedule(True, True), schedule(True, False)
    text = refusal(lambda: other.step(x, target=t), CollectiveMismatch)
    first = mesh["dp"].get_local_rank()
    for rows in (f"{first}:{first + 1}+{first + 2}:{first + 3}", f"{2 * first}:{2 * first + 2}"):
        assert f"tied weight '0.weight' is trained, float32[{rows}, 0:4]" in text, text
    loss, grads = one_device(four(*ties), False)
    right(alike, (loss, grads | {"3.weight": grads["0.weight"]}), "the same rows", t, 1e-6, args=(x,))


SLEEP = 0.05


def times_of_all_ranks(world):
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    for name in ("1f1b", "zbv"):
        kind, v = KINDS[name]
        stages = pipeline(filled(Net()), mesh, n_stages=2 * v, style=style_of(name))
        schedule = kind(stages, 4, loss_fn)
        right(schedule, one_device(filled(Net()), False), "not traced")
        assert schedule.timeline is None
        if world.rank == 0:  # as the waiting for it is no part of what comes after
            schedule.stages[0].module.register_forward_pre_hook(lambda cell, args: time.sleep(SLEEP))
        with comm.record() as events:
            right(schedule, one_device(filled(Net()), False), "traced", trace=True)
        assert {e.op for e in events} == {"exchange", "broadcast", "all_gather_object"}
        timeline = schedule.timeline
        said = [[[str(slot.action), slot.start, slot.end] for slot in rank] for rank in timeline.slots]
        one, two = comm.group((0, 1)).all_gather_object(said)
        assert one == two
        for rank, slots in enumerate(timeline.slots):
            assert [s.action for s in slots] == [a for _, _, a in computing([schedule.actions.ranks[rank]])]
            assert all(a.end <= b.start for a, b in zip(slots, slots[1:])) and all(s.start <= s.end for s in slots)
        when = {slot.action.result: slot for rank in timeline.slots for slot in rank}
        for slot in when.values():
            for need in slot.action.inputs(2 * v):
                assert when[need].end <= slot.start, f"{slot.action} began before {need} was there"
            assert slot.action.kind != "F" or slot.action.stage or slot.end - slot.start >= SLEEP
        assert timeline.span >= 4 * SLEEP and timeline.costs[0, "F"] >= SLEEP
        assert simulate(schedule.actions, timeline.costs).span >= 4 * SLEEP
        assert draw(timeline, "svg").count("<title>") == sum(map(len, timeline.slots))
        schedule.step(Tensor(X), target=Tensor(T))
        assert schedule.timeline is timeline, "of the last step that was traced"
