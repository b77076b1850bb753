# SPDX-License-Identifier: Apache-2.0
"""What all ranks hold together: the tensors and values of one checkpoint, on which they agree before anything is written.

Without a pipeline every rank has every key. The stages of a pipeline have other ones each: ranks of one stage agree as all
do otherwise, then the stages tell each other what they have, and the whole is the union. What several stages have, such as
a tied embedding, is equal on them, and the first one's counts. Invariant: all ranks get the same whole, or one error.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import comm
from ..comm.group import Group
from ..core.mesh import DeviceMesh
from ..errors import CheckpointError
from .copies import bytes_hash, copied
from .index import TensorInfo
from .pieces import as_bytes, crc
from .plan import laid_out, whole_on
from .random_state import DIFFER, RandomState
from .ranks import alike, gathered, together, unlike
from .spread import Cut, Mesh, Ranks, Spread
from .state import Leaf, State, Value, key_order


class Whole(NamedTuple):
    """What a checkpoint has: tensors, plain values, and further names of tensors."""

    tensors: dict[str, TensorInfo]
    values: dict[str, Value]
    tied: dict[str, str]


def pipeline_axis(over: Any, who: str) -> None:
    """Refuses what is no axis of a mesh that this rank is in."""
    if over is not None and not (isinstance(over, DeviceMesh) and over.ndim == 1 and over.get_coordinate() is not None):
        raise CheckpointError(f"For '{who}', 'over' is {over!r}.", "", "It is the axis over which stages are dealt; all "
                              "ranks are on it.", f'{who}(state, path, over=mesh["pp"])')


def agreed(group: Group | None, state: State, arguments: dict[str, str], over: DeviceMesh | None) -> Whole:
    """All ranks save in the same way, and those of a stage, or all, the same names, layouts and plain values.

    Args:
        group: all ranks.
        state: this rank's.
        arguments: of the user, as messages print them.
        over: the axis of a pipeline, if there is one.

    Raises:
        CheckpointError: on all ranks the same.
    """
    if group is None or over is None:
        return _of_stage(group, state, arguments)
    if not alike(group, [arguments]):
        raise _other_arguments(unlike(group, arguments))
    places = gathered(group, over.get_group().rank_index)
    mine = [rank for rank, place in enumerate(places) if place == places[group.rank_index]]
    own = together(group, "save", partial(_of_stage, comm.group(mine), state, arguments))
    return together(group, "save", partial(_union, over.get_group(), own, state))


def _of_stage(group: Group | None, state: State, arguments: dict[str, str]) -> Whole:
    """What these ranks hold, each all of it, after they have compared."""
    copies: dict[str, Spread] = {}
    if group is not None and group.size > 1:
        meshes = list(dict.fromkeys(leaf.layout.mesh for leaf in state.tensors.values() if leaf.layout is not None))
        table = {key: _identity(leaf, meshes) for key, leaf in state.tensors.items()}
        table |= {key: repr(value) for key, value in state.values.items()}
        table |= {key: f"the same as '{first}'" for key, first in state.tied.items()}
        if not alike(group, [arguments, table]):
            raise _unlike(group, state, arguments, table)
        copies = copied(group, state, meshes)
    ranks = (0,) if group is None else group.ranks
    tensors = {key: TensorInfo(key, leaf.dtype, leaf.shape, copies.get(key) or (
        whole_on(ranks, leaf.shape) if leaf.layout is None else laid_out(leaf.layout)), 1 if group is None else
        group.backend.size) for key, leaf in state.tensors.items()}
    return Whole(tensors, state.values, state.tied)


def _unlike(group: Group, state: State, arguments: dict[str, str], table: dict[str, str]) -> CheckpointError:
    bad = unlike(group, arguments)
    if bad:
        return _other_arguments(bad)
    bad = unlike(group, table)
    random = tuple(f"{key}." if key else "" for key, node in state.objects.items() if isinstance(node, RandomState))
    return CheckpointError(f"For 'save', the ranks' states differ in {len(bad)} keys.", "\n".join([*bad.values()][:4]),
                           "A checkpoint is one state; what is not laid out over the ranks is the same on all of them.",
                           (*((DIFFER,) if any(key.startswith(random) for key in bad) else ()),
                            "DTensor.from_local(x, mesh, [Shard(0)]) for what each rank has of its own",
                            "save what rank 0 has: broadcast it first",
                            *(('save(..., over=mesh["pp"]) of the stages of a pipeline',)
                              if any("has none" in line for line in bad.values()) else ())))


def _other_arguments(bad: dict[str, str]) -> CheckpointError:
    return CheckpointError(f"For 'save', the ranks' arguments differ: {', '.join(bad)}.", "\n".join(bad.values()),
                           "All ranks save one checkpoint together.", "give each rank the same arguments")


def _identity(leaf: Leaf, meshes: list[DeviceMesh]) -> str:
    if leaf.layout is not None:  # the ranks of a mesh may differ: see `copies.py`
        return f"{leaf.layout.describe()} {leaf.layout.placements} {leaf.layout.order} mesh {meshes.index(leaf.layout.mesh)}"
    return f"{leaf.describe()} crc32 {crc(as_bytes(np.ascontiguousarray(leaf.array()))):08x}"


# -- stages ----------------------------------------------------------------------------------------------------------------
def _union(over: Group, mine: Whole, state: State) -> Whole:
    """What the stages have together; this rank's is at its place of `over`."""
    stages = [Whole({key: TensorInfo(key, dtype, shape, _spread(*spread), over.backend.size)
                     for key, (dtype, shape, spread) in tensors.items()}, values, tied) for tensors, values, tied in
              over.all_gather_object(({key: (t.dtype, t.shape, _written(t.spread)) for key, t in mine.tensors.items()},
                                      dict(mine.values), dict(mine.tied)))]
    kinds = [{key: f"{t.dtype}{list(t.shape)}" for key, t in one.tensors.items()} |
             {key: repr(value) for key, value in one.values.items()} |
             {key: f"the same as '{first}'" for key, first in one.tied.items()} for one in stages]
    _compare(over, kinds, "are of another kind, or another value, on each")
    shared = {key for key in set().union(*kinds) if sum(key in one.tensors for one in stages) > 1}
    if shared:  # of copies that are cut alike ranks at the same place have the same bytes
        _compare(over, over.all_gather_object({
            key: f"hash {bytes_hash(state.tensors[key])[:8]}" for key in mine.tensors
            if key in shared and len({one.tensors[key].spread.cuts for one in stages if key in one.tensors}) == 1}),
            "have other bytes on each")
    return Whole(*(_joined(parts) for parts in zip(*stages)))  # type: ignore[arg-type]


def _joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = {key: value for part in reversed(parts) for key, value in part.items()}
    return {key: first[key] for key in sorted(first, key=key_order)}


def _compare(over: Group, told_of: Sequence[dict[str, str]], how: str) -> None:
    """Refuses what stages that have it do not tell alike."""
    axis, bad = ",".join(over.axes) or "stage", []
    for key in sorted(set().union(*told_of), key=key_order):
        said = {f"{axis}={i} {one[key]}": one[key] for i, one in enumerate(told_of) if key in one}
        if len(set(said.values())) > 1:
            bad.append(f"'{key}': {'; '.join(said)}")
    if bad:
        raise CheckpointError(f"For 'save', {len(bad)} keys that several stages have {how}.", "\n".join(bad[:4]),
                              "What several stages of a pipeline have of one name is one thing, saved once.",
                              ("give each stage's own a name of its own", "broadcast it over the stages before"))


def _written(spread: Spread) -> tuple:
    return spread.mesh.shape, spread.mesh.ranks.runs, tuple((cut.axes, cut.runs) for cut in spread.cuts)


def _spread(shape: tuple, runs: tuple, cuts: tuple) -> Spread:
    return Spread(Mesh(shape, Ranks(runs)), tuple(Cut(*cut) for cut in cuts))
