# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a 405B Llama, fp32 weights and two moments, on many ranks: planned, written and opened, without the data.

    python scripts/bench/checkpoint_index.py [--fsdp 2048] [--tp 8] [--rank 777]

Prints JSON: of one rank, which loads what it saved, the CPU seconds of each step, the bytes of the
index and of a shard's header, the files that it opens, and the peak of its memory. No MindSpore. Shards are sparse files.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from ms_dtensor import DeviceMesh, Layout, Replicate, Shard  # noqa: E402
from ms_dtensor.checkpoint.index import NAME, Index, TensorInfo, dump, file_name  # noqa: E402
from ms_dtensor.checkpoint.pieces import PIECE, as_bytes, piece_hash, piece_size  # noqa: E402
from ms_dtensor.checkpoint.plan import Request, assign, laid_out, part_name, parts_of, volume  # noqa: E402
from ms_dtensor.checkpoint.reader import Reader  # noqa: E402
from ms_dtensor.checkpoint.safetensors_file import CODES  # noqa: E402
from ms_dtensor.checkpoint.shard import redigested, sealed, texts  # noqa: E402
from ms_dtensor.checkpoint.spread import Ranks  # noqa: E402

DIM, FFN, VOCAB, KV, LAYERS = 16384, 53248, 128256, 1024, 126


def peak_kib() -> int:
    """Of this program; `ru_maxrss` would count the process that started it, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def layouts(mesh: DeviceMesh, layers: int) -> dict[str, Layout]:
    """Each weight and its moments: by rows or columns over tp, then by rows over fsdp; norms whole on tp."""
    found = {}
    whole, rows, columns = ([Shard(0), p] for p in (Replicate(), Shard(0), Shard(1)))

    def add(name: str, shape: tuple[int, ...], places: list) -> None:
        for part in ("model", "optimizer.m", "optimizer.v"):
            found[f"{part}.{name}"] = Layout(mesh, places, shape, "float32", ("tp", "fsdp"))
    for name, shape in (("embed", (VOCAB, DIM)), ("head", (VOCAB, DIM))):
        add(f"{name}.weight", shape, rows)
    add("norm.weight", (DIM,), whole)
    for i in range(layers):
        for name, shape, places in (("wq", (DIM, DIM), rows), ("wk", (KV, DIM), rows), ("wv", (KV, DIM), rows),
                                    ("wo", (DIM, DIM), columns), ("w1", (FFN, DIM), rows), ("w3", (FFN, DIM), rows),
                                    ("w2", (DIM, FFN), columns), ("norm1", (DIM,), whole), ("norm2", (DIM,), whole)):
            add(f"layers.{i}.{name}.weight", shape, places)
    return found


def write_header(folder: Path, rank: int, ranks: int, tensors: dict[str, TensorInfo], save_id: str) -> int:
    """A rank's file with zeros for data, which take no room; returns the bytes before them."""
    held = [(t, c) for t in tensors.values() for c in t.in_file(file_name(rank, ranks), rank)]
    zeros = as_bytes(np.zeros(PIECE, np.uint8))
    hash_of = lru_cache(lambda size: piece_hash(zeros[:size]))
    shapes = [tuple(hi - lo for lo, hi in c.box) for _, c in held]
    header: dict[str, Any] = {"__metadata__": texts(save_id, file_name(rank, ranks), [(s, 4) for s in shapes])}
    at, hashes = 0, {}
    for (t, c), shape in zip(held, shapes):
        size, piece = volume(c.box) * 4, piece_size(shape, 4)
        header[c.name] = {"dtype": CODES[t.dtype], "shape": shape, "data_offsets": [at, at + size]}
        hashes[c.name] = [hash_of(min(piece, size - i)) for i in range(0, size, piece)]
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = sealed(len(text).to_bytes(8, "little") + text, hashes)
    assert redigested(head) == head
    path = folder / file_name(rank, ranks)
    path.write_bytes(head)
    os.truncate(path, len(head) + at)
    return len(head)


def measure(fsdp: int, tp: int, rank: int, layers: int, folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {"ranks": fsdp * tp}
    seconds: dict[str, float] = {}
    begun = time.process_time()

    def lap(name: str) -> None:
        nonlocal begun
        now = time.process_time()
        seconds[name], begun = round(now - begun, 2), now
    ranks = fsdp * tp
    mesh = DeviceMesh("cpu", np.arange(ranks).reshape(fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    laid = layouts(mesh, layers)
    shapes = {key: layout.shape for key, layout in laid.items()}
    lap("layouts")
    plan = assign([Request(key, 4, layout.shape, laid_out(layout)) for key, layout in laid.items()], ranks)
    mine = parts_of(rank, plan, shapes)
    lap("plan")
    tensors = {key: TensorInfo(key, "float32", shapes[key], plan[key], ranks) for key in laid}
    save_id = "a" * 32
    data = dump(Index(save_id, 1, "0", ranks, Ranks.of(range(ranks)), tensors, {"step": 1}, {}, 1))
    (folder / NAME).write_bytes(data)
    lap("index written")
    before = write_header(folder, rank, ranks, tensors, save_id)
    lap("header written")
    with Reader(folder) as reader:
        lap("opened")
        read = reader.index.tensors
        for part in mine:  # the same layout again: all of it is in files that this rank names by itself
            found = list(read[part.key].chunks(part.box))
            assert [c.name for c in found] == [part_name(part.key, shapes[part.key], part.box)]
            with reader.file(found[0].file) as shard:
                shard.place(found[0], "float32")
        lap("own parts found")
        out |= {"tensors": len(read), "parts": sum(t.count() for t in read.values()), "own_parts": len(mine),
                "own_mib": sum(volume(p.box) * 4 for p in mine) >> 20, "files_opened": reader.files_opened}
        lap("all parts counted")
    out |= {"index_bytes": len(data), "header_bytes": before, "cpu_seconds": seconds, "all": sum(seconds.values()),
            "peak_mib": peak_kib() >> 10, "mindspore": "mindspore" in sys.modules}
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("fsdp", 2048), ("tp", 8), ("rank", 777), ("layers", LAYERS)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args.fsdp, args.tp, args.rank, args.layers, Path(folder)), indent=1))
