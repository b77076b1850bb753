# SPDX-License-Identifier: Apache-2.0
"""What dispatch adds to an op on a 4 x 4 tensor, in microseconds: MindSpore, its floor, ours, and PyTorch's DTensor.

    python scripts/bench/dispatch.py [--rounds 150] [--only add,view] [--no-save]

The floor is the least a Tensor subclass can do in MindSpore: `__fallback__` that runs the op under `NoFallbackGuard`
and makes a subclass of the result. Every round takes a short slice of all variants of a row in turns, torch in a
child process of its own (one thread each). The figure of a variant, of all alike, is its lower tenth over the rounds
(`low`): neighbours of a virtual machine slow all of it down for seconds, and nothing makes a slice faster than it is;
"added" is such a figure minus that of plain, "median" and "least" stand beside it. Rows "fb" are forward and backward
together.
MindSpore runs blocking, as the library sets it on CPU; "issue" is the time to issue an op in asynchronous mode, where
what is computed behind is not waited for, in a second child process. No case communicates.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from common import finish, one_thread, sample, summary

one_thread()
from ms_dtensor.tools.bench.arithmetic import warm_sample  # noqa: E402

N = 4


def torch_cases() -> dict:
    """The same rows in PyTorch: {"torch": plain thunk, "torch DTensor": thunk}."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    a, b = torch.randn(N, N), torch.randn(N, N)
    cut0, cut1, whole = [Shard(0)], [Shard(1)], [Replicate()]
    ops = {
        "add": (lambda x, y: x + y, cut0, (cut0, cut0)),
        "mul scalar": (lambda x: x * 2.0, cut0, (cut0,)),
        "matmul": (lambda x, y: x @ y, cut1, (whole, cut1)),
        "relu": (lambda x: torch.relu(x), cut0, (cut0,)),
        "transpose": (lambda x: x.t(), cut1, (cut0,)),
        "view": (lambda x: x.view(N, 2, N // 2), cut0, (cut0,)),
        "sum": (lambda x: x.sum(), whole, (cut0,)),
        "softmax": (lambda x: torch.softmax(x, 1), cut0, (cut0,)),
    }
    grad = torch.autograd.grad
    cases = {}
    for row, (fn, out, placed) in ops.items():
        plain = [a, b][:len(placed)]
        laid = [distribute_tensor(t, mesh, p) for t, p in zip(plain, placed)]
        cases[row] = {"torch": lambda fn=fn, xs=plain: fn(*xs), "torch DTensor": lambda fn=fn, xs=laid: fn(*xs)}
        plain_in = [t.clone().requires_grad_() for t in plain]
        laid_in = [distribute_tensor(t.clone(), mesh, p).requires_grad_() for t, p in zip(plain, placed)]
        seed = torch.ones_like(fn(*plain))
        laid_seed = distribute_tensor(seed, mesh, out)
        cases["fb " + row] = {"torch": lambda fn=fn, xs=plain_in, s=seed: grad(fn(*xs), xs, s),
                              "torch DTensor": lambda fn=fn, xs=laid_in, s=laid_seed: grad(fn(*xs), xs, s)}
    x = distribute_tensor(a, mesh, cut0)
    local = x.to_local()
    cases["to_local"] = {"torch": lambda: None, "torch DTensor": lambda: x.to_local()}
    cases["from_local"] = {"torch": lambda: None,
                           "torch DTensor": lambda: DTensor.from_local(local, mesh, cut0, run_check=False)}
    cases["redistribute to itself"] = {"torch": lambda: None, "torch DTensor": lambda: x.redistribute(placements=cut0)}
    ga, gx = a.clone().requires_grad_(), distribute_tensor(a.clone(), mesh, cut0).requires_grad_()
    gl, seed, laid_seed = local.clone().requires_grad_(), torch.ones(N, N), distribute_tensor(torch.ones(N, N), mesh, cut0)
    cases["fb to_local"] = {"torch": lambda: grad(ga.view_as(ga), ga, seed),
                            "torch DTensor": lambda: grad(gx.to_local(), gx, seed)}
    cases["fb from_local"] = {
        "torch": lambda: grad(ga.view_as(ga), ga, seed),
        "torch DTensor": lambda: grad(DTensor.from_local(gl, mesh, cut0, run_check=False), gl, laid_seed)}
    cases["fb redistribute to itself"] = {
        "torch": lambda: grad(torch.relu(gx), gx, laid_seed),
        "torch DTensor": lambda: grad(torch.relu(gx.redistribute(placements=cut0)), gx, laid_seed)}
    return cases


def serve(library: str) -> None:
    """A child: a line [row, variant, calls] in, microseconds out."""
    if library == "torch":
        cases, settle = torch_cases(), lambda: None
    else:
        import mindspore as ms

        from ms_dtensor.tools.bench.dispatch import mindspore_cases
        cases, settle = mindspore_cases(blocking=False), ms.runtime.synchronize
    print("ready", flush=True)
    for line in sys.stdin:
        row, variant, calls = json.loads(line)
        settle()
        took = warm_sample(cases[row][variant], calls, settle)
        settle()  # before the others go on
        print(took, flush=True)


class Child:
    """Another library, or another mode of MindSpore, in a process of its own.

    Args:
        library: "torch" or "asynchronous".
        variants: how the variants are called here -> there.
        calls: at most so many calls make a sample.
    """

    def __init__(self, library: str, variants: dict[str, str], calls: int = 1000):
        self.variants, self.calls = variants, calls
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", library], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.alive = self.process.stdout.readline().strip() == "ready"

    def __call__(self, row: str, variant: str, calls: int) -> float:
        self.process.stdin.write(json.dumps([row, self.variants[variant], min(calls, self.calls)]) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def low(values: list[float]) -> float:
    """Below which a tenth of the slices lie."""
    return statistics.quantiles(values, n=10, method="inclusive")[0]


def measure(cases: dict, rows, rounds: int, torch: Child | None, issue: Child | None) -> dict:
    from ms_dtensor.tools.bench.dispatch import ROWS
    out = {}
    for row in rows:
        calls = 8 if row.startswith("fb") else 40  # a few milliseconds
        variants = {name: (lambda n, fn=fn: warm_sample(fn, n)) for name, fn in cases[row].items()}
        for child in (torch, issue if row in ROWS[:8] else None):
            if child is not None:
                variants.update({name: (lambda n, child=child, row=row, name=name: child(row, name, n))
                                 for name in child.variants})
        for take in variants.values():
            take(calls)
        seen: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, take in variants.items():
                seen[name].append(take(calls))
        result = {name: {**summary(values), "low": round(low(values), 2)} for name, values in seen.items()}
        for name, plain in (("floor", "plain"), ("ours", "plain"), ("torch DTensor", "torch"),
                            ("ours issued", "plain issued")):
            if name in seen:
                result[name]["added"] = round(low(seen[name]) - low(seen[plain]), 2)
                result[name]["added_least"] = round(min(seen[name]) - min(seen[plain]), 2)
        out[row] = result
    return out


def misses(rounds: int = 30) -> dict:
    """Microseconds of a call whose plan is not known: caches emptied; and with layouts never seen before."""
    import mindspore as ms
    from mindspore import mint

    import ms_dtensor as md
    from ms_dtensor import comm
    from ms_dtensor.dispatch.dispatcher import clear_cache

    out = {}
    for label, shape in (("1 axis", (2,)), ("4 axes", (2, 2, 2, 2))):
        rest = [md.Replicate()] * (len(shape) - 1)
        with comm.fake_world(2 ** len(shape)):
            mesh = md.init_device_mesh("cpu", shape)

            def laid(width, placement, mesh=mesh, rest=rest):
                layout = md.Layout(mesh, [placement, *rest], (16, width))
                return md.DTensor.from_local(ms.ops.ones(layout.local_shape(), ms.float32), mesh, layout.placements,
                                             shape=layout.shape)
            calls = {"add": lambda x, y, z: mint.add(x, y), "matmul": lambda x, y, z: mint.matmul(x, z),
                     "softmax": lambda x, y, z: mint.softmax(x, dim=1), "sum": lambda x, y, z: mint.sum(x),
                     "view": lambda x, y, z: x.view(16, 2, -1)}
            widths = iter(range(32, 100000, 2))
            for name, fn in calls.items():
                fixed = laid(16, md.Shard(0)), laid(16, md.Shard(0)), laid(16, md.Replicate())
                fn(*fixed)
                hit, emptied, fresh = [], [], []
                for _ in range(rounds):
                    w = next(widths)
                    new = laid(w, md.Shard(0)), laid(w, md.Shard(0)), laid(16, md.Replicate())
                    if name == "matmul":
                        z = md.Layout(mesh, [md.Replicate(), *rest], (w, 16))
                        new = (*new[:2], md.DTensor.from_local(ms.ops.ones(z.local_shape(), ms.float32), mesh,
                                                               z.placements, shape=z.shape))
                    if name != "view":
                        fn(*(t.to_local() for t in new))  # MindSpore's own first call with these shapes is not ours
                    fresh.append(sample(lambda new=new, fn=fn: fn(*new), 1))
                    clear_cache()
                    emptied.append(sample(lambda fn=fn, fixed=fixed: fn(*fixed), 1))
                    hit.append(sample(lambda fn=fn, fixed=fixed: fn(*fixed), 1))
                out.setdefault(name, {})[label] = {
                    "hit": summary(hit), "emptied": summary([m - h for m, h in zip(emptied, hit)]),
                    "new": summary([m - h for m, h in zip(fresh, hit)])}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--only", default="")
    parser.add_argument("--serve", choices=("torch", "asynchronous"))
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--axes", type=int, default=1, help="axes of the mesh, all of size 1")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    from ms_dtensor.tools.bench.dispatch import ROWS, mindspore_cases
    rows = [r for r in (*ROWS, *("fb " + r for r in ROWS)) if not args.only or r.removeprefix("fb ") in args.only.split(",")]
    torch = None if args.no_torch else Child("torch", {"torch": "torch", "torch DTensor": "torch DTensor"})
    issue = Child("asynchronous", {f"{name} issued": name for name in ("plain", "floor", "ours")}, calls=30)
    result = measure(mindspore_cases(mesh_shape=(1,) * args.axes), rows, args.rounds,
                     torch if torch is not None and torch.alive else None, issue)
    for child in (torch, issue):
        if child is not None:
            child.close()
    table = [("", "plain", "ours", "added", "floor", "PyTorch", "verdict")]
    for row, r in result.items():
        ours, floor, other = (r.get(k, {}).get("added") for k in ("ours", "floor", "torch DTensor"))
        bound = max(v for v in (other, None if floor is None else 1.25 * floor, -1e9) if v is not None)
        table.append((row, r["plain"]["low"], r["ours"]["low"], ours, "-" if floor is None else floor,
                      "-" if other is None else other, "holds" if ours <= bound else f"above by {ours - bound:.1f}"))
    miss = misses() if not args.only else {}
    for name, by in miss.items():
        table.append((f"miss {name}", *(f"{axes}: {v['emptied']['median']:.0f}/{v['new']['median']:.0f}"
                                        for axes, v in by.items()), "", "", "", ""))
    for row, r in result.items():
        if "ours issued" in r:
            plain, ours, blocking = r["plain issued"]["low"], r["ours issued"], r["ours"]["low"]
            table.append((f"issue {row}", plain, ours["low"], ours["added"], r["floor issued"]["low"], "",
                          "holds" if ours["low"] <= blocking else f"above {blocking}, blocking"))
    finish("dispatch", {"unit": "us", "rounds": args.rounds, "figure": "low", "rows": result, "miss": miss}, table,
           not args.no_save and not args.only)


if __name__ == "__main__":
    main()
