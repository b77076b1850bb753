# SPDX-License-Identifier: Apache-2.0
"""Boxes of a checkpoint's tensors into arrays: only the pieces that a box touches are read, and each is verified.

Bytes go straight to where they belong where they lie alike there, else through a few MiB of scratch; so a load needs no
memory beside the target's, whatever the files' size. `pread` and not a memory map: mapped pages count as the process's
memory, and a file that another process cuts off would end it. Files are read one after the other, and few are open at once,
as a checkpoint may have more than a process may open. Not here: what a file tells of itself (`shard.py`).
"""
from __future__ import annotations

import itertools
import math
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..redistribute.boxes import Box, relative
from .index import MAX_INDEX, NAME, Chunk, Index, TensorInfo
from .parsing import parse
from .pieces import as_bytes, view
from .plan import common, volume
from .safetensors_file import CODES, DTYPES, put
from .shard import Shard

BLOCK = 4 << 20  # bytes that a thread reads at a time
OPEN = 32  # files that stay open
SORTED = 1 << 14  # parts that are put in order of files at a time


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
        self.bytes_read = self.files_opened = 0
        self._files: OrderedDict[str, Shard] = OrderedDict()  # the one that was wanted last is the last
        self._enough = False
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
        for shard in self._files.values():
            shard.close()
        self._files.clear()

    def array(self, key: str, box: Box | None = None) -> np.ndarray:
        """A tensor, or a box of it, as a new array."""
        tensor = self.index.tensor(key)
        if tensor is None:
            raise CheckpointError(f"For '{self.folder}', there is no tensor '{key}'.")
        box = tuple((0, n) for n in tensor.shape) if box is None else box
        self._check_sizes()
        out = np.empty([hi - lo for lo, hi in box], DTYPES[CODES[tensor.dtype]])
        self.read([(tensor, key, box, out)])
        return out

    def read(self, wanted: Sequence[tuple[TensorInfo, str, Box, np.ndarray]]) -> None:
        """Fills arrays of the boxes' shapes; of another dtype the values are converted.

        Args:
            wanted: tensor, its key for messages, box, and the array.
        """
        def run_all(jobs: list[_Job]) -> None:
            with self.file(jobs[0][2].file) as shard:
                for key, tensor, chunk, run in jobs:
                    self._run(shard, key, tensor, chunk, run)
        batches = _batches(self._jobs(wanted))
        if self._threads is None:
            for batch in batches:
                run_all(batch)
            return
        work = []
        for batch in batches:
            work.append(self._threads.submit(run_all, batch))
            if len(work) > 64:  # so that the list of what is to be done stays short
                work.pop(0).result()
        for one in work:
            one.result()

    @contextmanager
    def file(self, name: str) -> Iterator[Shard]:
        """An open file; it is there, and its header is what was written.

        Raises:
            CheckpointError: it is not.
        """
        with self._lock:
            shard = self._files.get(name)
            if shard is None:
                shard = self._files[name] = Shard(self.folder, name, self.index)
                self.files_opened += 1
            self._files.move_to_end(name)
            shard.users += 1
            for other in [n for n, s in self._files.items() if not s.users][:max(len(self._files) - OPEN, 0)]:
                self._files.pop(other).close()
        try:
            yield shard
        finally:
            with self._lock:
                shard.users -= 1

    def check(self, shard: Shard, tensor: TensorInfo, chunk: Chunk) -> None:
        """Reads a chunk for its hashes only.

        Raises:
            CheckpointError: one of them is not what is there.
        """
        size = volume(chunk.box) * tensor.itemsize
        step = max(BLOCK // chunk.piece, 1) * chunk.piece
        for begin in range(0, size, step):
            self._verified(shard, tensor, chunk, begin, min(begin + step, size), None)

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _check_sizes(self) -> None:
        """An array is made for what an index claims only if there are files of so many bytes."""
        if not self._enough:
            there = sum(os.stat(entry).st_size for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))
            need = sum(t.nbytes for t in self.index.tensors.values())
            if there < need:
                raise CheckpointError(f"For '{self.folder}', the files have {there} bytes, the tensors of the index {need}.",
                                      "", "Each element is in a file.", f"python -m ms_dtensor ckpt verify {self.folder}")
            self._enough = True

    def _jobs(self, wanted: Sequence[tuple[TensorInfo, str, Box, np.ndarray]]) -> Iterator[_Job]:
        """What is to be read, a file after the other, as far as may be told without listing all of it."""
        parts = ((chunk.file, number, chunk) for number, (tensor, _, box, _) in enumerate(wanted)
                 for chunk in tensor.chunks(box))
        while some := list(itertools.islice(parts, SORTED)):
            for _, number, chunk in sorted(some, key=lambda part: part[:2]):
                tensor, key, box, out = wanted[number]
                for run in self._runs(tensor, chunk, box, out):
                    yield key, tensor, chunk, run

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

    def _run(self, shard: Shard, key: str, tensor: TensorInfo, chunk: Chunk, run: _Run) -> None:
        dtype, size = DTYPES[CODES[tensor.dtype]], volume(chunk.box) * tensor.itemsize
        first, last = run.begin // chunk.piece * chunk.piece, min(-(-run.end // chunk.piece) * chunk.piece, size)
        target = run.target
        if (first, last) == (run.begin, run.end) and target.nbytes == last - first and target.flags.c_contiguous \
                and target.dtype == dtype:
            self._verified(shard, tensor, chunk, first, last, as_bytes(target))
            return
        data = self._verified(shard, tensor, chunk, first, last, None)
        rows = np.frombuffer(data, dtype, (run.end - run.begin) // dtype.itemsize, run.begin - first).reshape(run.shape)
        put(target, rows[run.cut] if run.shape else rows.reshape(()), key)

    def _verified(self, shard: Shard, tensor: TensorInfo, chunk: Chunk, first: int, last: int, into: memoryview | None
                  ) -> memoryview:
        """Bytes of a chunk from the begin of a piece to the end of one."""
        if into is None:
            scratch = getattr(self._scratch, "buffer", None)
            if scratch is None or len(scratch) < last - first:
                scratch = self._scratch.buffer = bytearray(last - first)
            into = memoryview(scratch)[:last - first]
        shard.read(chunk, shard.place(chunk, tensor.dtype), first, last, into)
        with self._lock:
            self.bytes_read += last - first
        return into


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
    """Jobs of one file in runs of about a block, so that a thread is not started for each small tensor."""
    batch: list[_Job] = []
    size = 0
    for job in jobs:
        if batch and (size >= BLOCK or len(batch) == 256 or job[2].file != batch[0][2].file):
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += job[3].end - job[3].begin
    if batch:
        yield batch
