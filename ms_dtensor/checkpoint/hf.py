# SPDX-License-Identifier: Apache-2.0
"""A model's weights from and to Hugging Face's files, on any mesh; neither PyTorch nor `transformers` is needed.

What parameters are called there is said by a key map (`key_map.py`), in which files they are by `weights.py`. Matrices need
no transposing: `nn.Dense` and `mint.nn.Linear` keep weights as PyTorch does, [out, in].

Invariants: before a value is read, all names, shapes and kinds of dtypes have been compared; a rank reads what its layout
has of a tensor and nothing else; a rank that writes has one tensor more than its shards at a time.
"""
from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ..comm.group import Group
from ..comm.pretended import needs_data
from ..core.files import make_folder
from ..core.mesh import DeviceMesh
from ..dispatch.replaced import current
from ..errors import CheckpointError
from ..pipeline.stage import PipelineStage
from .folder import claimed, sync, write_synced
from .key_map import Names, matches, translate
from .plan import Held, common, held_boxes, whole_box, within
from .ranks import all_ranks, attempted, folder_of, gathered, raise_for_all, rank_of, together, told, unlike
from .refusals import COPYING, refusals
from .safetensors_file import CODES, DTYPES, put, write_safetensors
from .state import PARTIAL_FIX, Leaf
from .strict_json import short
from .weights import INDEX, SINGLE, Weights
from .whole import pipeline_axis

PARTIAL = ".partial"  # folder in the target in which files are made


class _Slot(NamedTuple):
    """A parameter, and what the files call it."""

    leaf: Leaf
    there: Names
    also: tuple[str, ...]  # of the same value under the names that are tied to it


def load_hf(module: nn.Cell | Sequence[PipelineStage], path: str | PathLike | Weights,
            key_map: Mapping[str, str] | None = None, *,
            ignore: Sequence[str] = (), over: DeviceMesh | None = None) -> None:
    """Fills a cell's parameters with weights from files, in place; all ranks call it.

    Each rank reads its shards' slices only. Values are converted to the parameters' dtypes. Load before making an optimizer,
    or anything else that copies parameters.

    Args:
        module: plain, or laid out in any way (`parallelize_module`, `fully_shard`, `replicate`); of a pipeline this rank's
            stages, as `pipeline` gives them.
        path: a Hugging Face folder, a safetensors file, a MindSpore `.ckpt`; or the `Weights` of one of these.
        key_map: the files' names by the parameters' (the paths of cells), as patterns; see above. None: the same names.
        ignore: patterns of names in the files that are not for this module.
        over: of a pipeline its axis, `mesh["pp"]`: what is not for one stage is for another.

    Raises:
        CheckpointError: tensors that are missing, too many, or of another shape; two values for one parameter; unsound
            files. The same on all ranks.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.checkpoint.safetensors_file import write_safetensors
        >>> folder = tempfile.mkdtemp()
        >>> _ = write_safetensors(folder + "/model.safetensors", {"proj.weight": ("float32", (1, 2), [np.float32([3, 4])])})
        >>> net = nn.Dense(2, 1, has_bias=False)
        >>> md.checkpoint.load_hf(net, folder, {"weight": "proj.weight"})
        >>> net.weight.asnumpy().tolist()
        [[3.0, 4.0]]
    """
    needs_data("load_hf")
    group = all_ranks()

    def opened() -> tuple[Weights, list[_Slot]]:
        pipeline_axis(over, "load_hf")
        return path if isinstance(path, Weights) else Weights(path), _slots(module, key_map, "load_hf")

    def compared() -> list[_Slot]:
        return _matched(slots, weights, ignore, elsewhere)

    def filled() -> None:
        for slot in slots:
            _fill(slot, weights)

    weights, slots = together(group, "load_hf", opened)
    own = [name for slot in slots for name in (*slot.there.names, *slot.also)]
    elsewhere = set() if over is None or group is None else set().union(*over.get_group().all_gather_object(own))
    slots = together(group, "load_hf", compared)
    together(group, "load_hf", filled)


