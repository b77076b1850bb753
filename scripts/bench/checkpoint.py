# SPDX-License-Identifier: Apache-2.0
"""Saving and loading against plain files and against torch.distributed.checkpoint, on the same tensors and processes.

    python scripts/bench/checkpoint.py [--ranks 2] [--mib 512] [--rounds 5] [--folder DIR] [--no-save]

A job of ours (msrun) and one of PyTorch (gloo) with as many ranks hold the same tensors: matrices cut over the ranks, and
many small replicated ones. They take turns, as does this process, which writes and reads the same number of bytes one after
the other in blocks of 8 MiB, into memory that has been used: `write` and one `fsync`, `readinto`. It verifies nothing; nor
does PyTorch. Times are of the slowest rank. "cold": the files have left the page cache before; the better of two loads,
as the first takes pages that a virtual machine may have to ask its host for, which costs more than the disk. "stall": how
long `save(async_save=True)` takes to return; "copy": all local tensors into memory that has been used, "fresh copy": into
new.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, finish, one_thread  # noqa: E402

one_thread()
import numpy as np  # noqa: E402

SIDE, SMALL, BLOCK = 2048, 200, 8 << 20


def shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """Matrices of 16 MiB, and small vectors."""
    return {**{f"layers.{i}.weight": (SIDE, SIDE) for i in range(mib // 16)},
            **{f"layers.{i}.bias": (64 + i,) for i in range(SMALL)}}


# -- the ranks: they wait for their turn, and tell how long it took --------------------------------------------------------
def turns(folder: Path, who: str, rank: int, barrier, work: dict) -> None:
    """Does what the files in the folder say, until they say that it is over."""
    number = 0
    (folder / f"ready_{who}_{rank}").touch()
    while True:
        path = folder / f"turn_{number}"
        while not path.exists():
            time.sleep(0.01)
        whose, what, target = json.loads(path.read_text())
        if what == "end":
            return
        if whose == who:
            barrier()
            started = time.perf_counter()
            seconds = work[what](target)
            seconds = time.perf_counter() - started if seconds is None else seconds
            barrier()
            done = folder / f"part_{number}_{rank}"
            done.write_text(str(seconds))
            done.rename(folder / f"done_{number}_{rank}")
        number += 1


def ours(folder: Path, ranks: int, mib: int) -> None:
    import mindspore as ms

    import ms_dtensor as md
    from ms_dtensor import checkpoint, comm

    mesh = md.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    rank, rng = mesh.get_rank(), np.random.default_rng(mesh.get_rank())
    state = {}
    for key, shape in shapes(mib).items():
        local = rng.random((shape[0] // ranks, *shape[1:]) if len(shape) > 1 else shape, np.float32)
        place = [md.Shard(0)] if len(shape) > 1 else [md.Replicate()]
        state[key] = md.DTensor.from_local(ms.Tensor(local), mesh, place)
    group = comm.group(tuple(range(ranks)))

    def stall(target):
        begun = time.perf_counter()
        saving = checkpoint.save(state, target, async_save=True)
        seconds = time.perf_counter() - begun
        saving.wait()
        return seconds

    copies: list[np.ndarray] = []

    def fresh_copy(target):
        arrays = [x.to_local().asnumpy() for x in state.values()]
        begun = time.perf_counter()
        copies[:] = [a.copy() for a in arrays]
        return time.perf_counter() - begun

    def copy(target):
        if not copies:
            fresh_copy(target)
        arrays = [x.to_local().asnumpy() for x in state.values()]
        begun = time.perf_counter()
        for there, a in zip(copies, arrays):
            np.copyto(there, a)
        return time.perf_counter() - begun
    turns(folder, "ours", rank, group.barrier, {
        "save": lambda target: checkpoint.save(state, target), "stall": stall, "copy": copy, "fresh copy": fresh_copy,
        "load": lambda target: checkpoint.load(state, target) and None})


def torch_ranks(folder: Path, rank: int, ranks: int, mib: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    state = {}
    for key, shape in shapes(mib).items():
        local = torch.rand((shape[0] // ranks, *shape[1:]) if len(shape) > 1 else shape)
        state[key] = DTensor.from_local(local, mesh, [Shard(0) if len(shape) > 1 else Replicate()], run_check=False)

    def save(target):
        dcp.save(state, checkpoint_id=target)

    def load(target):
        dcp.load(state, checkpoint_id=target)
    turns(folder, "torch", rank, dist.barrier, {"save": save, "load": load})
    dist.destroy_process_group()


# -- the plain files, and who is next --------------------------------------------------------------------------------------
def plain_write(path: Path, data: np.ndarray) -> float:
    begun = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        view = memoryview(data)
        for at in range(0, len(view), BLOCK):
            file.write(view[at:at + BLOCK])
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def plain_read(path: Path, data: np.ndarray) -> float:
    begun = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        view, at = memoryview(data), 0
        while count := file.readinto(view[at:at + BLOCK]):
            at += count
    return time.perf_counter() - begun


def forget(folder: Path) -> None:
    """Lets the page cache drop the files."""
    os.sync()
    for path in folder.rglob("*") if folder.is_dir() else [folder]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def remove(target: Path) -> None:
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    os.sync()  # what the disk does about it is nobody's who comes next


def measure(args, folder: Path) -> dict[str, list[float]]:
    sys.path.insert(0, str(ROOT))
    me = [sys.executable, str(Path(__file__).resolve()), f"--mib={args.mib}", f"--ranks={args.ranks}", f"--turns={folder}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if args.ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        msrun = [str(Path(sys.executable).parent / "msrun"), f"--worker_num={args.ranks}", f"--master_port={port}",
                 f"--local_worker_num={args.ranks}", "--join=True", f"--log_dir={folder / 'log'}", *me[1:], "--who=ours"]
    else:
        msrun = [*me, "--who=ours"]
    jobs = [subprocess.Popen(msrun, env=env, stdout=subprocess.DEVNULL)]
    jobs += [subprocess.Popen([*me, "--who=torch", f"--rank={r}"], env=env, stdout=subprocess.DEVNULL)
             for r in range(args.ranks)]
    data = np.random.default_rng(0).integers(0, 255, sum(4 * int(np.prod(s)) for s in shapes(args.mib).values()), np.uint8)
    times: dict[str, list[float]] = {}
    number = 0

    def wait_for(paths: list[Path]) -> None:
        while not all(path.exists() for path in paths):
            if any(job.poll() not in (None, 0) for job in jobs):
                raise RuntimeError(f"a job ended with {[job.poll() for job in jobs]}; see {folder / 'log'}")
            time.sleep(0.01)

    def turn(who: str, what: str, target: Path) -> float:
        nonlocal number
        (folder / "next").write_text(json.dumps([who, what, str(target)]))
        (folder / "next").rename(folder / f"turn_{number}")
        number += 1
        if what == "end":
            return 0.0
        done = [folder / f"done_{number - 1}_{rank}" for rank in range(args.ranks)]
        wait_for(done)
        return max(float(path.read_text()) for path in done)
    wait_for([folder / f"ready_{who}_{rank}" for who in ("ours", "torch") for rank in range(args.ranks)])
    names = ("plain", "ours", "torch")
    for i in range(args.rounds + 1):
        found = {}
        for who in (*names[i % 3:], *names[:i % 3]):  # one after the other, each on a disk and in memory that are free
            target = folder / f"{who}_{i}"
            for what, work in (("save", plain_write), ("load cold", plain_read), ("load cold", plain_read),
                               ("load warm", plain_read)):
                os.sync()
                if what == "load cold":
                    forget(target)
                seconds = work(target, data) if who == "plain" else turn(who, what.split()[0], target)
                key = f"{who} {what}"
                found[key] = min(seconds, found.get(key, seconds))
            remove(target)
        for what in ("stall", "copy", "fresh copy"):
            found[what] = turn("ours", what, folder / f"async_{i}")
        remove(folder / f"async_{i}")
        if not i:  # the first round warms up; but of stalls the first is one of its own: its memory is new
            found = {"first stall": found["stall"], "first copy": found["fresh copy"]}
        for key, seconds in found.items():
            times.setdefault(key, []).append(seconds)
    turn("", "end", folder)
    for job in jobs:
        job.wait(60)
    return {**times, "bytes": [len(data)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512, help="of the matrices")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary folder")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.who == "ours":
        return ours(args.turns, args.ranks, args.mib)
    if args.who == "torch":
        return torch_ranks(args.turns, args.rank, args.ranks, args.mib)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        times = measure(args, Path(folder))
    size = times.pop("bytes")[0]
    middle = {key: statistics.median(values) for key, values in times.items()}

    def ratio(a: str, b: str) -> dict[str, float]:
        each = [x / y for x, y in zip(times[a], times[b], strict=True)]
        return {"median": round(statistics.median(each), 3), "least": round(min(each), 3), "most": round(max(each), 3)}
    ratios = {"share of plain, save": ratio("plain save", "ours save"),
              "share of plain, load cold": ratio("plain load cold", "ours load cold"),
              "share of plain, load warm": ratio("plain load warm", "ours load warm"),
              "time of torch's, save": ratio("ours save", "torch save"),
              "time of torch's, load cold": ratio("ours load cold", "torch load cold"),
              "time of torch's, load warm": ratio("ours load warm", "torch load warm"),
              "stall / copy": ratio("stall", "copy"), "first stall / fresh copy": ratio("first stall", "first copy")}
    rows = [("", "seconds", "GB/s"), *((key, f"{s:.3f}", f"{size / s / 1e9:.2f}") for key, s in middle.items()),
            *((key, r["median"], f"{r['least']} to {r['most']}") for key, r in ratios.items())]
    finish(f"checkpoint_{args.ranks}", {"script": "checkpoint.py", "ranks": args.ranks, "bytes": size, "rounds": args.rounds,
                                       "seconds": {k: [round(x, 4) for x in v] for k, v in times.items()}, "ratios": ratios},
           rows, not args.no_save)


if __name__ == "__main__":
    main()
