# SPDX-License-Identifier: Apache-2.0
"""Ten minutes on a borrowed Ascend node, and one file to mail back.

    scripts/ascend_first.sh [--ranks 8] [--only ops,quickstart] [--out FILE]
    scripts/ascend_first.sh --rehearse      here: over the emulator of HCCL and CPU kernels, on two ranks, with small sizes

What it does, each part in processes and within seconds of its own: `environment`, `contract` (every collective, on 2 and
on all ranks), `ops` (each fused op of the Llama against its CPU reference, values and gradients), `quickstart` (losses
against `quickstart_losses.json`, which `bf16_losses.py` wrote on a CPU), `step` (the 1B configuration: memory and tokens/s)
and `collectives` (a table in the columns of hccl_test and nccl-tests). A part that fails is written down, and the rest goes
on. Exits non-zero if one did.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from tests.msrun import launch, report  # noqa: E402

CONFIGS = ROOT / "model_zoo/llama/configs"
LOSSES = ROOT / "scripts/quickstart_losses.json"
SECONDS = {"environment": 30, "contract": 120, "ops": 120, "quickstart": 150, "step": 240, "collectives": 100}
REHEARSED = 5  # times as long may a part take where CPU kernels stand in
OPS_BOUND = 2.0**-6  # of the largest element, in bfloat16: the kernels round at other places than the reference
LOSS_BOUND = 0.02
COLUMNS = ("collective", "data_size(Bytes)", "count", "type", "redop", "aveg_time(us)", "alg_bandwidth(GB/s)",
           "busbw(GB/s)", "check_result")


# -- on the ranks ------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def world_of(rehearse: bool) -> Iterator:
    """The ranks of this launch, as devices or as emulated ones."""
    from model_zoo.llama.ranks import start_device
    from ms_dtensor import comm

    if not rehearse:
        yield comm.start(start_device())
        return
    from tests.rehearsal.session import rehearsed

    start_device()
    comm.start("cpu")
    with rehearsed(clock=False):
        yield comm.current_world()


def contract(world, options) -> dict:
    from tests.comm.tensor_suite import CASES, DEVICE, Tensors, bfloat16, groups

    failed, count = {}, 0
    suite = Tensors(world.backend, exact=False, dtypes=DEVICE)
    for ranks in groups(world.size, world.rank):
        for case in (*CASES, bfloat16):
            count += 1
            try:
                bfloat16(world.backend, exact=False) if case is bfloat16 else case(suite, world.rank, ranks)
            except Exception as e:
                failed[f"{case.__name__} on {len(ranks)}"] = f"{type(e).__name__}: {e}"[:600]
    return {"cases": count, "failed": failed}


def fused(mesh) -> dict[str, np.ndarray]:
    """Values and gradients of what the Llama calls on a device, in bfloat16, on a mesh of one rank."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, ops

    import ms_dtensor as md
    from model_zoo.llama import model
    from model_zoo.llama.config import ModelConfig
    from ms_dtensor.optim import AdamW

    draw = np.random.default_rng(0)
    cfg = ModelConfig(dim=512, n_heads=4, n_kv_heads=2)
    b, t, h, k, e = 2, 256, 4, 2, 128
    ids, labels = (draw.integers(0, 96, 64).astype(np.int32) for _ in range(2))

    def rows(*shape):
        return draw.normal(size=shape).astype(np.float32)

    def placed(x):
        return md.distribute_tensor(Tensor(x), mesh)

    def attention(q, key, value):
        with md.implicit_replication():
            return ops.flash_attention_score(q, key, value, h, attn_mask=model.causal_mask(), scalar_value=e ** -0.5,
                                             input_layout="BSND", sparse_mode=2)

    def rotary(x):
        with md.implicit_replication():
            return ops.rotary_position_embedding(x, *model.rotary_tables(cfg, t, x.dtype), 0)
    calls: dict[str, tuple[Callable, tuple]] = {
        "flash_attention_score": (attention, (rows(b, t, h, e), rows(b, t, k, e), rows(b, t, k, e))),
        "rotary_position_embedding": (rotary, (rows(b, t, h, e),)),
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5)[0], (rows(64, 512), rows(512))),
        "swiglu": (lambda g, u: ops.swiglu(mint.stack((g, u), 1), 1), (rows(64, 96), rows(64, 96))),
        "embedding": (lambda w: mint.nn.functional.embedding(placed(ids), w), (rows(96, 64),)),
        "matmul": (lambda x, w: ops.MatMul(transpose_b=True)(x, w), (rows(64, 512), rows(96, 512))),
        "loss_parallel": (lambda x: md.loss_parallel(x, placed(labels)), (rows(64, 96),)),
        "cross_entropy": (lambda x: model.cross_entropy(x, placed(labels)), (rows(64, 96),)),
    }
    out = {}
    for name, (call, operands) in calls.items():
        xs = [placed(x).astype(ms.bfloat16) for x in operands]
        try:
            value = call(*xs)
            weight = placed(np.random.default_rng(1).normal(size=value.shape).astype(np.float32))

            def weighted(*xs, call=call, weight=weight):
                return (call(*xs).astype(ms.float32) * weight).sum()
            grads = md.grad(weighted, tuple(range(len(xs))))(*xs)
            for i, x in enumerate((value, *(grads if isinstance(grads, tuple) else (grads,)))):
                out[f"{name} {'value' if i == 0 else f'gradient {i - 1}'}"] = \
                    x.astype(ms.float32).full_tensor().asnumpy()
        except Exception as error:
            traceback.print_exc()
            out[f"{name} raised {type(error).__name__}: {error}"[:300]] = np.zeros(0)
    for dtype in (ms.float32, ms.bfloat16):
        weight = Parameter(Tensor(rows(40, 33)).astype(dtype), name="w")
        optimizer = AdamW([weight], lr=3e-4)
        for _ in range(3):
            optimizer([Tensor(rows(40, 33)).astype(dtype)])
        out[f"AdamW of {dtype}"] = weight.astype(ms.float32).asnumpy()
    return out


