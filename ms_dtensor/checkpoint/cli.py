# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor ckpt ls | diff | verify | convert`: checkpoints on the command line. No MindSpore, no ranks.

Exit codes: 0 all is well; 1 they differ, or are damaged; 2 it could not be done. Tables are for people; `--json` is for
programs.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import short_dtype
from ..core.refused import refused
from ..debug.text import columns, human
from ..errors import CheckpointError
from ..redistribute.boxes import Box
from .converting import convert
from .folder import find, latest, step_name, steps
from .index import NAME, Index, TensorInfo
from .reader import Reader, read_index
from .verifying import verify

SLAB = 16 << 20  # bytes of a tensor that are compared at a time


def main(arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except CheckpointError as e:
        return refused(e if args.json else _shown(str(e), "\n"), args.json)
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor")
    ckpt = parser.add_subparsers(required=True, metavar="ckpt").add_parser("ckpt", help="checkpoints")
    commands = ckpt.add_subparsers(required=True, metavar="ls | diff | verify | convert")

    def command(name: str, run: Callable, text: str, *paths: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        for path in paths:
            made.add_argument(path, type=Path)
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(run=run)
        return made
    command("ls", _ls, "what a checkpoint holds, or which steps a folder has", "path")
    command("diff", _diff, "how two checkpoints differ, whatever layouts they were saved in", "a", "b")
    command("verify", _verify, "reads every byte of a checkpoint, or of all in a folder, and names what is wrong", "path")
    made = command("convert", _convert, "a checkpoint into a safetensors file, or such files into a checkpoint",
                   "source", "target")
    made.add_argument("--dtype", help="dtype of floating tensors, e.g. bfloat16")
    made.add_argument("--strip", default="", help="leave this beginning of keys out, and what does not begin so")
    return parser


# -- the commands ----------------------------------------------------------------------------------------------------------
def _ls(args) -> int:
    if not (args.path / NAME).is_file() and steps(args.path):
        return _ls_steps(args)
    index = read_index(find(args.path))
    if args.json:
        tensors = {key: {"dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes, "parts": t.count()}
                   for key, t in index.tensors.items()}
        print(json.dumps({"id": index.id, "step": index.step, "library": index.library, "files": index.file_count(),
                          "bytes": _bytes(index), "tensors": tensors, "values": index.values, "tied": index.tied}))
        return 0
    rows = [(key, f"{short_dtype(t.dtype)}{list(t.shape)}", human(t.nbytes), str(t.count()))
            for key, t in index.tensors.items()]
    _table(("tensor", "is", "bytes", "parts"), rows)
    _table(("value", "is"), [(key, repr(value)) for key, value in index.values.items()])
    _table(("tied", "to"), list(index.tied.items()))
    print(f"{len(index.tensors)} tensors, {human(_bytes(index))} in {index.file_count()} files, step {index.step}, "
          f"ms_dtensor {index.library}")
    return 0


def _ls_steps(args) -> int:
    now, rows = latest(args.path), []
    for step in steps(args.path):
        folder = args.path / step_name(step)
        row = {"step": step, "bytes": 0, "files": 0, "latest": folder == now, "error": ""}
        try:
            index = read_index(folder)
            row |= {"bytes": _bytes(index), "files": index.file_count()}
        except CheckpointError as e:
            row["error"] = e.attempt
        rows.append(row)
    if args.json:
        print(json.dumps(rows))
    else:
        _table(("step", "bytes", "files", ""), [(str(r["step"]), human(r["bytes"]), str(r["files"]),
                                                 r["error"] or "latest" * r["latest"]) for r in rows])
    return 1 if any(r["error"] for r in rows) else 0


def _verify(args) -> int:
    folders = [args.path / step_name(step) for step in steps(args.path)]
    if (args.path / NAME).is_file() or not folders:
        folders = [find(args.path)]
        if not any(folders[0].glob("*.safetensors")):  # nothing of a checkpoint that could be damaged
            read_index(folders[0])
    total = 0
    for folder in folders:
        with contextlib.suppress(CheckpointError):
            total += _bytes(read_index(folder))
    with _progress("verifying", total) as advance:
        found = {str(folder): verify(folder, advance) for folder in folders}
    if args.json:
        print(json.dumps({"checkpoints": found, "bytes": total, "sound": not any(found.values())}))
    else:
        for folder, wrong in found.items():
            print(_shown(f"{folder}: {'sound' if not wrong else '1 fault' if len(wrong) == 1 else f'{len(wrong)} faults'}"))
            for line in wrong:
                print(_shown(f"  {line}"))
    return 1 if any(found.values()) else 0


def _diff(args) -> int:
    with Reader(find(args.a)) as a, Reader(find(args.b)) as b:
        keys = [k for k in a.index.tensors if b.index.tensor(k) is not None]
        rows = [(k, "only in the first") for k in a.index.tensors if b.index.tensor(k) is None]
        rows += [(k, "only in the second") for k in b.index.tensors if a.index.tensor(k) is None]
        with _progress("comparing", sum(a.index.tensors[k].nbytes for k in keys)) as advance:
            for key in keys:
                text = _unlike(a, b, key, advance)
                if text:
                    rows.append((key, text))
        for key in dict.fromkeys((*a.index.values, *b.index.values)):
            mine, its = (r.index.values.get(key, "nothing") for r in (a, b))
            if repr(mine) != repr(its):
                rows.append((key, f"{mine!r}, in the second {its!r}"))
        if args.json:
            print(json.dumps({"equal": not rows, "compared": len(keys), "different": dict(rows)}))
        else:
            _table(("key", "difference"), rows)
            print(f"{len(keys)} tensors in both, {len(rows)} differences")
    return 1 if rows else 0


def _unlike(a: Reader, b: Reader, key: str, advance: Callable[[int], None]) -> str:
    """How a tensor differs; nothing if bit by bit it does not."""
    mine, its = a.index.tensors[key], b.index.tensor(key)
    assert its is not None
    if (mine.dtype, mine.shape) != (its.dtype, its.shape):
        return f"{short_dtype(mine.dtype)}{list(mine.shape)}, in the second {short_dtype(its.dtype)}{list(its.shape)}"
    count, largest = 0, 0.0
    for box in _slabs(mine):
        x, y = a.array(key, box), b.array(key, box)
        advance(x.nbytes)
        if x.tobytes() == y.tobytes():
            continue
        wide: Any = np.complex128 if x.dtype.kind == "c" else np.float64
        unlike = (x != y) & ~((x != x) & (y != y))
        count += int(unlike.sum())
        with np.errstate(invalid="ignore"):
            gap = np.abs(x.astype(wide) - y.astype(wide))[unlike]
        largest = max(largest, float(gap.max(initial=0.0)))
    return f"{count} of {mine.nbytes // mine.itemsize} elements, the largest difference is {largest:.3g}" if count else ""


def _slabs(tensor: TensorInfo) -> Iterator[Box]:
    """Boxes of a bounded size that make up a tensor."""
    whole = tuple((0, n) for n in tensor.shape)
    if 0 in tensor.shape:
        return
    rows = max(SLAB * tensor.shape[0] // tensor.nbytes, 1) if whole else 1
    for at in range(0, tensor.shape[0] if whole else 1, rows):
        yield ((at, min(at + rows, tensor.shape[0])), *whole[1:]) if whole else ()


def _convert(args) -> int:
    if args.target.is_symlink() or args.target.exists() and not (args.target.is_dir() and not any(args.target.iterdir())):
        raise CheckpointError(f"For 'convert', '{args.target}' is there already.", "", "The command replaces nothing.",
                              ("another name", "remove it first"))
    with _progress("converting", 0) as advance:
        done = convert(args.source, args.target, dtype=args.dtype, strip=args.strip, progress=advance)
    print(json.dumps(done) if args.json else f"{args.target}: {done['tensors']} tensors, {human(done['bytes'])}")
    return 0


# -- printing --------------------------------------------------------------------------------------------------------------
def _bytes(index: Index) -> int:
    return sum(t.nbytes for t in index.tensors.values())


def _shown(text: str, kept: str = "") -> str:
    """A text from a file as a terminal may have it: a name there may hold what moves the cursor or worse."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    print(columns([tuple(head), *(tuple(map(_shown, row)) for row in rows)]) + "\n")


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, if `rich` is installed; told of bytes."""
    try:
        if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield lambda nbytes: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                  console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda nbytes: bar.advance(task, nbytes)
