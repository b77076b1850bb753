# SPDX-License-Identifier: Apache-2.0
"""Exceptions at any point of a step: they reach all ranks by name, and after they are caught the next step is right."""
import itertools
from functools import partial

from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.errors import CollectiveMismatch, CommError, LayoutError, PeerLost
from ms_dtensor.internals.names import Function
from ms_dtensor.parallel.sharding.call import units_of
from ms_dtensor.pipeline import Actions, Schedule, one_f_one_b, pipeline
from ms_dtensor.pipeline.step import Step
from ms_dtensor.pipeline.transfer import Edge
from tests.cases import case, cases
from tests.operands import Built, filled
from tests.pipeline.cases_run import KINDS, Net, T, X, loss_fn, one_device, right, style_of, told
from tests.support import each
from tests.tiers import sampled

GROUP = "errors"


class Boom(Exception):
    pass


class _Raises(Function):
    """Nothing in the forward; raises in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        raise Boom("in a backward")


class Fault:
    """Raises once, at a point of the step of one rank: the n-th time that it is come to."""

    def __init__(self, where: str, after: int):
        self.where, self.left = where, after

    def due(self) -> bool:
        self.left -= 1
        return self.left == -1

    def raises(self, given):
        def run(*args, **kwargs):
            if self.due():
                raise Boom(f"in {self.where}")
            return given(*args, **kwargs)
        return run

    def put(self, schedule) -> None:
        stage = next(iter(schedule.stages.values()))
        if self.where == "F":
            stage.module.register_forward_pre_hook(self._hook)
        elif self.where == "B":
            stage.module.register_forward_hook(lambda c, args, out: _Raises.apply(out) if self.due() else out)
        elif self.where == "W":
            next(p for p in stage.params() if p.ndim == 2).register_hook(self._hook_of_weight)

    def _hook(self, cell, args):
        if self.due():
            raise Boom("in F")

    def _hook_of_weight(self, grad):
        if self.due():
            raise Boom("in W")
        return grad


PLACES = {"send": (Edge, "_post"), "receive": (Edge, "_take"), "end": (Step, "loss")}


def broken_step(schedule, fault: Fault | None, x, t) -> None:
    """A step in which a fault strikes, on the rank that has one; what each rank gets names it."""
    place = PLACES.get(fault.where) if fault else None
    if place:
        kind, name = place
        given = getattr(kind, name)
        setattr(kind, name, fault.raises(given))
    elif fault:
        fault.put(schedule)
    try:
        schedule.step(x, target=t)
    except (Boom, RuntimeError) as error:
        if fault:
            assert "in " + {"B": "a backward"}.get(fault.where, fault.where) in str(error), str(error)
            where = f"on rank {schedule.group.rank_index} of the pipeline"
            assert any(where in note for note in getattr(error, "__notes__", [where]))
        else:
            assert isinstance(error, PeerLost), repr(error)
            assert "it was given up" in str(error) and "Boom" in str(error), str(error)
    else:
        raise AssertionError("nothing raised")
    finally:
        if place:
            setattr(kind, name, given)


def struck(world, names, places, over=(None,), one_of: int = 1) -> None:
    shape = (world.size,) if over == (None,) else (2, world.size // 2)
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")[:len(shape)])

    @each(itertools.product(names, sampled(places, one_of), over))
    def steps(name, where, way):
        kind, v = KINDS[name]
        net = filled(Net())
        want = one_device(net, False)
        cut = pipeline(net, mesh["pp"], n_stages=v * mesh["pp"].size(), style=style_of(name))
        x, t = Tensor(X), Tensor(T)
        if way is not None:
            for stage in cut:
                way(stage.module, mesh=mesh["dp"])
            x, t = (md.distribute_tensor(a, mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (x, t))
        schedule = kind(cut, 4, loss_fn)
        once = where == "end" or where == "W" and way is not None  # in a step
        for rank, after in ((0, 0), (world.size - 1, 0 if once else 2)):
            right(schedule, want, "before", t, args=(x,))
            broken_step(schedule, Fault(where, after) if world.rank == rank else None, x, t)
            told(CommError, "ranks have left a step", lambda: comm.group(range(world.size)).barrier())
            right(schedule, want, "after", t, args=(x,))


def a_first_step_that_raises_leaves_nothing(world):
    """One end of a border knows already what comes, the other does not; a unit is whole for backwards that will not come."""
    mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    kind, net = KINDS["1f1b"][0], filled(Net())
    want = one_device(net, False)
    cut = pipeline(net, mesh["pp"], n_stages=2, style=style_of("1f1b"))
    for stage in cut:
        md.fully_shard(stage.module, mesh=mesh["dp"], reshard_after_forward=False)
    x, t = (md.distribute_tensor(Tensor(a), mesh["dp"], [md.Shard(0)], src_data_rank=None) for a in (X, T))
    schedule = kind(cut, 4, loss_fn)
    broken_step(schedule, Fault("receive", 0) if world.rank == 1 else None, x, t)
    told(CommError, "ranks have left a step", lambda: comm.group(range(world.size)).barrier())
    assert not any(unit.whole for stage in cut for unit in units_of(stage.module))
    right(schedule, want, "after", t, args=(x,))


def a_swapped_action_is_named(world):
    """At the first step; the order is right by itself, so that no rank alone can tell. Then the ranks are in step."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    order = one_f_one_b(2, 4)
    text = order.csv().replace("1F1,1B1", "1F1,1F2", 1).replace("1F2,1B2", "1B1,1B2", 1)
    other = Actions.parse(text)
    assert other != order
    schedule = Schedule(pipeline(filled(Net()), mesh), 4, loss_fn, actions=(order, other)[world.rank])
    told(CollectiveMismatch, "rank 1, place 3 is, to\n        rank 0: 1B1\n        rank 1: 1F2", lambda: schedule.step(
        Tensor(X), target=Tensor(T)))
    right(Schedule(schedule.stages.values(), 4, loss_fn, actions=order), one_device(filled(Net()), False), "after it")


