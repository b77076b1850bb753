# SPDX-License-Identifier: Apache-2.0
"""Two ranks of the shared-memory world, started without msrun; how one ends is told to the other. See test_ranks.py."""
import os
import sys

from ms_dtensor import comm

KIND = sys.argv[1]
world = comm.start("cpu")
g = comm.group(range(world.size), ("dp",))
g.barrier()
if world.rank == 1 and KIND != "forks":
    if KIND == "raises":
        raise ValueError("boom")
    sys.exit(0)
if KIND == "forks":
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # as a data loader's worker ends
    os.waitpid(pid, 0)
    for _ in range(3):
        g.barrier()
    print("fine")
    sys.exit(0)
if KIND == "leaves":
    import time
    time.sleep(0.2)
    comm.shutdown()
    print("fine", comm.current_world())
    sys.exit(0)
g.barrier()
