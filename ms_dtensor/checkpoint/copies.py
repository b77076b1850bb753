# SPDX-License-Identifier: Apache-2.0
"""Tensors that ranks hold on meshes of their own, each mesh a copy: `parallelize_module(net, mesh["tp"], ...)` and nothing
on `mesh["dp"]`. They are one tensor, saved once, if the copies are equal.

Equal are layouts, but for the numbers of the ranks (compared before), and the bytes on ranks at the same place of their
meshes, which their hashes tell. What comes out is the tensor on one mesh of all of these ranks, with one axis more, which
does not cut.
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..comm.group import Group
from ..core.mesh import DeviceMesh
from ..errors import CheckpointError
from .pieces import piece_hash, pieces
from .plan import laid_out
from .ranks import gathered
from .spread import Cut, Mesh, Ranks, Spread
from .state import Leaf, State


def copied(group: Group, state: State, meshes: Sequence[DeviceMesh]) -> dict[str, Spread]:
    """The spreads of tensors that are on several meshes.

    Args:
        group: the ranks that save it: all, or those of one stage of a pipeline.
        state: what they save; names and layouts have been compared.
        meshes: this rank's, in the order in which the state has them.

    Raises:
        CheckpointError: on all ranks the same: meshes that overlap, or copies that are not equal.
    """
    told = gathered(group, [_digest(mesh.mesh.tobytes()) for mesh in meshes])  # not the ranks: they may be many
    several = [i for i in range(len(meshes)) if len({ranks[i] for ranks in told}) > 1]
    if not several:
        return {}
    whole = {i: _joined(group, meshes[i]) for i in several}
    of = {key: meshes.index(leaf.layout.mesh) for key, leaf in state.tensors.items() if leaf.layout is not None}
    for i in several:
        _compare(group, [state.tensors[key] for key in of if of[key] == i], whole[i])
    found = {}
    for key, i in of.items():
        layout = state.tensors[key].layout
        if layout is not None and i in whole:
            cuts = laid_out(layout).cuts
            found[key] = Spread(whole[i], tuple(Cut(tuple(a + 1 for a in cut.axes), cut.runs) for cut in cuts))
    return found


def _joined(group: Group, mesh: DeviceMesh) -> Mesh:
    """The meshes that stand at the same place in the ranks' states, as one; a mesh is told by its first rank."""
    mine = mesh.rank_list
    told = gathered(group, list(mine) if group.ranks[group.rank_index] == mine[0] else None)
    blocks = [ranks for ranks in told if ranks is not None]
    flat = [rank for ranks in blocks for rank in ranks]
    if len(set(flat)) < len(flat) or len(flat) < group.size:
        raise CheckpointError("For 'save', the ranks' states are on meshes that are no copies of each other.",
                              "; ".join(f"mesh({mesh.describe()}) of ranks {ranks}" for ranks in blocks[:4]),
                              "A tensor is on one mesh, or on meshes that share no rank and together have all ranks.",
                              "distribute it over one mesh of all of these ranks: it may be Replicate() on an axis")
    return Mesh((len(blocks), *mesh.shape), Ranks.of(flat))


def _compare(group: Group, leaves: Sequence[Leaf], whole: Mesh) -> None:
    """Refuses tensors of which ranks at the same place of their meshes have other bytes."""
    mine = [bytes_hash(leaf) for leaf in leaves]
    places = [whole.place_of(rank) for rank in group.ranks]
    bad: list[str] = []
    if not _differ(places, gathered(group, _digest(repr(mine).encode()))):
        return
    for leaf, value in zip(leaves, mine):  # one tensor at a time: they may be many, of many ranks
        two = _differ(places, told := gathered(group, value))
        if two:
            hashes = ", ".join(f"hash {told[i][:8]} on rank {group.ranks[i]}" for i in two)
            bad.append(f"'{leaf.key}' is {leaf.describe()}: {hashes}")
        if len(bad) == 4:
            break
    raise CheckpointError("For 'save', ranks have copies of a tensor that differ.", "\n".join(bad),
                          "What several ranks hold of one name is one tensor: equal bytes, which hashes tell.",
                          ("broadcast it before, or seed all ranks alike when it is made",
                           "replicate(net, mesh=mesh['dp']) keeps copies equal in training",
                           "give each copy a name of its own"))


def _differ(places: Sequence[tuple[int, ...] | None], told: Sequence[str]) -> tuple[int, int] | None:
    """Two members at the same place of their copies that do not tell the same."""
    first: dict[tuple[int, ...], int] = {}
    for rank, (place, value) in enumerate(zip(places, told)):
        if place is not None:
            other = first.setdefault(place[1:], rank)
            if told[other] != value:
                return other, rank
    return None


def bytes_hash(leaf: Leaf) -> str:
    """Of what is here of a tensor."""
    found: list[int] = []
    for _ in pieces(np.ascontiguousarray(leaf.array()), lambda piece: found.append(piece_hash(piece))):
        pass
    return _digest(repr(found).encode())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
