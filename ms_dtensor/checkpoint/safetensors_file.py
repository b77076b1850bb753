# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: checked whole before anything is read of it, then read by slices; and written as a stream.

Eight bytes with the header's length, a JSON header with dtype, shape and byte range of every tensor, then the bytes. The
file may come from anywhere, so nothing in it is believed: the one invariant is that an open `SafetensorsFile` describes
bytes that are all there, each in one tensor. Nothing is allocated for what a header merely claims.

Not here: MindSpore, layouts, hashes, folders of several files.
"""
from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from ..core.files import own_file
from ..errors import CheckpointError
from .refusals import SAVING, refusals
from .strict_json import short, strict_json

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"), "U32": np.dtype("<u4"), "I32": np.dtype("<i4"), "U64": np.dtype("<u8"), "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
"""The format's names of dtypes. Those of less than a byte are not read."""
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_DIMS = 32  # NumPy's
_SYNC_FILE_RANGE_WRITE = 2
BLOCK = 4 << 20  # bytes of the file that `read` has mapped in at a time
FLUSH = 8 << 20  # bytes after which a writer has the disk begin with them


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: bytes `begin` to `end`, counted from the file's first."""

    dtype: str
    """Name of the dtype, as in a `Layout`."""
    shape: tuple[int, ...]
    begin: int
    end: int


class WrittenFile(NamedTuple):
    """What was written."""

    tensors: dict[str, TensorEntry]
    head: bytes
    size: int


