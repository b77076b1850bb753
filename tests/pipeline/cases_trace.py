# SPDX-License-Identifier: Apache-2.0
"""A step that notes when each action runs: alike on all ranks, in the order of the schedule, and without the waiting."""
from __future__ import annotations

import time

from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.pipeline import draw, pipeline, simulate
from ms_dtensor.pipeline.actions import computing
from tests.cases import case
from tests.pipeline.cases_run import KINDS, Net, T, X, loss_fn, one_device, right, style_of
from tests.sharding.support import filled

SLEEP = 0.05


@case(2)
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
