# SPDX-License-Identifier: Apache-2.0
"""Ways in which a checkpoint is damaged; each is to be named by `verify` and refused by `load`."""
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ms_dtensor.checkpoint.index import NAME, Index, TensorInfo, dump, file_name, sealed
from ms_dtensor.checkpoint.plan import Request, assign, parts_of, whole_on
from ms_dtensor.checkpoint.shard import HASHES, redigested
from ms_dtensor.checkpoint.spread import Ranks
from ms_dtensor.checkpoint.state import Leaf
from ms_dtensor.checkpoint.writer import write

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
