# SPDX-License-Identifier: Apache-2.0
"""A file of a checkpoint: a safetensors file whose header also has the hashes of the pieces, and a digest of itself.

So a reader needs of a file nothing but the file, and of the others nothing: however many ranks have saved. The header's
texts are the digest (of all that stands before the data, with zeros in its own place), the id of the save, the file's name,
and the hashes, by the parts' names in sorted order, so that no two parts can change names. Invariant: no byte is handed out
whose hash was not right, from a file whose header is not what was written, by this save, under this name.
"""
from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError
from .index import Chunk, Index, ListedFile, Place
from .pieces import crc, piece_hash, piece_size
from .safetensors_file import CODES, DTYPES, Header

DIGEST, ID, FILE, HASHES = (f"ms_dtensor.{name}" for name in ("digest", "id", "file", "hashes"))
_BEGIN = b'{"__metadata__":{"%s":"' % DIGEST.encode()
_OPENING = re.compile(re.escape(_BEGIN) + rb'([0-9a-f]{32})"')
_ZEROS = b"0" * 32


# -- writing ---------------------------------------------------------------------------------------------------------------
def texts(save_id: str, name: str, sizes: Sequence[tuple[Sequence[int], int]]) -> dict[str, str]:
    """The texts of a header, with zeros for what is not yet known.

    Args:
        save_id: of the save.
        name: of the file.
        sizes: shape and bytes of an element of each part.
    """
    count = sum(_pieces(shape, itemsize) for shape, itemsize in sizes)
    return {DIGEST: _ZEROS.decode(), ID: save_id, FILE: name, HASHES: "0" * 16 * count}


def sealed(before: bytes, hashes: Mapping[str, Sequence[int]]) -> bytes:
    """What stands before the data, with the hashes of each part by name, and the digest."""
    text = "".join(f"{h:016x}" for name in sorted(hashes) for h in hashes[name]).encode()
    mark = b'"%s":"' % HASHES.encode()
    at = before.index(mark) + len(mark)
    before = before[:at] + text + before[at + len(text):]
    return redigested(before)


def redigested(before: bytes) -> bytes:
    """What stands before the data, with the digest that it should have."""
    begin = 8 + len(_BEGIN)
    return before[:begin] + _digest(before[:begin] + _ZEROS + before[begin + 32:]) + before[begin + 32:]


def _digest(head: bytes) -> bytes:
    return hashlib.blake2b(head, digest_size=16).hexdigest().encode()


