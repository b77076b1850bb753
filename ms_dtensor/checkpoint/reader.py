# SPDX-License-Identifier: Apache-2.0
"""Boxes of a checkpoint's tensors into arrays: only the pieces that a box touches are read, and each is verified.

Bytes go straight to where they belong where they lie alike there, else through a few MiB of scratch; so a load needs no
memory beside the target's, whatever the files' size. `pread` and not a memory map: mapped pages count as the process's
memory, and a file that another process cuts off would end it. Invariant: no byte is handed out whose hash was not right,
from a file whose header is not of the same save as the index.
"""
from __future__ import annotations

import itertools
import math
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..redistribute.boxes import Box, relative
from .index import ID, MAX_INDEX, NAME, Chunk, Index, TensorInfo, parse
from .pieces import as_bytes, crc, piece_hash, view
from .plan import common, part_name, volume
from .safetensors_file import CODES, DTYPES, SafetensorsFile, put

BLOCK = 4 << 20  # bytes that a thread reads at a time


class _Run(NamedTuple):
    """Rows of a chunk that are read together."""

    begin: int  # bytes from the chunk's first
    end: int
    shape: tuple[int, ...]
    cut: tuple[slice, ...]  # of these rows what is wanted
    target: np.ndarray


_Job = tuple[str, TensorInfo, Chunk, _Run]


