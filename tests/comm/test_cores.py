# SPDX-License-Identifier: Apache-2.0
"""Which cores a rank keeps to, that its threads wait asleep, and that nobody's own choice is overruled."""
import os

import pytest

from ms_dtensor.comm.cores import share
from tests.msrun import python


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
