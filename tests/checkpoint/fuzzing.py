# SPDX-License-Identifier: Apache-2.0
"""Headers and indexes changed at random: a clear error each, or a checkpoint that loads right; nothing else is touched."""
import copy
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint.index import NAME, sealed
from ms_dtensor.checkpoint.shard import DIGEST, redigested
from ms_dtensor.errors import CheckpointError
from tests.checkpoint.damage import A, B, arrays, make

ODD: list[Any] = [0, -1, 1, 2 ** 31, 2 ** 62, 2 ** 63, 2 ** 64, 10 ** 30, 0.5, 1e308, True, None, "", "x", "..", "../" + A,
                  "/etc/passwd", A, B, "F32", "BF16", [], [0], [[0, 1]], [[0, 2 ** 60]] * 2, {}, {"float": "nan"}, "0" * 8,
                  "f" * 4096, [[]] * 50]


BEGIN = b'{"__metadata__":{"%s":"' % DIGEST.encode()


def mutate(node: Any, rng: random.Random) -> Any:
    """A JSON tree with something changed somewhere in it."""
    node = copy.deepcopy(node)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, path = node, []
        while isinstance(at, dict | list) and at and (not path or rng.random() < 0.8):
            key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
            path.append((at, key))
            at = at[key]
        if not path:
            continue
        holder, key = path[-1]
        what = rng.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[rng.choice(("x", "w", "large", key + "x"))] = holder.pop(key)
        elif what == 2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(rng.choice(holder)))
        elif what == 3 and isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 4, 8, 4096, -8))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD if rng.random() < 0.7 else [h[k] for h, k in path]))
    return node


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with something changed, cut off or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(len(out)) if out else 0
        what = rng.randrange(4)
        if what == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[at:at + rng.choice((1, 8, 1000))]
        elif what == 2:
            out[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
        elif out:
            out[at] = rng.choice(b'0129{}[]",:-.eE\\\x00\xff')
    return bytes(out)


class Watch:
    """The files that this process opens, as Python's audit hook tells."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.on = False
        sys.addaudithook(self._hook)  # for good: there is no way to take one back

    def _hook(self, event: str, arguments: tuple) -> None:
        if self.on and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            self.opened.append(os.path.abspath(os.fsdecode(arguments[0])))


def memory(what: str) -> int:
    """This process's memory, "VmRSS", or its largest since `forget_peak`, "VmHWM", in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(what))


def forget_peak() -> None:
    """Lets the kernel count the largest memory anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def fuzz(folder: Path, runs: int, seed: int = 0) -> dict:
    """Loads and verifies that many changed checkpoints.

    Returns:
        How many were refused and how many loaded right, what else was raised, what was opened outside the folder, and how
        much memory one of them took at most.
    """
    home = folder / "a"
    make(home, scale=2)
    there = originals = {name: (home / name).read_bytes() for name in (NAME, A, B)}
    body = json.loads(originals[NAME])["index"]
    heads = {name: int.from_bytes(originals[name][:8], "little") for name in (A, B)}
    want, rng, watch = arrays(scale=2), random.Random(seed), Watch()
    checkpoint.load({key: np.full_like(a, 0) for key, a in want.items()} | {"step": None}, home)  # unchanged, it loads
    out: dict[str, Any] = {"runs": runs, "refused": 0, "loaded": 0, "wrong": [], "outside": [], "grown": 0}
    for run in range(-20, runs):  # the first ones warm up
        kind = run % 4
        new, index = dict(originals), copy.deepcopy(body)
        if kind == 0:
            new[NAME] = sealed(json.dumps(mutate(index, rng)).encode())
        elif kind == 1:
            data = mutate_bytes(originals[NAME], rng)
            new[NAME] = data if rng.random() < 0.3 else sealed(mutate_bytes(json.dumps(index).encode(), rng))
        else:  # a header, with the digest that it should have
            name = rng.choice((A, B))
            text = originals[name][8:8 + heads[name]]
            text = mutate_bytes(text, rng) if kind == 2 else json.dumps(mutate(json.loads(text), rng), separators=(
                ",", ":")).encode()
            length = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2 ** 31, 2 ** 63, 2 ** 64 - 1, len(text) + 8))
            head = length.to_bytes(8, "little") + text
            new[name] = (redigested(head) if text.startswith(BEGIN) else head) + originals[name][8 + heads[name]:]
        for name, data in new.items():
            if data != there[name]:
                (home / name).write_bytes(data)
        there = new
        target = {key: np.full_like(a, 0) for key, a in want.items()} | {"step": None}  # touched: no memory of the load
        for _ in range(3):  # again where memory grew: what a thread's first allocations take is not of this checkpoint
            forget_peak()
            before = memory("VmRSS")
            watch.on = run >= 0
            error: BaseException | None = None
            try:
                found = checkpoint.verify(home)
                checkpoint.load(target, home, strict=False)
            except BaseException as e:
                error = e
            watch.on = False
            grown = memory("VmHWM") - before
            if grown <= sum(map(len, originals.values())):
                break
        loaded = error is None
        if error is not None and not isinstance(error, CheckpointError):
            out["wrong"].append(f"run {run}: {type(error).__name__}: {error}"[:300])
        out["grown"] = max(out["grown"], grown) if run >= 0 else 0
        if run < 0:
            continue
        if loaded and any(not np.array_equal(target[key], a) and target[key].any() for key, a in want.items()):
            out["wrong"].append(f"run {run}: loaded other values")
        out["loaded" if loaded else "refused"] += 1
        if not loaded and not found and not any(text.startswith(f"run {run}:") for text in out["wrong"]):
            out["unnamed"] = out.get("unnamed", 0) + 1  # sound, but of other names or shapes than this program's
    inside = str(home.resolve())
    out["outside"] = sorted({path for path in watch.opened if not os.path.realpath(path).startswith(inside)})
    out["opened"] = len(watch.opened)
    out["size"] = sum(map(len, originals.values()))
    return out
