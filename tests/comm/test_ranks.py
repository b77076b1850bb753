# SPDX-License-Identifier: Apache-2.0
"""Tensors between real ranks: the contract on every backend that runs on CPU, the ends of a process, the cores of each."""
import os
import pathlib
import subprocess
import sys

import pytest

from ms_dtensor.comm import world
from ms_dtensor.comm.cores import share
from ms_dtensor.tools.ranks import free_port
from tests.comm.left import left_of
from tests.msrun import PATIENCE, python, run_ranks

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
    last = (HERE / "goodbye.py").read_text().split("\n").index("g.barrier()") + 1
    assert f"goodbye.py:{last}" in err  # where the lost rank's last call was
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


@pytest.mark.parametrize(("cores", "size", "shares"), [
    ([0, 1], 2, [[0], [1]]),
    ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
    ([4, 6], 5, [[4], [6], [4], [6], [4]]),
])
def test_ranks_share_cores_evenly(cores, size, shares):
    assert [share(cores, rank, size) for rank in range(size)] == shares


PROGRAM = """
import os, sys, threading, time
from ms_dtensor.comm import cores
began = threading.Event()
threading.Thread(target=began.wait, daemon=True).start()  # of before, as NumPy's are
os.cpu_count = lambda: int(sys.argv[1])
import mindspore as ms
ms.set_device("CPU")
ms.runtime.launch_blocking()
cores.keep_to_share(1, int(sys.argv[2]))
from mindspore._c_expression import RuntimeConf
bound = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
print(sorted(os.sched_getaffinity(0)), len(bound), RuntimeConf.get_instance().is_op_threads_num_configured())

def switches():
    of_threads = [open(f"/proc/self/task/{thread}/status").read() for thread in os.listdir("/proc/self/task")]
    return sum(int(line.split()[1]) for text in of_threads for line in text.splitlines() if "ctxt_switches" in line)

cores.end_spinning()
(ms.Tensor([1.0]) + 1).asnumpy()
time.sleep(0.1)
before = switches()
time.sleep(0.5)
print(switches() - before < 100)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
@pytest.mark.parametrize("more", [0, 1])
def test_a_process_is_bound_unless_somebody_has_bound_it(more):
    cores = sorted(os.sched_getaffinity(0))
    ranks = max(2, len(cores))  # of one core each
    done = python("-c", PROGRAM, str(len(cores) + more), str(ranks), check=True, env={**os.environ, "GLOG_v": "4"})
    expected = (cores, False) if more else (share(cores, 1, ranks), True)
    assert done.stdout.split("\n")[:2] == [f"{expected[0]} 1 {expected[1]}", "True"]  # spinning: thousands of switches
