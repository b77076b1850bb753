# SPDX-License-Identifier: Apache-2.0
"""Weights that several stages share: whose gradients are whose, and what is frozen."""
from __future__ import annotations

from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.errors import CollectiveMismatch
from ms_dtensor.pipeline import pipeline
from tests.cases import case
from tests.dist.support import each, refusal
from tests.pipeline.cases_run import KINDS, T, X, loss_fn, one_device, right, style_of
from tests.sharding.support import filled


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


@case(2)
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


@case(2)
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