def save_hf(module: nn.Cell | Sequence[PipelineStage], path: str | PathLike,
            key_map: Mapping[str, str] | None = None, *,
            config: Mapping[str, Any] | None = None, dtype: str | None = None, max_shard_size: int = 5 * 10 ** 9,
            over: DeviceMesh | None = None) -> None:
    """Writes a cell's parameters as a folder that `transformers` loads; all ranks call it.

    Files are shared out over ranks. Whoever writes a file is sent one tensor of it at a time. Parameters that are tied are
    written once. Under their names files appear when all are whole, the index last.

    Args:
        module: plain, or laid out in any way; or a pipeline's stages, as for `load_hf`.
        path: a folder without weights in it; made if need be. The ranks share its file system.
        key_map: as for `load_hf`.
        config: written to `config.json`.
        dtype: name of a dtype to convert floats to; None: each parameter's own.
        max_shard_size: bytes of tensors in a file, unless one alone is larger.
        over: as for `load_hf`: the files have the weights of all stages.

    Raises:
        CheckpointError: on all ranks the same; the folder has weights, or cannot be written.

    Example:
        >>> import os, tempfile, ms_dtensor as md
        >>> from mindspore import nn
        >>> from ms_dtensor.checkpoint.weights import Weights
        >>> folder = tempfile.mkdtemp()
        >>> md.checkpoint.save_hf(nn.Dense(2, 1), folder, {"*": "proj.*"}, config={"model_type": "mine"})
        >>> sorted(os.listdir(folder)), sorted(Weights(folder).tensors)
        (['config.json', 'model.safetensors'], ['proj.bias', 'proj.weight'])
    """
    needs_data("save_hf")
    group = all_ranks()

    def compared() -> tuple[Path, bytes | None, list[_Out]]:
        folder = folder_of(path, "save_hf")
        _check(dtype, max_shard_size)
        pipeline_axis(over, "save_hf")
        return folder, _config(config), _outs(_slots(module, key_map, "save_hf"), dtype)

    folder, text, outs = together(group, "save_hf", compared)
    if group is not None and over is not None:
        outs = _of_all_stages(over.get_group(), group, outs)
    files = _files(outs, max_shard_size)
    bad = unlike(group, {"path": str(folder), "config": repr(text)} | {
        name: "; ".join(f"{o.name} {o.dtype} {o.described}" for o in outs) for name, outs in files.items()})
    if bad:
        raise CheckpointError(f"For 'save_hf', the ranks' arguments differ: {', '.join([*bad][:4])}.",
                              "\n".join([*bad.values()][:4]), "All ranks write one folder together.",
                              "give each rank the same arguments")
    first = rank_of(group) == 0
    lock = together(group, "save_hf", lambda: _prepared(folder) if first else None)
    try:
        error = None
        for i, (name, tensors) in enumerate(files.items()):
            failed = _write(folder / PARTIAL / name, tensors, i % (group.size if group else 1), group)
            error = error or failed
        errors = gathered(group, None if error is None else told(error))
        if error is not None and group is None:
            raise error
        raise_for_all("save_hf", errors)
        together(group, "save_hf", lambda: _publish(folder, files, text) if first else None)
    finally:
        if lock is not None:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            os.close(lock)


