# SPDX-License-Identifier: Apache-2.0
"""What each rank says of its local tensor, compared: do the shards make one tensor, are replicas alike?

Nobody is asked unless the user wants it, as it communicates: `from_local(run_check=True)` makes replicas alike, and
`debug.checks()` compares what `from_local`, `local_map` and `constants="replicate"` are told to believe. The invariant: a
verdict is made of what all ranks of the mesh have told, so all of them raise the same error or none does.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np

from .. import comm
from ..core.layout import Layout
from ..core.mesh import DeviceMesh, coordinates
from ..errors import LayoutError
from ..internals.names import NoFallbackGuard
from ..redistribute.execute import redistribute_local
from .operands import dtype_name, local_alias, recording

_ROUNDING = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 1e-5, "complex64": 1e-5}  # of the largest element; else 1e-9


def compare_replicas(who: str, what: Sequence[str], tensors: Sequence, layouts: Sequence[Layout]) -> None:
    """Raises, on all ranks of the mesh alike, if a tensor differs from rank to rank where its layout has Replicate.

    Checksums travel first, one small message for all tensors. Only tensors whose checksums differ are gathered, to tell
    another value from another rounding.

    Args:
        who: what was called.
        what: names of the tensors in messages.
        tensors: local tensors.
        layouts: their layouts, on one mesh.

    Raises:
        LayoutError: replicas are not alike.
    """
    claims = [(i, a) for i, x in enumerate(layouts) for a, p in enumerate(x.placements)
              if p.is_replicate() and x.mesh.shape[a] > 1]
    if not claims or layouts[0].mesh.get_coordinate() is None:
        return
    mesh, tensors = layouts[0].mesh, [local_alias(t) for t in tensors]
    group = mesh.get_group()
    with NoFallbackGuard(), comm.annotate(src=f"{who} replicas", dst="debug.checks()"):
        told = group.all_gather_object([(list(t.shape), dtype_name(t.dtype), zlib.crc32(t.get_bytes())) for t in tensors])
        at = dict(zip(coordinates(mesh), told))
        claims = [(i, a) for i, a in claims if any(mine[i] != at[c[:a] + (0,) + c[a + 1:]][i] for c, mine in at.items())]
        if not claims:
            return
        unlike = {i for i, _ in claims if len({(*mine[i][0], mine[i][1]) for mine in told}) > 1}  # shapes, dtypes
        told_far = group.all_gather_object([math.inf if i in unlike else _distance(tensors[i], mesh.get_group(a))
                                            for i, a in claims])
    for (i, axis), distance in zip(claims, map(max, zip(*told_far))):
        if distance > _ROUNDING.get(layouts[i].dtype, 1e-9):
            name = mesh.mesh_dim_names[axis]
            held = "\n".join(f"rank {rank} holds {mine[i][1]}{mine[i][0]}" for rank, mine in zip(mesh.rank_list, told))
            raise LayoutError(
                f"For '{who}', {what[i]} differs from rank to rank on axis '{name}'.",
                held if i in unlike else layouts[i].describe(), "It is said to be Replicate() there." + (
                    f" Replicas differ by {distance:.2g} of the largest element." if distance < math.inf else ""),
                (f"say Partial() on '{name}', if each rank holds a summand", "say Shard(dim), if each holds a piece",
                 f"reduce it over '{name}' first"))


def compare_constant(op: str, x, layout: Layout) -> None:
    """Raises, on all ranks of the mesh alike, if a plain tensor that an op takes for a constant differs between them."""
    try:
        compare_replicas(op, ["a plain tensor"], [x], [layout])
    except LayoutError as e:
        raise LayoutError(e.attempt, e.operands, 'constants="replicate" takes what a cell makes for the same on all ranks.',
                          ("ms.set_seed(seed) with one seed on all ranks, if it was drawn at random",
                           "distribute_tensor(t, device_mesh, placements), if coordinate 0 has the right one",
                           "DTensor.from_local(t, device_mesh, placements), if ranks hold pieces")) from None


def _distance(x, group) -> float:
    """How far the members' tensors are from the first one's, as a share of the largest element; infinite for integers."""
    exact = not x.is_floating_point() and not x.is_complex()
    flat = x.reshape((-1,)).contiguous()
    flat = flat.astype(ms.float32) if x.itemsize == 2 and not exact else flat
    whole = group.all_gather(flat, 0, [flat.shape[0]] * group.size).asnumpy().reshape(group.size, -1)
    off: Any = np.abs(whole - whole[0])[~((whole == whole[0]) | (np.isnan(whole) & np.isnan(whole[0])))] if not exact else ()
    if exact or not np.isfinite(off).all():
        return 0.0 if (whole == whole[0]).all() else math.inf
    return float(off.max(initial=0) / max(np.abs(whole[np.isfinite(whole)]).max(initial=0), 1e-30))


def compare_shards(who: str, what: Sequence[str], tensors: Sequence, mesh: DeviceMesh,
                   layouts: Sequence[Layout] | None) -> None:
    """Raises, on all ranks of the mesh alike, if a tensor is on some rank not the shard that its layout says.

    Args:
        who: what was called.
        what: names of the tensors in messages.
        tensors: local tensors.
        mesh: the mesh.
        layouts: their layouts, the same on all ranks; None: all shards are alike.

    Raises:
        LayoutError: they do not make one tensor each.
    """
    if mesh.get_coordinate() is None:
        return
    with comm.annotate(src=f"{who} shapes", dst="a check"):
        everyone = mesh.get_group().all_gather_object([
            (tuple(t._shape), dtype_name(t.dtype), None if layouts is None else layouts[i].local_shape())
            for i, t in enumerate(tensors)])
    for i, name in enumerate(what):
        wrong = []
        for told, rank in zip(everyone, mesh.rank_list):
            first, dtype, _ = everyone[0][i]  # of all ranks the same one, so that they all say the same
            shape = first if layouts is None else told[i][2]
            if told[i][:2] != (shape, dtype):
                wrong.append(f"rank {rank} holds {told[i][1]}{list(told[i][0])}, expected {dtype}{list(shape)}")
        if wrong:
            raise LayoutError(f"For '{who}', the ranks' shards of {name} do not make one tensor.",
                              "\n".join([f"mesh({mesh.describe()})"] + ([] if layouts is None else [
                                  f"{list(layouts[i].shape)} as {list(layouts[i].placements)}"]) + wrong),
                              "Without a global shape all shards must be alike; with it each must be its chunk.",
                              "pass the global shape that belongs to these shards")


def made_alike(local, layout: Layout):
    """`local` after `run_check`: still connected, with the values of coordinate 0 on axes that replicate."""
    replicated = [axis for axis, p in enumerate(layout.placements) if p.is_replicate()]
    if not replicated:
        return local
    checked = local_alias(local)
    for axis in replicated:
        group = layout.mesh.get_group(axis)
        checked = group.broadcast(checked, group.ranks[0])
    if recording():
        return redistribute_local(local, layout, layout, layout.gradient(), layout.gradient(), data=checked)
    return checked
