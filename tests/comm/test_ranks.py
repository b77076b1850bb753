# SPDX-License-Identifier: Apache-2.0
"""Tensors between real ranks: the contract on every backend that runs on CPU, and the ends of a process."""
import os
import pathlib
import subprocess
import sys

import pytest

from ms_dtensor.comm import world
from ms_dtensor.tools.ranks import free_port
from tests.comm.left import left_of
from tests.msrun import PATIENCE, run_ranks

HERE = pathlib.Path(__file__).parent


@pytest.mark.dist
def test_contract_on_shm_mccl_and_the_doubles_of_hccl_and_nccl(tmp_path):
    reports = run_ranks(HERE / "tensor_suite.py", 4, timeout=120, log_dir=tmp_path)
    for r in reports:
        assert r[0]["cases"] == 7 * 10, r
        assert r[0]["files"] == [], r  # while the job runs; then nothing at all
    assert left_of({r[0]["job"] for r in reports}) == []


def two_ranks(kind):
    """stdout, stderr and exit code of both."""
    env = dict(os.environ, MS_ROLE="MS_WORKER", MS_WORKER_NUM="2", MS_SCHED_PORT=str(free_port()), GLOG_v="3",
               PYTHONPATH=str(HERE.parent.parent))
    running = [subprocess.Popen([sys.executable, str(HERE / "goodbye.py"), kind], env=dict(env, MS_NODE_ID=str(r)),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(2)]
    try:
        return [(*p.communicate(timeout=PATIENCE), p.returncode) for p in running]
    finally:
        for p in running:
            p.kill()


@pytest.mark.dist
def test_how_a_rank_ended_is_told_to_the_others():
    (_, err, code), (_, other, other_code) = two_ranks("raises")
    assert code == 1 and "PeerLost: For 'barrier', rank 1 (pid" in err and "ended with ValueError: boom" in err, err
    assert "goodbye.py:13" in err  # where the lost rank's last call was
    assert other_code == 1 and "ValueError: boom" in other


@pytest.mark.dist
def test_a_rank_may_leave_when_nobody_waits_for_it():
    (out, err, code), (_, _, other_code) = two_ranks("leaves")
    assert (code, other_code) == (0, 0) and "fine None" in out, err


@pytest.mark.dist
def test_a_forked_child_that_exits_says_no_goodbye():
    for out, err, code in two_ranks("forks"):
        assert code == 0 and "fine" in out, err


def test_the_scheduler_of_msrun_has_nothing_to_do_with_shared_memory(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    with pytest.raises(SystemExit) as end:
        world._start("CPU")
    assert end.value.code == 0


def test_the_scheduler_of_a_rank_alone_leaves_at_once(monkeypatch):
    """The rank never calls it, so msrun would wait for it until the cluster's time is up; on devices as with mccl."""
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    monkeypatch.setenv("MS_WORKER_NUM", "1")
    monkeypatch.setitem(world.registry.serving, "CPU", "mccl")
    monkeypatch.setattr("ms_dtensor.comm.mccl.McclBackend.start", lambda *args: pytest.fail("waits for a rank"))
    with pytest.raises(SystemExit) as end:
        world._start("CPU")
    assert end.value.code == 0