class Header:
    """What stands before a file's data, checked.

    Args:
        path: of the file, for messages.
        size: bytes of the file.
        head: its first bytes, as many as there are up to the data; `Header.length` tells how many.

    Attributes:
        tensors: what is in the file, by name, in the header's order.
        metadata: its texts.

    Raises:
        CheckpointError: it is not sound; names what is wrong with which entry.
    """

    def __init__(self, path: str, size: int, head: bytes):
        self.path, self._size = path, size
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorEntry] = {}
        for name, entry in strict_json(head[8:], lambda why: self._refuse(f"of its header: {why}")).items():
            if name == "__metadata__":
                self.metadata = self._texts(entry)
            else:
                self.tensors[name] = self._entry(name, entry, len(head))
        self._check_cover(len(head))

    @staticmethod
    def length(path: str, size: int, first: bytes) -> int:
        """Where the data of a file of so many bytes begin, by its first eight."""
        header = int.from_bytes(first, "little")
        if len(first) < 8 or header > min(MAX_HEADER, size - 8):
            raise _unsound(path, f"its header would have {header} bytes; the file has {size}, a header at most "
                           f"{MAX_HEADER}.")
        return 8 + header

    def _refuse(self, why: str) -> NoReturn:
        raise _unsound(self.path, why)

    def _texts(self, entry: Any) -> dict[str, str]:
        if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
            self._refuse("its '__metadata__' is no map of texts.")
        return entry

    def _entry(self, name: str, entry: Any, data: int) -> TensorEntry:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"the entry of {short(name)} does not have just dtype, shape and data_offsets.")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = DTYPES.get(code) if isinstance(code, str) else None
        if dtype is None:
            self._refuse(f"'dtype' of {short(name)} is {short(code)}; those read are {', '.join(DTYPES)}.")
        if not _sizes(shape) or len(shape) > MAX_DIMS:
            self._refuse(f"'shape' of {short(name)} is {short(shape)}, no list of at most {MAX_DIMS} sizes.")
        if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2 ** 62:  # empty or not, no array has such dims
            self._refuse(f"'shape' of {short(name)} is {short(shape)}, larger than any memory.")
        if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= self._size - data:
            self._refuse(f"'data_offsets' of {short(name)} are {short(offsets)}; the file has {self._size - data} bytes "
                         "of data.")
        need = math.prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != need:
            self._refuse(f"{short(name)} has {offsets[1] - offsets[0]} bytes; {code} of {short(shape)} needs {need}.")
        return TensorEntry(dtype.name, tuple(shape), data + offsets[0], data + offsets[1])

    def _check_cover(self, data: int) -> None:
        at = data
        for name, entry in sorted(self.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                self._refuse(f"{short(name)} begins at byte {entry.begin - data} of the data, where byte {at - data} is "
                             f"next: {'a gap' if entry.begin > at else 'an overlap'}.")
            at = entry.end
        if at != self._size:
            self._refuse(f"{self._size - at} bytes at its end belong to no tensor.")

def _unsound(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"For '{path}', this is no sound safetensors file: {why}", "",
                           "Nothing of a file is used before all of its header is right.",
                           "restore the file from where it came from")


class SafetensorsFile:
    """A safetensors file that has been checked; its bytes are mapped, not read. Closed when nothing refers to it.

    Args:
        path: the file.

    Attributes:
        tensors: what is in it, by name, in the header's order.
        metadata: the header's texts.

    Raises:
        CheckpointError: no such file, or no sound one; names what is wrong with which entry.

    Example:
        >>> import numpy as np, tempfile, os
        >>> from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
        >>> path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
        >>> _ = write_safetensors(path, {"w": ("float32", (2, 3), [np.arange(6, dtype="float32")])}, {"step": "5"})
        >>> file = SafetensorsFile(path)
        >>> file.tensors["w"].shape, file.read("w", (slice(0, 2), slice(1, 2))).tolist(), file.metadata
        ((2, 3), [[1.0], [4.0]], {'step': '5'})
    """

    def __init__(self, path: str | PathLike):
        self.path = os.fspath(path)
        try:
            # O_NONBLOCK: the name may be a pipe's, which would wait for a writer
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode):
                    raise _unsound(self.path, "it is no regular file.")
                if found.st_size < 10:
                    raise _unsound(self.path, f"its {found.st_size} bytes are fewer than the smallest header has.")
                self._map = mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        except OSError as e:
            raise CheckpointError(f"For '{self.path}', the file cannot be read: {e.strerror or e}.") from e
        self._size = found.st_size
        head = Header(self.path, self._size, self._map[:Header.length(self.path, self._size, self._map[:8])])
        self.tensors, self.metadata = head.tensors, head.metadata

    def read(self, name: str, index: tuple[slice, ...] | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of a tensor, or of a box of it: of the file's pages only the box's are read, and none stay mapped in.

        Args:
            name: the tensor.
            index: one slice with step 1 for each of the first dims; None: the whole tensor.
            out: where the copy goes, an array of the box's shape; values are converted to its dtype.
        """
        entry = self._of(name)
        cuts: list[Any] = [slice(None)] * len(entry.shape) if index is None else list(index)
        if len(cuts) > len(entry.shape) or any(cut.step not in (None, 1) for cut in cuts):
            raise CheckpointError(f"For 'read', {index} is no box of '{name}'.", f"{list(entry.shape)} in '{self.path}'",
                                  "An index has a slice with step 1 for each dim.", "read the box and take the rest of it")
        whole = np.frombuffer(self._bytes(entry), DTYPES[CODES[entry.dtype]]).reshape(entry.shape)
        part = whole[tuple(cuts) + (...,)]  # a view, also of no dims
        out = np.empty(part.shape, part.dtype) if out is None else out
        if out.shape != part.shape:
            raise CheckpointError(f"For 'read', 'out' has shape {list(out.shape)}, the box of '{name}' {list(part.shape)}.")
        self._copy(part, out, whole.__array_interface__["data"][0] - entry.begin, name)
        return out

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes, mapped."""
        return self._bytes(self._of(name))

    def _of(self, name: str) -> TensorEntry:
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"For '{self.path}', there is no tensor {short(name)}.", f"{len(self.tensors)} tensors: "
                                  + ", ".join(map(short, list(self.tensors)[:3])) + ("..." * (len(self.tensors) > 3)))
        return entry

    def _bytes(self, entry: TensorEntry) -> memoryview:
        try:
            size = self._map.size()  # of the file as it is now: to touch a page that is gone would end the process
        except OSError as e:
            raise CheckpointError(f"For '{self.path}', the file cannot be read any more: {e.strerror or e}.") from e
        if size != self._size:
            raise _unsound(self.path, f"it had {self._size} bytes when it was opened, and has {size} now.")
        return memoryview(self._map)[entry.begin:entry.end]

    def _copy(self, part: np.ndarray, out: np.ndarray, base: int, name: str) -> None:
        """Copies by blocks, and lets the file's pages go after each: they would count as this process's memory."""
        if not part.size:
            return
        span = sum((n - 1) * step for n, step in zip(part.shape, part.strides)) + part.itemsize
        if span > BLOCK and part.ndim:
            rows = max(1, BLOCK // part.strides[0])
            if rows < len(part):
                for i in range(0, len(part), rows):
                    self._copy(part[i:i + rows], out[i:i + rows], base, name)
                return
            if len(part) == 1:
                return self._copy(part[0], out[0, ...], base, name)
        put(out, part, name)
        begin = part.__array_interface__["data"][0] - base
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, page, begin + span - page)


