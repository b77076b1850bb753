# SPDX-License-Identifier: Apache-2.0
"""Ways in which a checkpoint is damaged; each is to be named by `verify` and refused by `load`.

Headers and indexes changed at random: a clear error each, or a checkpoint that loads right; nothing else is touched.
"""
import copy
import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ms_dtensor import checkpoint
from ms_dtensor.checkpoint.index import NAME, Index, TensorInfo, dump, file_name, sealed
from ms_dtensor.checkpoint.plan import Request, assign, parts_of, whole_on
from ms_dtensor.checkpoint.shard import DIGEST, HASHES, redigested
from ms_dtensor.checkpoint.spread import Ranks
from ms_dtensor.checkpoint.state import Leaf
from ms_dtensor.checkpoint.writer import write
from ms_dtensor.errors import CheckpointError

A, B = file_name(0, 2), file_name(1, 2)
SHAPES = {"large": (900, 1200), "same": (900, 1200), "small": (3, 50), "scalar": ()}


def arrays(seed: int = 0, scale: int = 1) -> dict[str, np.ndarray]:
    """The values of a checkpoint, with fewer rows at a larger scale."""
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=tuple(n // scale for n in shape)).astype(np.float32) for key, shape in SHAPES.items()}


def make(folder: Path, seed: int = 0, scale: int = 1) -> None:
    """A checkpoint as two ranks write it."""
    values = arrays(seed, scale)
    leaves = {key: Leaf(key, array) for key, array in values.items()}
    plan = assign([Request(key, 4, array.shape, whole_on(2, array.shape)) for key, array in values.items()], 2)
    folder.mkdir()
    save_id = f"{seed:032x}"
    for rank in (0, 1):
        parts = parts_of(rank, plan, {key: array.shape for key, array in values.items()})
        write(folder / file_name(rank, 2), parts, leaves, lambda part: values[part.key][tuple(slice(*e) for e in part.box)],
              save_id)
    tensors = {key: TensorInfo(key, "float32", array.shape, plan[key], 2) for key, array in values.items()}
    (folder / NAME).write_bytes(dump(Index(save_id, 1, "0.1.0", 2, Ranks.of([0, 1]), tensors, {"step": 1}, {}, 5)))


def _bytes(name: str, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        new = change(data)
        (folder / name).write_bytes(new if isinstance(new, bytes | bytearray) else data)
    return damage


def _flip(at: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 4
    return change


def _exchange(data: bytearray, a: int, b: int, n: int) -> None:
    data[a:a + n], data[b:b + n] = data[b:b + n], data[a:a + n]


def _index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """An index that was changed by somebody who knows how to seal it."""
    def damage(folder: Path) -> None:
        body = json.loads((folder / NAME).read_bytes())["index"]
        change(body)
        (folder / NAME).write_bytes(sealed(json.dumps(body).encode()))
    return damage


def _swap_files(folder: Path) -> None:
    os.rename(folder / A, folder / "x")
    os.rename(folder / B, folder / A)
    os.rename(folder / "x", folder / B)


def _from_other(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        make(folder.parent / "other", seed=1)
        shutil.copy(folder.parent / "other" / name, folder / name)
        shutil.rmtree(folder.parent / "other")
    return damage


def _instead(make_it: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.rename(folder / A, folder.parent / A)
        make_it(folder / A)
    return damage


def _header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """The same with a shard's header."""
    def damage(folder: Path) -> None:
        data = (folder / A).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        assert len(text) == length
        (folder / A).write_bytes(redigested(data[:8] + text) + data[8 + length:])
    return damage


def _swap_parts(header: dict) -> None:
    one, two = (next(name for name in header if name.startswith(key)) for key in ("large", "same"))
    header[one], header[two] = header[two], header[one]


def _swap_names(body: dict) -> None:
    tensors = body["tensors"]
    tensors["large"], tensors["small"] = tensors["small"], tensors["large"]


def _other_writer(body: dict) -> None:
    copy = body["tensors"]["small"]["copy"]
    copy[0] = 1 - copy[0]


KINDS: dict[str, Callable[[Path], None]] = {
    "a bit of the data": _bytes(A, _flip(-100_000)), "a bit of the last byte": _bytes(B, _flip(-1)),
    "a bit of a shard's header": _bytes(A, _flip(40)), "a bit of the header's length": _bytes(A, _flip(0)),
    "a byte cut off": _bytes(A, lambda d: d[:-1]), "half cut off": _bytes(B, lambda d: d[:len(d) // 2]),
    "a shard emptied": _bytes(A, lambda d: b""), "bytes appended": _bytes(A, lambda d: d + b"\0" * 8),
    "a shard removed": lambda f: (f / B).unlink(), "two shards swapped": _swap_files,
    "a shard of another save": _from_other(B), "the index of another save": _from_other(NAME),
    "a bit of the index": _bytes(NAME, _flip(500)), "the index cut off": _bytes(NAME, lambda d: d[:-20]),
    "the index removed": lambda f: (f / NAME).unlink(),
    "two elements exchanged": _bytes(A, lambda d: _exchange(d, len(d) - 800, len(d) - 400, 4)),
    "two pages exchanged": _bytes(A, lambda d: _exchange(d, 8192, 16384, 4096)),
    "a page of zeros": _bytes(A, lambda d: d.__setitem__(slice(8192, 12288), bytes(4096))),
    "a link in place of a shard": _instead(lambda path: path.symlink_to(path.parent.parent / A)),
    "a folder in place of a shard": _instead(lambda path: path.mkdir()),
    "a pipe in place of a shard": _instead(os.mkfifo),
    "a header that exchanges two places": _header(_swap_parts),
    "a header with another hash": _header(lambda h: h["__metadata__"].update({
        HASHES: "0" * 16 + h["__metadata__"][HASHES][16:]})),
    "an index that names another writer": _index(_other_writer), "an index that exchanges two names": _index(_swap_names),
    "an index with another dtype": _index(lambda b: b["tensors"]["large"].update(dtype="I32")),
    "an index with another id": _index(lambda b: b.update(id="f" * 32)),
    "an index without a file": _index(lambda b: b.update(files=[[0, 1, 1]])),
    "an index with another number of parts": _index(lambda b: b["tensors"]["large"].update(copy=[0, 1])),
}


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
