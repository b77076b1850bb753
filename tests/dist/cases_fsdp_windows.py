# SPDX-License-Identifier: Apache-2.0
"""Cases of `fully_shard` again, with the memory that large units have: peers write into it, and it moves under its addresses."""
from __future__ import annotations

import numpy as np

from ms_dtensor import comm
from ms_dtensor.parallel.sharding import memory
from tests.cases import call
from tests.dist import cases_fsdp_inside, cases_fsdp_steps, cases_fully_shard
from tests.tiers import sampled

AGAIN = (cases_fully_shard.one_collective_a_unit_and_direction, cases_fully_shard.the_optimizer_divided,
         cases_fully_shard.frozen_then_trained, cases_fully_shard.other_dims_and_parameters_left_alone,
         cases_fully_shard.without_gradients_all_is_given_back,
         cases_fsdp_steps.neighbours_keep_the_parameters_between_forward_and_backward,
         cases_fsdp_steps.kept_parameters_are_gathered_again_when_they_were_changed,
         cases_fsdp_steps.a_step_that_raises_forgets_what_was_gathered_up,
         cases_fsdp_inside.what_runs_again_computes_in_the_policys_dtype, cases_fsdp_inside.empty_shards_of_bfloat16)


def in_windows(world):
    """None of these units is large enough by itself."""
    small, memory._SMALL = memory._SMALL, 0
    try:
        for one in sampled(AGAIN, 6):
            call(one, world)
    finally:
        memory._SMALL = small


def a_window_goes_with_its_last_array(world):
    backend = comm.group(tuple(range(world.size))).backend
    window = backend.window(1 << 20)
    window.claim()
    part = np.ndarray((1000,), np.float32, window, 8000)
    part[...] = 3.0
    first = window.offset
    del window
    other = backend.window(1 << 20)
    other.claim()
    assert other.offset != first, "what lies under an array that is alive was given away"
    np.ndarray((1000,), np.float32, other, 8000)[...] = 5.0
    assert (part == 3.0).all()
    del part
    third = backend.window(1 << 20)
    third.claim()
    assert third.offset == first, "it comes back"
    other.release()
    assert not other.any() and other.offset is None
    other[:4] = 1
    other.claim()
    assert np.ndarray((1000,), np.float32, other, 8000)[7] == 5.0, "what was written meanwhile went nowhere"
