# SPDX-License-Identifier: Apache-2.0
"""Ways in which a checkpoint is damaged; each is to be named by `verify` and refused by `load`."""
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ms_dtensor.checkpoint.index import NAME, Index, dump, sealed
from ms_dtensor.checkpoint.plan import Request, assign, whole_box
from ms_dtensor.checkpoint.state import Leaf
from ms_dtensor.checkpoint.writer import file_name, merged, write

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
    plan = assign([Request(key, 4, whole_box(array.shape, (0, 1))) for key, array in values.items()])
    folder.mkdir()
    save_id = f"{seed:032x}"
    told = [write(folder / file_name(rank, 2), plan[rank], leaves,
                  lambda part: values[part.key][tuple(slice(*e) for e in part.box)], save_id) for rank in (0, 1)]
    (folder / NAME).write_bytes(dump(Index(save_id, 1, "0.1.0", *merged(plan, told, leaves), {"step": 1}, {})))


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


def _swap_offsets(body: dict) -> None:
    for key in ("large", "same"):
        assert len(body["tensors"][key]["chunks"]) == 2 or len(body["tensors"][key]["chunks"]) == 1
    one, two = (body["tensors"][key]["chunks"][0] for key in ("large", "same"))
    for field in ("begin", "file"):
        one[field], two[field] = two[field], one[field]


def _swap_names(body: dict) -> None:
    tensors = body["tensors"]
    tensors["large"], tensors["same"] = tensors["same"], tensors["large"]


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
    "an index that exchanges two places": _index(_swap_offsets), "an index that exchanges two names": _index(_swap_names),
    "an index with another hash": _index(lambda b: b["tensors"]["small"]["chunks"][0].update(hashes="0" * 16)),
    "an index with another dtype": _index(lambda b: b["tensors"]["large"].update(dtype="I32")),
    "an index with another id": _index(lambda b: b.update(id="f" * 32)),
}