# -- names -----------------------------------------------------------------------------------------------------------------
def _slots(module: nn.Cell | Sequence[PipelineStage], key_map: Mapping[str, str] | None, who: str) -> list[_Slot]:
    """Every parameter once, with its names in the files."""
    names: dict[int, list[str]] = {}
    params = {}
    stages = [] if isinstance(module, nn.Cell) else module
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, PipelineStage) for stage in stages):
        raise CheckpointError(f"For '{who}', 'module' is a {type(module).__name__}.", "",
                              "It is a cell, or the stages of a pipeline that are on this rank.",
                              f'{who}(pipeline(model, mesh["pp"]), path, over=mesh["pp"])')
    for one in [module] if isinstance(module, nn.Cell) else [stage.module for stage in stages]:
        for path, cell in one.cells_and_names():
            for key, param in cell._params.items():
                if param is not None:
                    param = current(param)
                    params[id(param)] = param
                    names.setdefault(id(param), []).append(f"{path}.{key}" if path else key)
    for stage in stages:  # of a tied parameter the names that it has in all stages, the first one's first
        for tie in stage.ties:
            own = tie.paths[stage.stage_index]
            which = next(which for which, paths in names.items() if own in paths)
            names[which] = list(dict.fromkeys((*tie.paths.values(), *names[which])))
    slots, nameless = [], []
    for which, param in params.items():
        leaf = Leaf(names[which][0], param)
        if leaf.dtype not in CODES:
            raise CheckpointError(f"For '{who}', parameter '{leaf.key}' is {leaf.dtype}.", "",
                                  "Safetensors files have " + ", ".join(CODES) + ".")
        if leaf.layout is not None and leaf.layout.has_partial():
            raise CheckpointError(f"For '{who}', parameter '{leaf.key}' is Partial.", leaf.describe(),
                                  "Files hold values, and each rank has a summand only.", PARTIAL_FIX)
        found = [f for f in (translate(name, key_map, leaf.shape) for name in names[which]) if f is not None]
        if found:
            slots.append(_Slot(leaf, found[0], tuple(f.names[0] for f in found[1:] if f != found[0] and not f.stacked)))
        else:
            nameless.append(leaf.key)
    if nameless:
        raise CheckpointError(f"For '{who}', 'key_map' has no name for {len(nameless)} of {len(params)} parameters.",
                              _few(nameless), "Every parameter is in the files.", "add a pattern for them to 'key_map'")
    taken: dict[str, str] = {}
    for slot in slots:
        for name in slot.there.names:
            if name in taken:
                raise CheckpointError(f"For '{who}', 'key_map' gives two parameters one name.",
                                      f"'{taken[name]}' and '{slot.leaf.key}' -> '{name}'")
            taken[name] = slot.leaf.key
    return slots


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")


def _view(array: np.ndarray, index: tuple[Any, ...]) -> np.ndarray:
    return array[index + (...,)]  # the dots, as of an array without dims there would be a copy


# -- loading ---------------------------------------------------------------------------------------------------------------
def _matched(slots: list[_Slot], weights: Weights, ignore: Sequence[str], elsewhere: set[str]) -> list[_Slot]:
    """The slots with names that the files have; other stages of a pipeline ask for what is `elsewhere`.

    Raises:
        CheckpointError: names all that does not fit, before anything is read.
    """
    there, out = weights.tensors, []
    missing, odd, used = [], [], set()
    for slot in slots:
        names, stacked = slot.there
        also = tuple(n for n in slot.also if n in there)
        if also and names[0] not in there:  # tied: one of its names is enough
            names, also = also[:1], also[1:]
        out.append(slot._replace(there=Names(names, stacked), also=also))
        used |= {*names, *also}
        shape = slot.leaf.shape[1:] if stacked else slot.leaf.shape
        for name in (*names, *also):
            if name not in there:
                missing.append(name)
            elif there[name].shape != shape:
                odd.append(f"{name} {list(there[name].shape)} for {slot.leaf.key} {list(shape)}")
            elif _kind(there[name].dtype) != _kind(slot.leaf.dtype):
                odd.append(f"{name} {there[name].dtype} for {slot.leaf.key} {slot.leaf.dtype}")
    more = [short(n)[1:-1] for n in there if n not in used and n not in elsewhere and not matches(n, ignore)]
    if missing or more or odd:
        lists = (("missing", missing), ("not for this module", more), ("of another shape or kind", odd))
        raise CheckpointError(
            f"For 'load_hf', the tensors of '{weights.path}' are not those of the module.",
            "\n".join(f"{len(names)} {what}: {_few(names)}" for what, names in lists if names),
            "Each parameter has its tensor, of its shape, and each tensor is used; nothing has been read.",
            ("build the model from the weights' own config", "correct 'key_map'", "ignore=[patterns of what is not wanted]"))
    return out


def _kind(dtype: str) -> str:
    return "float" if "float" in dtype else dtype


