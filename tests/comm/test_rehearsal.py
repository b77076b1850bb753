# SPDX-License-Identifier: Apache-2.0
"""The device's branch in one process: in MindSpore's asynchronous pipeline, which real ranks on CPU do not use."""
import json
import os
from pathlib import Path

import pytest

from tests.msrun import python

ROOT = Path(__file__).resolve().parents[2]
STEPS = """
import sys
import mindspore as ms
import numpy as np
from ms_dtensor import comm
from tests.comm.cases_rehearsal import trained
from tests.rehearsal.session import rehearsed

ms.set_device("CPU")
if sys.argv[1] == "blocking":
    ms.runtime.launch_blocking()
with comm.fake_world(2) as world, rehearsed():
    print("sums", [float(np.abs(x).sum()) for x in trained("npu", world)])
"""


def sums(mode: str) -> str:
    done = python("-c", STEPS, mode, env=dict(os.environ, PYTHONPATH=str(ROOT), GLOG_v="3"))
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("sums"))


def test_steps_of_the_asynchronous_pipeline_are_those_of_the_blocking_one():
    assert sums("asynchronous") == sums("blocking")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_of_the_8b_configuration_asks_little_of_a_device():
    # eight layers: nothing hides the last block's reductions, 1 of 8 blocks here and of 32 in the model
    done = python(ROOT / "scripts/bench/rehearse_counts.py", "--layers", "8", timeout=900)
    assert done.returncode == 0, done.stderr
    tensor_parallel, data_parallel, sharded = json.loads(done.stdout[done.stdout.index('{\n "config"'):])["steps"]
    for step in (tensor_parallel, data_parallel):
        assert step["kernels_per_collective"] <= 3 and len(step["host_waits"]) <= 2, step
    for step in (tensor_parallel, data_parallel, sharded):
        uploads = {line.partition(":")[0] for line in step["host_to_device"]}
        assert uploads <= {"model_zoo/llama/parallelize.py", "ms_dtensor/ops/local/attention.py"}, step
    assert sum(sharded["host_waits"].values()) == len(sharded["host_waits"]) == 2, sharded  # the logged loss and norm
    assert data_parallel["overlapped"] >= 0.9, data_parallel


@pytest.mark.timeout(600)
@pytest.mark.parametrize("blocks, parameters", [("single", 9), ("joined", 6)])
def test_fully_shard_asks_for_two_kernels_a_weight_at_most_on_any_number_of_ranks(blocks, parameters):
    """All that run are counted, those of autograd too, as MindSpore's profiler sees them, and as CANN launches them: of a
    copy as many as it has to cast and to order. Two a parameter, too, where three of the weights are one, and two others."""
    done = python(ROOT / "scripts/bench/fsdp_kernels.py", "--blocks", blocks, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index('{\n "weights"'):])["steps"]
    for name, steps in found.items():
        assert [step["ranks"] for step in steps] == [8, 64, 128]
        assert all(step["kernels"] == steps[0]["kernels"] for step in steps), (name, steps)
        assert all(step["by_cann"] == steps[0]["by_cann"] for step in steps), (name, steps)
        assert 0 < steps[0]["total"] <= 12 and steps[0]["total_by_cann"] <= 14 < 2 * 9, (name, steps)
        assert steps[0]["parameters"] == parameters and steps[0]["per_parameter"] <= 2, steps
        for step in steps:
            assert step["collectives"] == {"all_gather backward": 1, "all_gather forward": 1, "reduce_scatter backward": 1}


@pytest.mark.timeout(300)
def test_most_of_the_8b_configurations_tensor_parallel_communication_is_hidden():
    done = python(ROOT / "scripts/bench/overlap.py", "--pieces", "4", "--config",
                  ROOT / "model_zoo/llama/configs/llama3_8b.yaml")
    assert done.returncode == 0, done.stderr
    block, = json.loads(done.stdout[done.stdout.index("[\n"):])
    assert block["collectives"] == 2 * 4 * 4 and block["hidden"] >= 0.7, block