def write_safetensors(path: str | PathLike, entries: Mapping[str, tuple[str, tuple[int, ...], Iterable]],
                      metadata: Mapping[str, str] | None = None, advice: tuple[str, str] = SAVING,
                      seal: Callable[[bytes], bytes] = bytes) -> WrittenFile:
    """Writes a file, and has it on the disk on return.

    A file of this user's under the name is replaced, not atomically; no link is followed.

    Args:
        path: the file.
        entries: per name dtype name, shape, and buffers (or arrays) that in turn give the tensor's bytes. They are taken one
            by one; the widest dtypes first, else in this order, so that every tensor is aligned.
        metadata: texts for the header.
        advice: of `refusals`.
        seal: gets what stands before the data when all have been written, and gives what stands there at last, as long.

    Returns:
        Where each tensor is, and what stands before them.

    Raises:
        CheckpointError: the file cannot be written, or a tensor's buffers are not of its size.
    """
    path = os.fspath(path)
    at, placed = 0, {}
    header: dict[str, dict] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, (dtype, shape, _) in sorted(entries.items(), key=lambda item: -_dtype(item[0], item[1][0]).itemsize):
        size = math.prod(shape) * _dtype(name, dtype).itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        placed[name] = TensorEntry(dtype, tuple(shape), at, at + size)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"For '{path}', the header would have {len(text)} bytes.", f"{len(entries)} tensors",
                              f"A safetensors header has at most {MAX_HEADER}.", "write several files")
    head = len(text).to_bytes(8, "little") + text
    placed = {name: TensorEntry(e.dtype, e.shape, len(head) + e.begin, len(head) + e.end) for name, e in placed.items()}
    with refusals(f"For '{path}', the file cannot be written", advice):
        with open(path, "wb", buffering=0, opener=own_file) as file:
            at, flushed = _write(file, head), 0
            for name, entry in placed.items():
                written = 0
                for buffer in entries[name][2]:
                    written += _write(file, buffer)
                    if at + written - flushed >= FLUSH:
                        _start_flush(file.fileno(), flushed, at + written - flushed)
                        flushed = at + written
                at += written
                if written != entry.end - entry.begin:
                    raise CheckpointError(f"For '{path}', tensor {short(name)} came with {written} bytes.",
                                          f"{entry.dtype}{list(entry.shape)}", f"It has {entry.end - entry.begin}.")
            last = seal(head)
            if last != head:
                file.seek(0)
                _write(file, last)
            os.fsync(file.fileno())
    return WrittenFile(placed, last, at)


def put(out: np.ndarray, values: np.ndarray, name: str) -> np.ndarray:
    """The array `out`, of the same shape and any dtype, with the values of tensor `name` in it, rounded if need be.

    Raises:
        CheckpointError: a value is out of the range of the dtype of `out`: it would wrap around, or become infinite.
    """
    if not values.size:
        return out  # NumPy crashes where it copies no elements of MindSpore's bfloat16
    kinds = out.dtype.kind + values.dtype.kind
    if kinds == "VV" and out.dtype.name == values.dtype.name:  # MindSpore has a bfloat16 of its own
        out, values = out.view(f"u{out.itemsize}"), values.view(f"u{out.itemsize}")
    elif values.dtype.kind == "V":  # dtypes of two libraries know nothing of each other
        values = values.astype(np.float32)
    if out.dtype == values.dtype:
        np.copyto(out, values)
        return out
    narrow = not np.can_cast(values.dtype, out.dtype, "safe")
    if narrow and out.dtype.kind in "iu":
        info, low, high = np.iinfo(out.dtype), int(values.min()), int(values.max())
        if low < info.min or high > info.max:
            raise _out_of_range(name, low if low < info.min else high, values, out)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, values.astype(np.float32) if out.dtype.kind == "V" else values, casting="unsafe")
    if narrow and out.dtype.kind not in "iub":
        bad = ~np.isfinite(out.astype(np.float32) if out.dtype.kind == "V" else out)
        if bad.any():
            bad &= np.isfinite(values)
            if bad.any():
                raise _out_of_range(name, values[bad][0], values, out)
    return out


def _out_of_range(name: str, value: Any, values: np.ndarray, out: np.ndarray) -> CheckpointError:
    return CheckpointError(f"For tensor {short(name)}, the value {value} is out of the range of {out.dtype.name}.",
                           f"{values.dtype.name} -> {out.dtype.name}{list(out.shape)}",
                           "Values are rounded where dtypes differ; none wraps around or becomes infinite.",
                           "a dtype that holds the values")


def _write(file, buffer) -> int:
    if isinstance(buffer, np.ndarray | np.generic):  # those of ml_dtypes are no buffers
        buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
    left = memoryview(buffer)
    size = left.nbytes
    left = left.cast("B") if size else memoryview(b"")
    while left:
        left = left[file.write(left):]
    return size


def _start_flush(fd: int, begin: int, size: int) -> None:
    """Has the system begin to put bytes on the disk, so that the fsync finds most of them there. It tells of failures."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # other systems than Linux
        return
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call(fd, begin, size, _SYNC_FILE_RANGE_WRITE)


def _dtype(name: str, dtype: str) -> np.dtype:
    if dtype not in CODES:
        raise CheckpointError(f"For 'write_safetensors', tensor {short(name)} is {dtype!r}.", "",
                              "The format has " + ", ".join(CODES) + ".", "convert it before")
    return DTYPES[CODES[dtype]]


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)  # a bool is an int, but no size
