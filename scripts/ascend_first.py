# SPDX-License-Identifier: Apache-2.0
"""Half an hour on a borrowed Ascend node, and one file to mail back.

    scripts/ascend_first.sh [--ranks 8] [--only ops,quickstart] [--out FILE]
    scripts/ascend_first.sh --rehearse      here: over the emulator of HCCL and CPU kernels, on two ranks, with small sizes

Without an NPU it says why within a second, runs nothing, and exits with 2. Else, each part in processes and within seconds
of its own: `environment` (versions and whether they match, topology, settings), `device` (does MindSpore start there, and
why not: the last part if not), `contract` (every collective, on 2 and on all ranks), `ops` (each fused op of the Llama, its
attentions and experts against their CPU references, values and gradients), `context` (what a ring and lists of tokens
need of the attention kernel and of HCCL, and no document says), `quickstart` and `fsdp` (losses against
`quickstart_losses.json`, which `bf16_losses.py` wrote on a CPU), `step` and `fsdp_step` (the 1B configuration: memory and
tokens/s), `collectives` (a table in the columns of hccl_test and nccl-tests), `machine` (rates of products, memory and
links and the host's time, into a file beside the report, of which `scripts/bench/mfu.py --machine FILE` makes its table),
`host` (time per op), `memory` (may it be filled anew), `twice` (the same bits), `profile` (three steps), `refusal` (HCCL's
words) and `killed` (a rank that dies). After each, how many errors CANN logged (plog). A part that fails is written down,
and the rest goes on. Exits with 1 if one did.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from scripts.ascend import node  # noqa: E402
from tests.msrun import launch, report  # noqa: E402

SECONDS = {"environment": 60, "device": 90, "contract": 120, "ops": 180, "context": 120, "quickstart": 150, "fsdp": 150,
           "step": 240, "fsdp_step": 240, "collectives": 100, "machine": 180, "host": 120, "memory": 60, "twice": 120,
           "profile": 300, "refusal": 90, "killed": 150}
REHEARSED = 5  # times as long may a part take where CPU kernels stand in
OPS_BOUND = 2.0**-6  # of the largest element, in bfloat16: the kernels round at other places than the reference
COLUMNS = ("collective", "data_size(Bytes)", "count", "type", "redop", "aveg_time(us)", "alg_bandwidth(GB/s)",
           "busbw(GB/s)", "check_result")
TOLD = {"HCCL_EXEC_TIMEOUT": "60", "HCCL_CONNECT_TIMEOUT": "120"}  # seconds; a dead rank is told of before the part ends


def rank_side(options) -> None:
    from scripts.ascend import context, probes, ranks

    if options.part == "twice" and not options.rehearse:
        import mindspore as ms

        ms.set_deterministic(True)  # HCCL asks when it starts
    with ranks.world_of(options.rehearse) as world:
        result = next(getattr(m, options.part) for m in (ranks, probes, context) if hasattr(m, options.part))
        result = result(world, options)
        if world.rank == 0 or result.get("failed") or options.part == "killed":
            report(result)
        if options.part in ("refusal", "killed"):  # what comes after an error is not asked: goodbyes would wait for a peer
            sys.stdout.flush()
            os._exit(0)


# -- the parent --------------------------------------------------------------------------------------------------------
def environment(options) -> tuple[str, bool]:
    """Versions and whether they match, wiring, settings and the machine, as commands and files tell them."""
    lines = [f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"]
    for name in ("mindspore", "numpy"):
        lines.append(f"{name} {__import__(name).__version__}")
    told, wrong = node.versions(package=node.mindspore_folder())
    lines += [*told, *(f"DO NOT MATCH: {reason}" for reason in wrong)]
    for command in (["git", "-C", str(ROOT), "log", "-1", "--format=%H %cI"], ["git", "-C", str(ROOT), "status", "--short"],
                    *node.wiring(len(node.devices())), ["nproc"], ["free", "-g"]):
        lines += ["$ " + " ".join(command), node.output(command)]
    for pattern in ("usr/local/Ascend/*/latest/version.cfg", "usr/local/Ascend/[df]*/version.info", "etc/hccn.conf",
                    "usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
                    "usr/local/Ascend/cann/*-linux/ascend_toolkit_install.info"):
        for file in sorted(Path("/").glob(pattern)):
            lines += [f"-- {file}", file.read_text(errors="replace")[:1500]]
    names = ("ASCEND", "HCCL", "MS_", "CANN", "LD_LIBRARY_PATH", "RANK", "DEVICE", "OMP", "GLOG")
    lines += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(names)]
    return "\n".join(lines), not wrong or options.rehearse


class Report:
    """The file to mail back, written as it comes: what was done is there if the node goes away."""

    def __init__(self, file: Path, logs: Path):
        self.file, self.logs, self.summary = file, logs, []
        file.write_text("")

    def write(self, text: str) -> None:
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(text + "\n")

    def part(self, name: str, run: Callable[[], tuple[str, bool]]) -> bool:
        """Runs a part, which gives its text and whether all is well."""
        start = time.monotonic()
        os.environ["ASCEND_PROCESS_LOG_PATH"] = str(self.logs / name.replace(" ", "_"))  # where CANN writes plog
        try:
            text, fine = run()
        except Exception:
            text, fine = traceback.format_exc(), False
        text += "\n" + node.plog(Path(os.environ["ASCEND_PROCESS_LOG_PATH"]))
        line = f"{name:<24}{'ok' if fine else 'FAILED':<8}{time.monotonic() - start:6.0f} s"
        self.summary.append((line, fine))
        print(line, flush=True)
        self.write(f"\n==== {line}\n{text}")
        return fine


def on_ranks(name: str, ranks: int, options, folder: Path) -> tuple[list, str | None]:
    """Rank 0's report, and those of ranks that failed; then what went wrong with the launch itself."""
    args = ["--part", name, "--folder", str(folder), *(["--rehearse"] if options.rehearse else [])]
    outcome = launch(Path(__file__).resolve(), ranks, args, SECONDS[name] * (REHEARSED if options.rehearse else 1),
                     env=TOLD if name in ("killed", "refusal") else None)
    return [r for reports in outcome.reports for r in reports], outcome.failure