def _fill(slot: _Slot, weights: Weights) -> None:
    """Reads what this rank has of a parameter into its storage."""
    leaf = slot.leaf
    if not leaf.here():
        return
    target, is_storage = leaf.target()
    for box in product(*leaf.pieces):
        if not all(lo < hi for lo, hi in box):
            continue
        part, index = _view(target, within(box, leaf.pieces)), tuple(slice(lo, hi) for lo, hi in box)
        if slot.there.stacked:
            for at, i in enumerate(range(*box[0])):
                weights.read(slot.there.names[i], index[1:], part[at, ...])
            continue
        weights.read(slot.there.names[0], index, part)
        for other in slot.also:
            values = weights.read(other, index)
            if part.tobytes() != put(np.empty_like(part), values, other).tobytes():
                raise CheckpointError(f"For 'load_hf', the module ties what '{weights.path}' has two values of.",
                                      f"{leaf.key}: {slot.there.names[0]} and {other}", "A tied parameter has one value.",
                                      "build the model without tied weights")
    if not is_storage:
        leaf.store(target)
    leaf.loaded()


# -- saving ----------------------------------------------------------------------------------------------------------------
class _Out(NamedTuple):
    """A tensor to write: a parameter, or one row of a stacked one."""

    name: str
    leaf: Leaf | None  # None: another stage's
    row: int | None
    dtype: str
    whole: tuple[int, ...]  # the parameter's shape
    of: str  # its dtype
    held: Held | None  # which ranks have which box of it; None: each has it whole
    described: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole if self.row is None else self.whole[1:]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[CODES[self.dtype]].itemsize


def _outs(slots: list[_Slot], dtype: str | None) -> list[_Out]:
    """What this rank's module has; a pure function of it, so ranks agree."""
    outs = []
    for leaf, there, _ in slots:
        held = None if leaf.layout is None else held_boxes(leaf.layout)
        to = dtype if dtype and _kind(leaf.dtype) == "float" else leaf.dtype
        outs += [_Out(name, leaf, i if there.stacked else None, to, leaf.shape, leaf.dtype, held, leaf.describe())
                 for i, name in enumerate(there.names)]
    return outs


def _of_all_stages(over: Group, group: Group, outs: list[_Out]) -> list[_Out]:
    """What all stages have, as the first rank of all knows it from those of its own pipeline."""
    mine = {out.name: out.leaf for out in outs}
    here = rank_of(group)
    told_of = over.all_gather_object([tuple(out._replace(leaf=None, held=out.held or whole_box(out.whole, [here])))
                                      for out in outs])
    told_of = group.broadcast_object(told_of, group.ranks[0])
    found: dict[str, _Out] = {}
    for out in (_Out(*some) for stage in told_of for some in stage):  # of what is tied the first stage's counts
        found.setdefault(out.name, out)
    return [out._replace(leaf=mine.get(name)) for name, out in found.items()]


def _files(outs: list[_Out], max_shard_size: int) -> dict[str, list[_Out]]:
    """What goes into which file."""
    outs = sorted(outs, key=lambda o: -DTYPES[CODES[o.dtype]].itemsize)  # stable; as a file has them
    shards: list[list[_Out]] = [[]]
    size = 0
    for out in outs:
        if shards[-1] and size + out.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(out)
        size += out.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _check(dtype: Any, max_shard_size: Any) -> None:
    if dtype is not None and (not isinstance(dtype, str) or dtype not in CODES or _kind(dtype) != "float"):
        raise CheckpointError(f"For 'save_hf', 'dtype' is {dtype!r}.", "", "It is the name of a floating dtype; other "
                              "parameters keep theirs.", "bfloat16, float16, float32, float64")
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise CheckpointError(f"For 'save_hf', 'max_shard_size' is {max_shard_size!r}.", "", "It is a number of bytes.")