def _pieces(shape: Sequence[int], itemsize: int) -> int:
    size = itemsize * math.prod(shape)
    return -(-size // piece_size(shape, itemsize)) if size else 0


# -- reading ---------------------------------------------------------------------------------------------------------------
class Shard:
    """A file that is open, and whose header is right.

    Args:
        folder: the checkpoint.
        name: of the file.
        index: of the checkpoint.

    Attributes:
        places: what is in it, by the parts' names.

    Raises:
        CheckpointError: it is not there, or damaged.
    """

    def __init__(self, folder: Path, name: str, index: Index):
        self.folder, self.name, self.users = folder, name, 0
        path = folder / name
        if index.rank_of(name) is None:
            raise self.damaged("a part should be in it, and the index does not have it.")
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # no link, no pipe, leads on
        except OSError as e:
            raise CheckpointError(f"For '{path}', the file cannot be opened: {e.strerror or e}.", "",
                                  "It is one of the checkpoint's shards.", "load another checkpoint of the run") from e
        try:
            found = os.fstat(self.fd)
            if not stat.S_ISREG(found.st_mode):
                raise self.damaged("it is no regular file.")
            if index.listed is None:
                self.places = self._told(found.st_size, index.id)
            else:
                self.places = self._listed(found.st_size, index.id, index.listed[name])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets the file go."""
        os.close(self.fd)

    def damaged(self, why: str) -> CheckpointError:
        """What to raise."""
        return CheckpointError(f"For '{self.folder / self.name}', the file is damaged: {why}", "",
                               "Every piece that is read is verified.",
                               ("load another checkpoint of the run", f"python -m ms_dtensor ckpt verify {self.folder}"))

    def place(self, chunk: Chunk, dtype: str) -> Place:
        """Where a part is.

        Raises:
            CheckpointError: the header tells another thing of it than the index.
        """
        place = self.places.get(chunk.name)
        if place is None or (place.dtype, place.shape) != (dtype, tuple(hi - lo for lo, hi in chunk.box)):
            raise self.damaged(f"its header does not tell what the index tells, of '{chunk.name}'.")
        return place

    def read(self, chunk: Chunk, place: Place, first: int, last: int, into: memoryview) -> None:
        """Bytes of a part, from the begin of a piece to the end of one, each piece verified."""
        for at in range(first, last, chunk.piece):
            part = into[at - first:min(at + chunk.piece, last) - first]
            done = 0
            while done < len(part):
                try:
                    got = os.preadv(self.fd, [part[done:]], place.begin + at + done)
                except OSError as e:
                    raise CheckpointError(f"For '{self.folder / self.name}', the file cannot be read: {e.strerror or e}."
                                          ) from e
                if not got:
                    raise self.damaged(f"it ends at byte {place.begin + at + done}, within '{chunk.name}'.")
                done += got
            if piece_hash(part) != place.hashes[at // chunk.piece]:
                raise self.damaged(f"bytes {place.begin + at} to {place.begin + at + len(part)}, of '{chunk.name}', are not "
                                   "what was written.")

    # -- inside ----------------------------------------------------------------------------------------------------------
    def _head(self, size: int) -> bytes:
        length = Header.length(str(self.folder / self.name), size, self._bytes(8))
        return self._bytes(length)

    def _bytes(self, count: int) -> bytes:
        try:
            return os.pread(self.fd, count, 0)
        except OSError as e:
            raise CheckpointError(f"For '{self.folder / self.name}', the file cannot be read: {e.strerror or e}.") from e

    def _told(self, size: int, save_id: str) -> dict[str, Place]:
        head = self._head(size)
        opening = _OPENING.match(head, 8)
        if opening is None or redigested(head) != head:
            raise self.damaged("its header is not what was written.")
        header = Header(str(self.folder / self.name), size, head)
        self._check_id(header, save_id)
        if header.metadata.get(FILE) != self.name:
            raise self.damaged(f"it was written as '{header.metadata.get(FILE)}'.")
        try:
            hashes = [int.from_bytes(word, "big") for word in _words(bytes.fromhex(header.metadata.get(HASHES, "")))]
        except ValueError:
            raise self.damaged("its hashes are no hexadecimal numbers.") from None
        places, at = {}, 0
        for name in sorted(header.tensors):
            entry = header.tensors[name]
            count = _pieces(entry.shape, DTYPES[CODES[entry.dtype]].itemsize)
            places[name] = Place(entry.dtype, entry.shape, entry.begin, hashes[at:at + count])
            at += count
        if at != len(hashes):
            raise self.damaged(f"it has {len(hashes)} hashes of {at} pieces.")
        return places

    def _listed(self, size: int, save_id: str, told: ListedFile) -> dict[str, Place]:
        """In the first format the index tells all, and the header must agree."""
        if size != told.size:
            raise self.damaged(f"it has {size} bytes, was written with {told.size}.")
        head = self._bytes(told.data)
        if crc(head) != told.header or len(head) != told.data:
            try:
                self._check_id(Header(str(self.folder / self.name), size, self._head(size)), save_id)
            except CheckpointError as e:
                if "another save" in e.attempt:
                    raise
            raise self.damaged("its header is not what was written.")
        header = Header(str(self.folder / self.name), size, self._head(size))
        self._check_id(header, save_id)
        found = {name: (e.dtype, e.shape, e.begin) for name, e in header.tensors.items()}
        if found != {name: (p.dtype, p.shape, p.begin) for name, p in told.places.items()}:
            raise self.damaged("its header does not tell what the index tells.")
        return told.places

    def _check_id(self, header: Header, save_id: str) -> None:
        theirs = header.metadata.get(ID)
        if theirs != save_id:
            raise self.damaged(f"it is of another save: its id is {theirs}, the index's {save_id}.")


def _words(data: bytes) -> list[bytes]:
    if len(data) % 8:
        raise ValueError
    return [data[i:i + 8] for i in range(0, len(data), 8)]