def ops(world, options) -> dict:
    from ms_dtensor import init_device_mesh

    np.savez(options.folder / "device.npz", **fused(init_device_mesh(options.kind, (1,), mesh_dim_names=("one",))))
    return {}


def trained(world, options, cfg, steps: int) -> dict:
    """Some steps of a configuration on all ranks, tensor and sequence parallel over up to four of them."""
    import mindspore as ms

    from model_zoo.llama import memory
    from model_zoo.llama.data import load_text
    from model_zoo.llama.trainer import Trainer
    from ms_dtensor import init_device_mesh

    tp = next(n for n in (4, 2, 1) if world.size % n == 0)
    cfg = replace(cfg, parallel=replace(cfg.parallel, dp=world.size // tp, tp=tp, sequence_parallel=True),
                  train=replace(cfg.train, dtype="bfloat16", compile=False))
    mesh = init_device_mesh(options.kind, (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
    trainer = Trainer(cfg, load_text(cfg.data, cfg.model.vocab_size, cfg.train.seq), mesh)
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        losses.append(trainer.step(step).loss)  # a number: the device has done the step
        seconds.append(time.perf_counter() - start)
    tokens = cfg.train.batch * cfg.train.seq
    usual = float(np.median(seconds[min(2, steps - 1):]))
    return {"losses": [round(x, 5) for x in losses], "first_step_s": round(seconds[0], 2), "step_ms": round(usual * 1e3, 1),
            "tokens_per_s": round(tokens / usual), "tokens_per_s_per_rank": round(tokens / usual / world.size),
            "max_memory_allocated_MiB": round(ms.runtime.max_memory_allocated() / 2**20),
            "max_memory_reserved_MiB": round(ms.runtime.max_memory_reserved() / 2**20),
            "by_formula_MiB": {name: round(v / 2**20) for name, v in memory.per_rank(cfg).items()}}


def quickstart(world, options) -> dict:
    from scripts.bf16_losses import config

    losses, steps = json.loads(LOSSES.read_text()), 3 if options.rehearse else 50
    want = losses[:steps]
    got = trained(world, options, config(len(losses), "bfloat16"), steps)  # its rates follow the number of all steps
    worst = max(abs(a / b - 1) for a, b in zip(got["losses"], want, strict=True))
    return {**got, "losses_of_a_cpu": want, "worst_relative": round(worst, 5), "bound": LOSS_BOUND,
            "failed": {} if worst <= LOSS_BOUND else {"losses": f"{worst:.4f} apart"}}


def step(world, options) -> dict:
    from model_zoo.llama.configio import load

    cfg = load(["--config", str(CONFIGS / ("quickstart.yaml" if options.rehearse else "llama3_1b.yaml"))])[0]
    return trained(world, options, cfg, 2 if options.rehearse else 8)


def _calls(group, n: int, rank: int, count: int) -> dict[str, tuple]:
    """Name -> (call, its right answer, reduction, bus over algorithm bandwidth)."""
    from mindspore import Tensor

    x = Tensor(np.arange(count, dtype=np.float32) % 7 + rank)
    part, even, square = x[:count // n] * 1, [count // n] * n, x.reshape(n, count // n)
    whole, mine = [np.arange(count) % 7 + r for r in range(n)], slice(rank * count // n, (rank + 1) * count // n)
    share = (n - 1) / n
    return {
        "all_reduce": (lambda: group.all_reduce(x, "sum"), sum(whole), "sum", 2 * share),
        "all_gather": (lambda: group.all_gather(part, 0, even), np.concatenate([w[:count // n] for w in whole]), "none",
                       share),
        "reduce_scatter": (lambda: group.reduce_scatter(x, "sum", 0, even), sum(whole)[mine], "sum", share),
        "all_to_all": (lambda: group.all_to_all(square, 0, [1] * n, 1, even), np.concatenate([w[mine] for w in whole]),
                       "none", share),
        "broadcast": (lambda: group.broadcast(x, 0), whole[0], "none", 1.0),
    }


def collectives(world, options) -> dict:
    """Seconds of a call, by the slowest rank, and whether the numbers are right."""
    import mindspore as ms

    from ms_dtensor import init_device_mesh

    n = world.size
    group = init_device_mesh(options.kind, (n,), mesh_dim_names=("all",)).get_group()
    rows = []
    for size in (2**12, 2**16) if options.rehearse else (2**10, 2**16, 2**20, 2**24, 2**28):
        count = size // 4 // n * n
        for name, (call, want, redop, bus) in _calls(group, n, world.rank, count).items():
            times = 3 if options.rehearse else 20
            try:
                right = np.array_equal(call().asnumpy().reshape(-1), want.reshape(-1))
                for _ in range(3):
                    call()
                group.barrier()
                ms.runtime.synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    out = call()
                ms.runtime.synchronize()
                del out
                seconds = max(group.all_gather_object((time.perf_counter() - start) / times))
                rows.append((name, size, count, "float", redop, round(seconds * 1e6, 2), round(size / seconds / 1e9, 3),
                             round(bus * size / seconds / 1e9, 3), "success" if right else "failed"))
            except Exception as error:
                traceback.print_exc()
                rows.append((name, size, count, "float", redop, "-", "-", "-", f"{type(error).__name__}: {error}"[:200]))
    return {"table": rows, "failed": {f"{r[0]} of {r[1]}": r[-1] for r in rows if r[-1] != "success"}}


PARTS = {part.__name__: part for part in (contract, ops, quickstart, step, collectives)}


def rank_side(options) -> None:
    with world_of(options.rehearse) as world:
        result = PARTS[options.part](world, options)
        if world.rank == 0 or result.get("failed"):
            report(result)


# -- the parent --------------------------------------------------------------------------------------------------------
def environment() -> str:
    """Versions, settings and the machine, as commands and files tell them."""
    lines = [f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"]
    for name in ("mindspore", "numpy"):
        lines.append(f"{name} {__import__(name).__version__}")
    for command in (["git", "-C", str(ROOT), "log", "-1", "--format=%H %cI"], ["git", "-C", str(ROOT), "status", "--short"],
                    ["npu-smi", "info"], ["nproc"], ["free", "-g"]):
        lines += ["$ " + " ".join(command), _output(command)]
    for pattern in ("/usr/local/Ascend/*/latest/version.cfg", "/usr/local/Ascend/driver/version.info", "/etc/hccn.conf",
                    "/usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info"):
        for file in sorted(Path("/").glob(pattern[1:])):
            lines += [f"-- {file}", file.read_text(errors="replace")[:1500]]
    names = ("ASCEND", "HCCL", "MS_", "CANN", "LD_LIBRARY_PATH", "RANK", "DEVICE", "OMP", "GLOG")
    lines += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(names)]
    return "\n".join(lines)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return (done.stdout + done.stderr).rstrip()[-6000:]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


class Report:
    """The file to mail back, written as it comes: what was done is there if the node goes away."""

    def __init__(self, file: Path):
        self.file, self.summary = file, []
        file.write_text("")

    def write(self, text: str) -> None:
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(text + "\n")

    def part(self, name: str, run: Callable[[], tuple[str, bool]]) -> None:
        """Runs a part, which gives its text and whether all is well."""
        start = time.monotonic()
        try:
            text, fine = run()
        except Exception:
            text, fine = traceback.format_exc(), False
        line = f"{name:<24}{'ok' if fine else 'FAILED':<8}{time.monotonic() - start:6.0f} s"
        self.summary.append((line, fine))
        print(line, flush=True)
        self.write(f"\n==== {line}\n{text}")


def on_ranks(name: str, ranks: int, options, folder: Path) -> tuple[list, str | None]:
    """Rank 0's report, and those of ranks that failed; then what went wrong with the launch itself."""
    args = ["--part", name, "--folder", str(folder), *(["--rehearse"] if options.rehearse else [])]
    outcome = launch(Path(__file__).resolve(), ranks, args, SECONDS[name] * (REHEARSED if options.rehearse else 1))
    return [r for reports in outcome.reports for r in reports], outcome.failure


def plain_part(name: str, ranks: int, options, folder: Path) -> tuple[str, bool]:
    results, failure = on_ranks(name, ranks, options, folder)
    text = [json.dumps({k: v for k, v in r.items() if k != "table"}, indent=1) for r in results]
    for r in results[:1]:
        text += ["  ".join(f"{v!s:>19}" for v in row) for row in ((COLUMNS, *r["table"]) if "table" in r else ())]
    if failure:
        text.append(failure)
    return "\n".join(text), bool(results) and failure is None and not any(r.get("failed") for r in results)


def ops_part(options, folder: Path) -> tuple[str, bool]:
    """The same calls in a process for the CPU and in one for the device."""
    made = subprocess.run([sys.executable, __file__, "--reference", str(folder / "cpu.npz")], capture_output=True, text=True,
                          timeout=SECONDS["ops"] * REHEARSED)
    if made.returncode:
        return made.stdout[-3000:] + made.stderr[-3000:], False
    _, failure = on_ranks("ops", 1, options, folder)
    if failure:
        return failure, False
    want, got = (dict(np.load(folder / f"{name}.npz")) for name in ("cpu", "device"))
    lines, fine = [f"{'':<50}{'off by':>12}   of the largest element; bound {OPS_BOUND}"], True
    for name in dict.fromkeys([*want, *got]):
        a, b = got.get(name), want.get(name)
        if a is None or b is None or a.shape != b.shape or not a.size:
            lines.append(f"{name:<50} {'only there' if a is None else 'only here' if b is None else 'nothing to compare'}")
            fine = False
            continue
        off = float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
        fine &= off <= OPS_BOUND
        lines.append(f"{name:<50}{off:>12.2e}{'' if off <= OPS_BOUND else '   FAILED'}")
    return "\n".join(lines), fine


def reference(file: Path) -> None:
    """`fused` by the library's CPU forms, which its tests prove."""
    import mindspore as ms

    ms.set_device("CPU")
    from ms_dtensor import init_device_mesh

    np.savez(file, **fused(init_device_mesh("cpu", (1,), mesh_dim_names=("one",))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--ranks", type=int, help="default 8, rehearsed 2")
    parser.add_argument("--only", help=f"of {','.join(SECONDS)}; some, with commas")
    parser.add_argument("--out", type=Path)
    for name, kind in (("--part", str), ("--folder", Path), ("--reference", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # given to the processes
    options = parser.parse_args()
    options.kind = "npu"
    if options.reference:
        reference(options.reference)
        return 0
    if options.part:
        rank_side(options)
        return 0
    ranks = options.ranks or (2 if options.rehearse else 8)
    out = options.out or Path(f"ascend_first_{platform.node()}_{time.strftime('%Y%m%d_%H%M%S')}.txt")
    file, folder = Report(out), Path(tempfile.mkdtemp(prefix="ms_dtensor_first_"))
    if options.rehearse:
        file.write("REHEARSED: emulated HCCL, CPU kernels, small sizes; times and memory mean nothing.")
    runs: list[tuple[str, str, Callable]] = [
        ("environment", "environment", lambda: (environment(), True)),
        *(("contract", f"contract on {n}", lambda n=n: plain_part("contract", n, options, folder))
          for n in sorted({2, ranks})),
        ("ops", "ops", lambda: ops_part(options, folder)),
        *((name, f"{name} on {ranks}", lambda name=name: plain_part(name, ranks, options, folder))
          for name in ("quickstart", "step", "collectives")),
    ]
    for name, title, run in runs:
        if not options.only or name in options.only.split(","):
            file.part(title, run)
    file.write("\n==== summary\n" + "\n".join(line for line, _ in file.summary))
    print(f"please mail back: {out.resolve()}")
    return 0 if all(fine for _, fine in file.summary) else 1


if __name__ == "__main__":
    sys.exit(main())