@case(4)
def a_batch_that_some_ranks_refuse_is_no_other_ranks_next(world):
    """Seven rows are no four microbatches: who goes on behind this refusal would meet those that have not refused."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages, last = pipeline(filled(Net()), mesh["pp"]), mesh.get_local_rank("dp")
    for stage in stages:
        md.replicate(stage.module, mesh=mesh["dp"])
    loss = md.replicate(Built(lambda _, y, t: loss_fn(y, t)), mesh=mesh["dp"])
    schedule = Schedule(stages, 4, loss, actions=one_f_one_b(2, 4))
    for run in (schedule.step, schedule.eval):
        if last:
            told(LayoutError, "7 rows are not cut into 4", partial(run, Tensor(X[:7]), target=Tensor(T[:7])))
        x, t = (Tensor(whole[:4 if last else 8]) for whole in (X, T))
        told((CollectiveMismatch, PeerLost), "of batch ", partial(run, x, target=t))




def unpacked() -> nn.Cell:
    """Takes apart what its first cell gives."""
    def construct(c, x):
        y, x = c.first(x)
        return c.second(y)
    return Built(construct, first=Built(lambda c, x: (c.up(x), x), up=nn.Dense(4, 4)), second=nn.Dense(4, 4))



def added() -> nn.Cell:
    """Adds what it is given."""
    return Built(lambda c, x, other=None: c.one(x, other), one=Built(lambda c, x, other=None: x + other.reshape(x.shape)))


def all_ranks_are_told_which_cells_a_stage_has_not(world):
    """Or that there is none before it, of two tensors; where the model begins with all there is nothing to say."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rest = (": in the place of a cell of another stage its first argument is handed on, so several tensors go as one list "
            "or dict")
    for net, split, given, error, stage in (
            (unpacked(), ["second"], 1, "too many values to unpack", "this stage has not first"),
            (added(), [[], ["one"]], 2, "NoneType", "this stage has all cells, and the one before it none"),
            (added(), [["one"], []], 1, "NoneType", "")):
        schedule = Schedule(pipeline(net, mesh, split=split), 2, loss_fn, actions=one_f_one_b(2, 2))
        try:
            schedule.step(*[Tensor(X)] * given, target=Tensor(T))
        except (PeerLost, ValueError, AttributeError) as raised:
            said = "; ".join([str(raised), *getattr(raised, "__notes__", ())])
        assert error in said, said
        if hasattr(BaseException, "add_note"):  # Python 3.10 has none
            assert stage + rest in said if stage else rest not in said, said


cases(2, {"exceptions_of_two": (("1f1b", "zbh1"), ("F", "B", "W", "send", "receive", "end"), (None,), 2)}, 120)(struck)
cases(4, {"exceptions_beside_data_parallel_ranks": (("zbv",), ("F", "W", "end"), (md.replicate, md.fully_shard)),
          "exceptions_of_four": (("dualpipev",), ("B", "send"))}, timeout=180)(struck)