def plain_part(name: str, ranks: int, options, folder: Path) -> tuple[str, bool]:
    results, failure = on_ranks(name, ranks, options, folder)
    text = [json.dumps({k: v for k, v in r.items() if k != "table"}, indent=1) for r in results]
    for r in results[:1]:
        text += ["  ".join(f"{v!s:>19}" for v in row) for row in ((COLUMNS, *r["table"]) if "table" in r else ())]
    if failure:
        text.append(failure)
    return "\n".join(text), bool(results) and failure is None and not any(r.get("failed") for r in results)


def ending_part(name: str, ranks: int, options, folder: Path) -> tuple[str, bool]:
    """Of a part in which the launch fails on purpose: all is well where it ended by itself and no rank saw a wrong thing."""
    start = time.time()
    results, failure = on_ranks(name, ranks, options, folder)
    died = folder / "killed_at"
    text = [json.dumps(r, indent=1) for r in results] + [failure or "every rank left with 0"]
    if name == "killed" and died.exists():
        text.append(f"the launch ended {time.time() - max(start, float(died.read_text())):.1f} s after the death")
    stuck = failure is not None and "not done after" in failure
    seen = died.exists() if name == "killed" else bool(results)
    return "\n".join(text), seen and not stuck and not any(r.get("failed") for r in results)


def ops_part(options, folder: Path) -> tuple[str, bool]:
    """The same calls in a process for the CPU and in one for the device."""
    made = subprocess.run([sys.executable, __file__, "--reference", str(folder / "cpu.npz")], capture_output=True, text=True,
                          timeout=SECONDS["ops"] * REHEARSED)
    if made.returncode:
        return made.stdout[-3000:] + made.stderr[-3000:], False
    _, failure = on_ranks("ops", 1, options, folder)
    if failure:
        return failure, False
    import numpy as np

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


