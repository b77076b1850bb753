# SPDX-License-Identifier: Apache-2.0
"""Tensors by name, in whatever files a model was published: a Hugging Face folder, a safetensors file, a MindSpore `.ckpt`.

Of a folder of many files an index says which file has which tensor. It is a list from elsewhere: names of files in it are
names in that folder and no paths, and what it says of a tensor must be so. (A file may be a link to elsewhere, as in
Hugging Face's cache: who made the folder made that.) Nothing here reads pickles. Not here: any layout.
"""
from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..errors import CheckpointError
from .safetensors_file import CODES, SafetensorsFile, TensorEntry, put
from .strict_json import short, strict_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX = 256 << 20  # bytes


class Weights:
    """Tensors of a model, by name; only headers have been read.

    Args:
        path: a folder with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names, or with
            one safetensors file of any name; or a safetensors file; or a `.ckpt` of `mindspore.save_checkpoint`, which is
            read whole.

    Attributes:
        tensors: dtype and shape by name.

    Raises:
        CheckpointError: nothing of the kind is there, or it is not sound.
    """

    def __init__(self, path: str | PathLike):
        self.path = Path(path)
        self._files: dict[str, SafetensorsFile | _CkptFile] = {}
        try:
            files = self._in_folder() if self.path.is_dir() else {self.path: None}
        except OSError as e:
            raise CheckpointError(f"For '{path}', the folder cannot be read: {e.strerror or e}.") from e
        for file, expected in files.items():
            one = _CkptFile(file) if file.suffix == ".ckpt" else SafetensorsFile(file)
            if expected is not None and expected != set(one.tensors):
                missing, more = sorted(expected - set(one.tensors)), sorted(set(one.tensors) - expected)
                self._refuse(f"'{file.name}' does not have {short(missing[0])}, which the index says it has." if missing else
                             f"'{file.name}' has {short(more[0])}, of which the index says nothing, or another file.")
            self._files |= dict.fromkeys(one.tensors, one)

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return {name: file.tensors[name] for name, file in self._files.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """As `SafetensorsFile.read`."""
        return self._files[name].read(name, index, out)

    def _refuse(self, why: str, *fix: str) -> NoReturn:
        raise CheckpointError(f"For '{self.path}', these are no weights that can be read: {why}", "", "", fix)

    def _in_folder(self) -> dict[Path, set[str] | None]:
        """The files of a folder, and of each what an index says is in it."""
        here = {p.name: p for p in self.path.iterdir()}
        if SINGLE in here and INDEX in here:
            self._refuse(f"both '{SINGLE}' and '{INDEX}' are there.", "remove the one that is not meant")
        if INDEX in here:
            return self._indexed(here)
        found = [p for name, p in here.items() if name.endswith((".safetensors", ".ckpt"))]
        if SINGLE in here or len(found) == 1:
            return {here.get(SINGLE, found[0]): None}
        if found:
            self._refuse(f"{len(found)} files and no '{INDEX}'.", "pass one of the files", "restore the index")
        pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in here)
        self._refuse("only pickles, which may run code when they are read." if pickles else "there is no safetensors file.",
                     "let `transformers` save the model with safe_serialization=True")

    def _indexed(self, here: dict[str, Path]) -> dict[Path, set[str] | None]:
        path = here[INDEX]
        if path.stat().st_size > MAX_INDEX or not path.is_file():
            self._refuse(f"'{INDEX}' is no file of at most {MAX_INDEX} bytes.")
        places = strict_json(path.read_bytes(), lambda why: self._refuse(f"of '{INDEX}': {why}"), fractions=True
                             ).get("weight_map")
        if not isinstance(places, dict) or not places:
            self._refuse(f"'{INDEX}' has no 'weight_map'.")
        files: dict[Path, set[str] | None] = {}
        for name, file in places.items():
            if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".safetensors"):
                self._refuse(f"'{INDEX}' says that {short(name)} is in {short(file)}, which is no name of a safetensors "
                             "file of this folder.")
            if file not in here:
                self._refuse(f"there is no '{file}', where '{INDEX}' says that {short(name)} is.")
            expected = files.setdefault(here[file], set())
            assert expected is not None
            expected.add(name)
        return files


class _CkptFile:
    """What `mindspore.save_checkpoint` wrote, in memory."""

    def __init__(self, path: Path):
        import mindspore as ms

        if not path.is_file():
            raise CheckpointError(f"For '{path}', there is no such file.")
        try:
            found = ms.load_checkpoint(str(path))
        except Exception as e:  # MindSpore's reader raises what it likes
            raise CheckpointError(f"For '{path}', MindSpore cannot read the file: {e}") from e
        self.arrays = {name: p.asnumpy() for name, p in found.items() if isinstance(p, ms.Tensor)}
        for name, array in self.arrays.items():
            if array.dtype.name not in CODES:
                raise CheckpointError(f"For '{path}', tensor {short(name)} is {array.dtype.name}.")
        self.tensors = {name: TensorEntry(a.dtype.name, a.shape, 0, a.nbytes) for name, a in self.arrays.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None, out: np.ndarray | None = None) -> np.ndarray:
        part = self.arrays[name][() if index is None else index]
        if out is None:
            return np.array(part)
        return put(out, part, name)
