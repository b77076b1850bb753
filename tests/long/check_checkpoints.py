# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under everything that can happen to them. Prints JSON; exits non-zero if anything is wrong.

    python -m tests.long.check_checkpoints kills | fuzz | memory [--runs N] [--seed 0] [--gib 4]

kills    SIGKILL of a random rank, or of all, at a random moment of jobs that save without pause: `latest` loads and
         verifies, no save that was reported is lost, the others end, and the next save leaves no litter
fuzz     changed headers and indexes: a clear error each, no other exception, no file outside the folder, no memory
memory   a large file loaded as one rank of four: the peak above the shard
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("GLOG_v", "3")

import numpy as np  # noqa: E402


def kills(args, folder: Path) -> dict:
    from tests.checkpoint.killing import kill_once, left_over

    runs = [kill_once(folder, args.seed + i) for i in range(args.runs or 60)]
    litter = left_over(folder)
    return {"runs": len(runs), "killed": dict(Counter("all" if r["killed"] == "all" else "one" for r in runs)),
            "while_saving": sum(r["under_way"] for r in runs), "asynchronous": sum(r["asynchronous"] for r in runs),
            "last_step": runs[-1]["step"], "litter": litter, "wrong": [r for r in runs if r["wrong"]] + litter}


def fuzz(args, folder: Path) -> dict:
    from tests.checkpoint.damage import fuzz

    out = fuzz(folder, args.runs or 10_000, args.seed)
    wrong = out["wrong"] + out["outside"] + ([f"memory grew by {out['grown']}"] if out["grown"] > out["size"] else [])
    return {**out, "wrong": wrong}


def memory(args, folder: Path) -> dict:
    """The peak of a load of a quarter, by rows and by columns, as this process's own counters tell."""
    code = """
import sys, json, numpy as np, mindspore as ms, ms_dtensor as md
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) // 1024
folder, gib = sys.argv[1], float(sys.argv[2])
rows, out = int(gib * 2 ** 30 / 4 / 8192), {}
for name, place in (("rows", 0), ("columns", 1)):
    with md.comm.fake_world(4, rank=2):
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        shape = [rows, 8192]
        shape[place] //= 4
        local = ms.Tensor.from_numpy(np.ones(shape, np.float32))
        w = md.DTensor.from_local(local, mesh, [md.Shard(place)])
        md.checkpoint.load({"small": np.zeros(3)}, folder, strict=False)
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        md.checkpoint.load({"w": w}, folder, strict=False)
        peak = status("VmHWM")
        part = w.to_local().asnumpy()
        first = 2 * shape[place]
        right = all(part[i, j] == ((i + first * (place == 0)) * 8192 + j + first * (place == 1)) % 65521
                    for i in (0, shape[0] // 3, shape[0] - 1) for j in (0, shape[1] // 3, shape[1] - 1))
    out[name] = {"shard_mib": part.nbytes >> 20, "before_mib": before, "peak_mib": peak, "above_mib": peak - before,
                 "right": bool(right)}
    del w, local, part
print(json.dumps(out))
"""
    from ms_dtensor import checkpoint

    rows = int(args.gib * 2 ** 30 / 4 / 8192)
    whole = np.empty((rows, 8192), np.float32)
    for at in range(0, rows, 1024):
        block = np.arange(at * 8192, min(at + 1024, rows) * 8192, dtype=np.int64) % 65521
        whole[at:at + 1024] = block.reshape(-1, 8192)
    checkpoint.save({"w": whole, "small": np.zeros(3)}, folder / "a")
    del whole
    done = subprocess.run([sys.executable, "-c", code, str(folder / "a"), str(args.gib)], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        return {"wrong": [done.stderr[-2000:]]}
    out = json.loads(done.stdout.splitlines()[-1])
    size = sum(p.stat().st_size for p in (folder / "a").iterdir())
    return {"bytes": size, **out, "wrong": [k for k, r in out.items() if not r["right"] or r["above_mib"] > 64]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "fuzz", "memory"))
    parser.add_argument("--runs", type=int, help="of kills (60) and fuzz (10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gib", type=float, default=4, help="of memory")
    parser.add_argument("--folder", default=None, help="where to write; default: the system's temporary folder")
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder) / "run"
        root.mkdir()
        out = globals()[args.what](args, root)
    print(json.dumps({"check": args.what, "seconds": round(time.monotonic() - begun, 1), **out}, indent=1))
    return 1 if out["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