def _config(config: Mapping[str, Any] | None) -> bytes | None:
    """The text of `config.json`."""
    try:
        return None if config is None else json.dumps(config, indent=2, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as e:
        raise CheckpointError(f"For 'save_hf', 'config' is no JSON: {e}.", "", "It has dicts, lists, texts, finite numbers, "
                              "booleans and None.") from e


def _prepared(folder: Path) -> int:
    """Makes the folder in which files are made, empties it of what an interrupted save has left there, holds its lock."""
    with refusals(f"For 'save_hf', '{folder}' cannot be made", COPYING):
        make_folder(folder)
        lock = claimed(folder / PARTIAL, folder, "save_hf")
        try:
            there = sorted(p.name for p in folder.iterdir() if p.name.endswith((".safetensors", ".bin", INDEX)))
            if there:
                (folder / PARTIAL).rmdir()
                raise CheckpointError(f"For 'save_hf', '{folder}' has weights already.", _few(there),
                                      "Files of two models in one folder would be read as one.", "save into an empty folder")
            for old in (folder / PARTIAL).iterdir():
                old.unlink()
        except BaseException:
            os.close(lock)
            raise
    return lock


def _write(path: Path, tensors: list[_Out], writer: int, group: Group | None) -> Exception | None:
    """Writes a file on one rank, to which the others send; gives what went wrong there, after all has been sent."""
    stream = (_sent(out, writer, group) for out in tensors)
    error = None
    if rank_of(group) == writer:
        entries = {out.name: (out.dtype, out.shape, _one(out, stream)) for out in tensors}
        _, error = attempted(lambda: write_safetensors(path, entries, {"format": "pt"}, COPYING))
    for _ in stream:  # the others wait in it
        pass
    return error


def _one(out: _Out, stream: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The next tensor, of the dtype it is to have; not converted in `_sent`, as what fails there would end the stream."""
    whole = next(stream)
    yield whole if out.dtype == out.of else put(
        np.empty(out.shape, DTYPES[CODES[out.dtype]]), whole.reshape(out.shape), out.name)


def _sent(out: _Out, writer: int, group: Group | None) -> np.ndarray:
    """A tensor whole, on the rank that writes it; elsewhere it means nothing. The ranks that have pieces of it send them."""
    leaf, here = out.leaf, rank_of(group)
    wanted = tuple((0, n) for n in out.whole) if out.row is None else ((out.row, out.row + 1),
                                                                       *((0, n) for n in out.whole[1:]))
    own = DTYPES[CODES[out.of]]
    whole = np.empty([hi - lo for lo, hi in wanted] if here == writer else 0, own)
    sends, comes = [], []
    for box, ranks in whole_box(out.whole, [writer]) if out.held is None else out.held:
        both = common(box, wanted)
        source = writer if writer in ranks else ranks[0]
        if both is None or here not in (source, writer):
            continue
        piece = _view(leaf.array(), within(both, leaf.pieces)) if here == source and leaf is not None else None
        place = tuple(slice(lo - at, hi - at) for (lo, hi), (at, _) in zip(both, wanted))
        if piece is not None and here == writer:
            put(_view(whole, place), piece, out.name)
        elif piece is not None:
            sends.append((writer, Tensor.from_numpy(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).copy())))
        else:
            comes.append((source, place, tuple(hi - lo for lo, hi in both)))
    if group is not None and (sends or comes):
        got = group.exchange(sends, [(source, (math.prod(shape) * own.itemsize,), ms.uint8) for source, _, shape in comes])
        for (_, place, shape), data in zip(comes, got, strict=True):
            _view(whole, place)[...] = data.asnumpy().view(own).reshape(shape)
    return whole


def _publish(folder: Path, files: Mapping[str, list[_Out]], config: bytes | None) -> None:
    """Moves whole files to their names, the index last."""
    with refusals(f"For 'save_hf', '{folder}' cannot be completed", COPYING):
        if config is not None:
            write_synced(folder / "config.json", config)
        for name in files:
            os.replace(folder / PARTIAL / name, folder / name)
        if len(files) > 1:
            places = {out.name: name for name, tensors in files.items() for out in tensors}
            index = {"metadata": {"total_size": sum(out.nbytes for tensors in files.values() for out in tensors)},
                     "weight_map": dict(sorted(places.items()))}
            write_synced(folder / PARTIAL / INDEX, json.dumps(index, indent=2).encode() + b"\n")
            os.replace(folder / PARTIAL / INDEX, folder / INDEX)
        sync(folder)