class Reader:
    """A checkpoint that is open for reading, by several threads; close it, or use `with`.

    Args:
        folder: the checkpoint.

    Attributes:
        index: what it holds.

    Raises:
        CheckpointError: no index, or an unsound one.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> from ms_dtensor.checkpoint.reader import Reader
        >>> folder = tempfile.mkdtemp() + "/one"
        >>> md.checkpoint.save({"w": np.arange(6.0).reshape(2, 3)}, folder)
        >>> with Reader(folder) as reader:
        ...     reader.array("w", ((0, 2), (1, 2))).tolist()
        [[1.0], [4.0]]
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self.bytes_read = 0
        self._entries: dict[str, dict] = {name: {} for name in self.index.files}  # what each header should tell
        for key, t in self.index.tensors.items():
            for c in t.chunks:
                shape = tuple(hi - lo for lo, hi in c.box)
                self._entries[c.file][part_name(key, t.shape, c.box)] = t.dtype, shape, c.begin
        self._files: dict[str, int] = {}
        self._lock, self._scratch = threading.Lock(), threading.local()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._threads = ThreadPoolExecutor(min(cores, 4)) if cores > 1 else None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Lets threads and files go."""
        if self._threads is not None:
            self._threads.shutdown()
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def array(self, key: str, box: Box | None = None) -> np.ndarray:
        """A tensor, or a box of it, as a new array."""
        tensor = self.index.tensor(key)
        if tensor is None:
            raise CheckpointError(f"For '{self.folder}', there is no tensor '{key}'.")
        box = tuple((0, n) for n in tensor.shape) if box is None else box
        out = np.empty([hi - lo for lo, hi in box], DTYPES[CODES[tensor.dtype]])
        self.read([(tensor, key, box, out)])
        return out

    def read(self, wanted: Sequence[tuple[TensorInfo, str, Box, np.ndarray]]) -> None:
        """Fills arrays of the boxes' shapes; of another dtype the values are converted.

        Args:
            wanted: tensor, its key for messages, box, and the array.
        """
        jobs = ((key, tensor, chunk, run) for tensor, key, box, out in wanted for chunk in tensor.chunks
                for run in self._runs(tensor, chunk, box, out))

        def run_all(jobs):
            for job in jobs:
                self._run(*job)
        if self._threads is None:
            run_all(jobs)
            return
        work = []
        for batch in _batches(jobs):
            work.append(self._threads.submit(run_all, batch))
            if len(work) > 64:  # so that the list of what is to be done stays short
                work.pop(0).result()
        for one in work:
            one.result()

    def check_file(self, name: str) -> None:
        """Whether a file is there, of its size, and with the header that was written.

        Raises:
            CheckpointError: it is not.
        """
        self._file(name)

    def check(self, key: str, tensor: TensorInfo, chunk: Chunk) -> None:
        """Reads a chunk for its hashes only.

        Raises:
            CheckpointError: one of them is not what is there.
        """
        size = volume(chunk.box) * tensor.itemsize
        for begin in range(0, size, max(BLOCK // chunk.piece, 1) * chunk.piece):
            self._verified(key, chunk, size, begin, min(begin + max(BLOCK // chunk.piece, 1) * chunk.piece, size), None)

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _runs(self, tensor: TensorInfo, chunk: Chunk, box: Box, out: np.ndarray) -> Iterator[_Run]:
        both = common(chunk.box, box)
        if both is None:
            return
        shape = tuple(hi - lo for lo, hi in chunk.box)
        cut, item = relative(both, chunk.box), tensor.itemsize
        target = view(out, relative(both, box))
        if not shape:
            yield _Run(0, item, (), (), target)
            return
        deep = 0  # the first dim whose rows are small enough to be read together
        while deep < len(shape) - 1 and item * math.prod(shape[deep + 1:]) > BLOCK:
            deep += 1
        row = item * math.prod(shape[deep + 1:])
        step = max(BLOCK // row, 1)
        if chunk.piece % row == 0:  # so that runs end where pieces do
            step = max(BLOCK // chunk.piece, 1) * (chunk.piece // row)
        lo, hi = cut[deep].start, cut[deep].stop
        for outer in itertools.product(*(range(c.start, c.stop) for c in cut[:deep])):
            base = sum(i * item * math.prod(shape[d + 1:]) for d, i in enumerate(outer))
            at = tuple(i - c.start for i, c in zip(outer, cut))
            a = lo
            while a < hi:
                b = min(a // step * step + step, hi)
                yield _Run(base + a * row, base + b * row, (b - a, *shape[deep + 1:]),
                           (slice(None), *cut[deep + 1:]), target[at][a - lo:b - lo])
                a = b

    def _run(self, key: str, tensor: TensorInfo, chunk: Chunk, run: _Run) -> None:
        dtype, size = DTYPES[CODES[tensor.dtype]], volume(chunk.box) * tensor.itemsize
        first, last = run.begin // chunk.piece * chunk.piece, min(-(-run.end // chunk.piece) * chunk.piece, size)
        target = run.target
        if (first, last) == (run.begin, run.end) and target.nbytes == last - first and target.flags.c_contiguous \
                and target.dtype == dtype:
            self._verified(key, chunk, size, first, last, as_bytes(target))
            return
        data = self._verified(key, chunk, size, first, last, None)
        rows = np.frombuffer(data, dtype, (run.end - run.begin) // dtype.itemsize, run.begin - first).reshape(run.shape)
        put(target, rows[run.cut] if run.shape else rows.reshape(()), key)

    def _verified(self, key: str, chunk: Chunk, size: int, first: int, last: int, into: memoryview | None) -> memoryview:
        """Bytes of a chunk from the begin of a piece to the end of one."""
        fd = self._file(chunk.file)
        if into is None:
            scratch = getattr(self._scratch, "buffer", None)
            if scratch is None or len(scratch) < last - first:
                scratch = self._scratch.buffer = bytearray(last - first)
            into = memoryview(scratch)[:last - first]
        for at in range(first, last, chunk.piece):
            part = into[at - first:min(at + chunk.piece, last) - first]
            done = 0
            while done < len(part):
                try:
                    got = os.preadv(fd, [part[done:]], chunk.begin + at + done)
                except OSError as e:
                    raise CheckpointError(f"For '{self.folder / chunk.file}', the file cannot be read: {e.strerror or e}."
                                          ) from e
                if not got:
                    raise _damaged(self.folder, chunk.file, f"it ends at byte {chunk.begin + at + done}, within '{key}'.")
                done += got
            if piece_hash(part) != chunk.hashes[at // chunk.piece]:
                raise _damaged(self.folder, chunk.file, f"bytes {chunk.begin + at} to {chunk.begin + at + len(part)}, of "
                               f"'{key}', are not what was written.")
        with self._lock:
            self.bytes_read += last - first
        return into

    def _file(self, name: str) -> int:
        with self._lock:
            fd = self._files.get(name)
            if fd is None:
                fd = self._files[name] = self._opened(name)
        return fd

    def _opened(self, name: str) -> int:
        path, info = self.folder / name, self.index.files[name]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # no link, and no pipe, leads on
        except OSError as e:
            raise CheckpointError(f"For '{path}', the file cannot be opened: {e.strerror or e}.", "",
                                  "It is one of the checkpoint's shards.", "load another checkpoint of the run") from e
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != info.size:
                raise _damaged(self.folder, name, f"it has {found.st_size} bytes, was written with {info.size}.")
            header = os.pread(fd, info.data, 0)
            if crc(header) != info.header or len(header) != info.data:
                raise _damaged(self.folder, name, _other_save(path, self.index) or "its header is not what was written.")
            self._check_header(path, name)
            return fd
        except BaseException:
            os.close(fd)
            raise


    def _check_header(self, path: Path, name: str) -> None:
        """A shard tells readers that know nothing of the index what the index tells."""
        file = SafetensorsFile(path)
        if file.metadata.get(ID) != self.index.id:
            raise _damaged(self.folder, name, _other_save(path, self.index))
        told = {entry: (e.dtype, e.shape, e.begin) for entry, e in file.tensors.items()}
        if told != self._entries[name]:
            raise _damaged(self.folder, name, "its header does not tell what the index tells.")


def read_index(folder: Path) -> Index:
    """The index of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or an unsound one.
    """
    path = folder / NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"For '{path}', the index is no regular file.")
            if os.fstat(fd).st_size > MAX_INDEX:
                raise CheckpointError(f"For '{path}', the index has {os.fstat(fd).st_size} bytes.", "",
                                      f"It is read whole; one has at most {MAX_INDEX}.")
            data = file.read()
    except OSError as e:
        raise CheckpointError(f"For '{folder}', there is no checkpoint: '{NAME}' cannot be read, {e.strerror or e}.", "",
                              "A checkpoint is a folder with an index and shards, or has a file 'latest' that names one.",
                              "pass the folder that was given to save()") from e
    return parse(data, str(path))


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Jobs in runs of about a block, so that a thread is not started for each small tensor."""
    batch, size = [], 0
    for job in jobs:
        batch.append(job)
        size += job[3].end - job[3].begin
        if size >= BLOCK or len(batch) == 256:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _other_save(path: Path, index: Index) -> str:
    """What is to be said if a file is sound, but of another save."""
    try:
        theirs = SafetensorsFile(path).metadata.get(ID)
    except CheckpointError:
        return ""
    return f"it is of another save: its id is {theirs}, the index's {index.id}." if theirs != index.id else ""


def _damaged(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"For '{folder / name}', the file is damaged: {why}", "", "Every piece that is read is verified.",
                           ("load another checkpoint of the run", f"python -m ms_dtensor ckpt verify {folder}"))