def machine_part(name: str, ranks: int, options, folder: Path) -> tuple[str, bool]:
    """What `ranks.machine` measured, with what the host costs, in a file beside the report: all that mfu.py needs."""
    import yaml

    from ms_dtensor.debug.predict import load_hardware

    text, fine = plain_part(name, ranks, options, folder)
    if not fine:
        return text, False
    asked = subprocess.run([sys.executable, ROOT / "scripts/bench/mfu.py", "--host"], capture_output=True, text=True,
                           timeout=SECONDS[name])
    if asked.returncode:
        return f"{text}\n{asked.stdout[-3000:]}{asked.stderr[-3000:]}", False
    told = yaml.safe_load((folder / "machine.yaml").read_text())
    told["asking_us"] = json.loads(asked.stdout.splitlines()[-1])
    file = options.out.with_suffix(".machine.yaml")
    file.write_text(yaml.safe_dump(told, sort_keys=False))
    load_hardware(file)  # or it says what is not there
    return f"{text}\n{file.read_text()}\npython scripts/bench/mfu.py --machine {file}", True


def reference(file: Path) -> None:
    """`fused` by the library's CPU forms, which its tests prove."""
    import mindspore as ms
    import numpy as np

    ms.set_device("CPU")
    from ms_dtensor import init_device_mesh
    from scripts.ascend.ranks import fused

    np.savez(file, **fused(init_device_mesh("cpu", (1,), mesh_dim_names=("one",))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--ranks", type=int, help="default: the number of NPUs, at most 8; rehearsed 2")
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
    options.out = out = options.out or Path(f"ascend_first_{platform.node()}_{time.strftime('%Y%m%d_%H%M%S')}.txt")
    ranks = options.ranks or (2 if options.rehearse else min(8, max(1, len(node.devices()))))
    why = [] if options.rehearse else node.missing(package=node.mindspore_folder())
    if not options.rehearse and not why and ranks > len(node.devices()):
        why = [f"--ranks {ranks}, and this machine has {len(node.devices())} NPUs: a rank needs one of its own."]
    if why:
        said = node.refusal(why)
        out.write_text("\n".join([said, *node.versions(package=node.mindspore_folder())[0]]) + "\n")
        print(said, file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="ms_dtensor_first_"))
    file = Report(out, folder / "plog")
    if options.rehearse:
        file.write("REHEARSED: emulated HCCL, CPU kernels, small sizes; times and memory mean nothing.")

    def on(count: int, name: str, run: Callable = plain_part) -> tuple[str, str, Callable]:
        return name, f"{name} on {count}", lambda: run(name, count, options, folder)
    runs: list[tuple[str, str, Callable]] = [
        ("environment", "environment", lambda: environment(options)),
        *([] if options.rehearse else [("device", "device", node.plugin_loads)]),
        *(on(n, "contract") for n in sorted({min(2, ranks), ranks})),
        ("ops", "ops", lambda: ops_part(options, folder)), on(ranks, "context"),
        *(on(ranks, name) for name in ("quickstart", "fsdp", "step", "fsdp_step", "collectives")),
        on(ranks, "machine", machine_part), on(ranks, "host"),
        on(1, "memory"), on(ranks, "twice"), *([] if options.rehearse else [on(ranks, "profile")]),
        *(on(ranks, name, ending_part) for name in ("refusal", "killed")),
    ]
    for name, title, run in runs:
        if (not options.only or name in options.only.split(",")) and not file.part(title, run) and name == "device":
            break
    file.write("\n==== summary\n" + "\n".join(line for line, _ in file.summary))
    print(f"please mail back: {out.resolve()}")
    return 0 if all(fine for _, fine in file.summary) else 1


if __name__ == "__main__":
    sys.exit(main())
