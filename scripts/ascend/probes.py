# SPDX-License-Identifier: Apache-2.0
"""What `ascend_first.py` has the ranks find out about the machine: memory, bits, host time, a profile, a refusal, a death.

Each is written against MindSpore's documented calls and tested with a double that records them: not run on hardware. A
part gives a dict; what is in its "failed" makes it fail.
"""
from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import numpy as np

from scripts.ascend.ranks import one_billion, recipe

CHUNK = 512 << 20  # bytes of a room
PROFILED, BEFORE = 3, 2  # steps
SHOWN = ("step_trace_time.csv", "op_statistic.csv", "communication.json", "api_statistic.csv")


def memory(world, options) -> dict:
    """Whether memory that is filled anew serves what was saved of it, as `fully_shard`'s rooms need it.

    The whole parameters of several cells lie in one piece of memory in turn. A backward must find in it what its forward had
    there, and MindSpore must neither refuse that as a write in place nor make other memory for it.
    """
    import mindspore as ms
    from mindspore import mint

    from ms_dtensor.dispatch.recording import Recording

    def allocated() -> int:
        ms.runtime.synchronize()
        return ms.runtime.memory_allocated()
    side = 64 if options.rehearse else int((CHUNK // 4) ** 0.5)
    told: dict = {"before": allocated()}
    flat, failed = mint.empty((side * side,), dtype=ms.float32), dict[str, str]()
    told["held"] = allocated()

    def filled(value: float) -> None:
        flat.copy_(mint.ones((side * side,), dtype=ms.float32) * value)
    for form, cut in (("all", lambda room: room),
                      ("a part", lambda room: mint.reshape(mint.narrow(room, 0, 0, side * side), (side, side)))):
        def loss(x, cut=cut):
            out = (x * cut(ms.ops.stop_gradient(flat))).sum()  # as `sharding/rooms.py` hands it out
            filled(5.0)  # another cell has the room
            return out
        filled(2.0)
        try:
            record = Recording.of(loss, cut(mint.ones((side * side,), dtype=ms.float32)))
            filled(2.0)  # its parameters are brought back
            got = record.backward()[0][0].asnumpy()
            if not (got == 2.0).all():
                failed[f"values, {form}"] = f"the backward read {got.ravel()[0]}, where 2.0 was brought back"
        except RuntimeError as error:
            failed[f"refused, {form}"] = f"what is saved of a room that is filled again: {str(error)[:200]}"
        record = None
    told["after"] = allocated()
    if not options.rehearse:  # MindSpore counts no bytes on a CPU
        if told["held"] - told["before"] < 4 * side * side:
            failed["held"] = "MindSpore does not count what was allocated"
        if told["after"] - told["held"] > side * side:
            failed["after"] = "filling it again took memory that is still held"
    return {"bytes": 4 * side * side, **told, "failed": failed}


def twice(world, options) -> dict:
    """The quick start's first steps twice from the same start: the same losses and parameters, to the bit."""
    import mindspore as ms

    from model_zoo.llama.tools.bf16_losses import config

    def run() -> tuple[list[float], str]:
        trainer, total = recipe(world, options, config(500, "bfloat16")), hashlib.sha256()
        losses = [trainer.step(i).loss for i in range(2 if options.rehearse else 10)]
        for p in trainer.params:
            total.update(p.astype(ms.float32).to_local().asnumpy().tobytes())
        return losses, total.hexdigest()[:16]
    (first, one), (second, other) = run(), run()
    told = world_view(world, {"losses": [first, second], "parameters": [one, other]})
    return {"by_rank": told, "failed": {} if first == second and one == other else {"bits": f"rank {world.rank} differs"}}


def world_view(world, mine) -> list:
    """Every rank's."""
    from ms_dtensor import comm

    return comm.group(tuple(range(world.size))).all_gather_object(mine)


def host(world, options) -> dict:
    """Microseconds of the host for an op on a DTensor, and of the plain op: forward, and with its gradient ("fb")."""
    from ms_dtensor.tools.bench import dispatch
    from ms_dtensor.tools.bench.world import Bench

    class Here(Bench):
        def __post_init__(self) -> None:  # the world has started
            from ms_dtensor import comm

            self.rank, self.size, self.backend = world.rank, world.size, world.backend
            self.everybody = comm.group(tuple(range(world.size)))
    how = {"rounds": 1, "calls": 8, "rows": ["add"]} if options.rehearse else {"rounds": 5, "calls": 200}
    return {"microseconds": dispatch.run(Here(options.kind, slots=world.size), how)}


def profile(world, options) -> dict:
    """Three steps of the 1B configuration under MindSpore's profiler, on rank 0; what its tables begin with."""
    from mindspore import profiler

    trainer, folder = recipe(world, options, one_billion(options)), options.folder / "profile"
    if world.rank:
        for i in range(BEFORE + PROFILED):
            trainer.step(i)
        return {}
    how = profiler._ExperimentalConfig(profiler_level=profiler.ProfilerLevel.Level1, export_type=[profiler.ExportType.Text])
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
                          schedule=profiler.schedule(wait=0, warmup=0, active=PROFILED, repeat=1, skip_first=BEFORE),
                          on_trace_ready=profiler.tensorboard_trace_handler(str(folder)), experimental_config=how) as steps:
        for i in range(BEFORE + PROFILED):
            trainer.step(i)
            steps.step()
    tables = {f.name: f.read_text(errors="replace").splitlines()[:25]
              for f in sorted(folder.rglob("ASCEND_PROFILER_OUTPUT/*")) if f.name in SHOWN}
    missing = {} if tables or options.rehearse else {"tables": f"the profiler left none in {folder}"}
    return {"folder": str(folder), "tables": {name: [x[:400] for x in lines] for name, lines in tables.items()},
            "failed": missing}


def refusal(world, options) -> dict:
    """How HCCL, or MindSpore before it, refuses what its documents exclude: a product of bfloat16. Nothing runs after it."""
    import mindspore as ms
    from mindspore import Tensor

    backend = world.backend
    x, comm = Tensor([1.5, 3.0], ms.bfloat16), backend.communicator(tuple(range(world.size)))
    start = time.perf_counter()
    try:
        backend._api.all_reduce(x, op="prod", group=comm)
        got = x.astype(ms.float32).asnumpy().tolist()
    except (Exception, AssertionError) as error:
        return {"refused_after_s": round(time.perf_counter() - start, 3), "text": f"{type(error).__name__}: {error}"[:3000]}
    want = [1.5**world.size, 3.0**world.size]
    right = np.allclose(got, want, rtol=2**-6)
    return {"taken": got, "failed": {} if right else {"prod": f"taken without a word, and wrong: {got} in place of {want}"}}


def killed(world, options) -> dict:
    """The last rank dies in the middle of all-reduces: how soon the others are told, and in which words."""
    import mindspore as ms
    from mindspore import Tensor

    from ms_dtensor import comm

    group, x = comm.group(tuple(range(world.size))), Tensor(np.arange(1 << 16, dtype=np.float32))
    for _ in range(3):
        group.all_reduce(x, "sum").asnumpy()
    start = time.time()
    if world.rank == world.size - 1:
        (Path(options.folder) / "killed_at").write_text(str(start))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            group.all_reduce(x, "sum").asnumpy()
            ms.runtime.synchronize()
            time.sleep(0.01)
    except Exception as error:
        return {"rank": world.rank, "told_after_s": round(time.time() - start, 2),
                "text": f"{type(error).__name__}: {error}"[:2000]}
    return {"rank": world.rank, "failed": {"killed": "1000 all-reduces went through without the dead rank"}}
