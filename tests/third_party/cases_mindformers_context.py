# SPDX-License-Identifier: Apache-2.0
"""MindFormers 2.1.0's context parallelism: its Qwen3, its styles and its input hook, sequences of 2,048 tokens, on ranks.

Its compressed mask begins at that length, and its context parallelism wants the compressed mask.
"""
import numpy as np

from tests.cases import case
from tests.dist.support import counted
from tests.third_party.cases_mindformers import TOLERANCE, Job, one_device

GROUP = "mindformers"

LENGTH, STEPS = 2048, 3
LONG = {"seq_length": LENGTH, "max_position_embeddings": LENGTH, "use_attn_mask_compression": True}


def is_one_devices(world, layouts) -> None:
    """Losses and weights of some steps, each rank with its tokens of one sequence."""
    losses, wanted = one_device(STEPS, rows=1, **LONG)
    for tp, degree, method, others in layouts:
        what = f"tp={tp} cp={degree} {method}"
        job = Job(world, 1, tp, 1, {"context_parallel": degree, "context_parallel_method": method, **others}, **LONG)
        core = job.net.model.decoder.layers[0].self_attention.core_attention
        assert (core.input_layout, core.sparse_mode) == ("BSH" if method == "colossal" else "BNSD", 2), what
        with counted() as count:
            got = [job.step(step) for step in range(STEPS)]
        moved = "all_gather" if method == "colossal" else "all_to_all"
        assert count[moved, "forward"] >= 2 * 2 * STEPS, (what, count)  # keys and values, of two layers
        assert np.allclose(got, losses, rtol=TOLERANCE, atol=0), (what, got, losses)
        job.is_one_device(wanted, what)


@case(2, timeout=400)
def its_context_parallelism_is_one_device_on_two_ranks(world):
    is_one_devices(world, ((1, 2, "colossal", {}), (1, 2, "ulysses", {})))


@case(4, timeout=400)
def its_context_parallelism_is_one_device_on_four_ranks(world):
    is_one_devices(world, ((1, 4, "hybrid", {"ulysses_degree_in_cp": 2}), (2, 2, "colossal", {})))
