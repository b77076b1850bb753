# SPDX-License-Identifier: Apache-2.0
"""Experts that have room for a fixed number of rows from each rank: all sizes are known beforehand, and nobody waits.

What is over is dropped, and rooms that stay empty travel, too: the price of a host that never waits for the device. Not
here: which choices a model drops (a capacity is over sequences, wherever their tokens are).
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from ..custom_ops.rows import ReturnRows, Rows
from ..ops.local import Nothing
from ..ops.local.dtypes import full, rounded, wider
from .experts_rows import added_at, rows_at, sent, weighted


def _places(chosen: Tensor, experts: int, room: int) -> tuple[Tensor, Tensor]:
    """Of choices i32[n * k]: which of its expert's each one is, counted from 1, and whether there is room for it."""
    hot = ops.one_hot(chosen, experts).astype(ms.float32)  # of what is no expert a row of zeros
    place = (ops.cumsum(hot, 0) * hot).sum(1).astype(ms.int32)
    return place, ops.logical_and(place > 0, place <= min(room, len(chosen)))


def within(chosen: Tensor, experts: int, room: int) -> Tensor:
    """i32[n, k]: the choices for which there is room, and -1."""
    if not chosen.shape[0]:
        return chosen
    _, fits = _places(chosen.reshape(-1).astype(ms.int32), experts, room)
    return mint.where(fits.reshape(chosen.shape), chosen, -1)


def by_room(room: int, products, owners, experts: int, x, weights, chosen, w1, w2, w3) -> Tensor:
    """`moe` over the members of `owners`, by two all-to-alls of equal sizes; `products`: rows through their experts."""
    (n, k), d, members = chosen.shape, x.shape[1], len(owners.bounds)
    (first, end), all_rooms = owners.mine, experts * room
    send, recv = [(b - a) * room for a, b in owners.bounds], [(end - first) * room] * members
    there = Rows(all_rooms, np.arange(all_rooms), send, recv, "tokens", "rooms of their experts")
    if n:
        flat = chosen.reshape(-1).astype(ms.int32)
        place, fits = _places(flat, experts, room)
        at = mint.where(fits, flat * room + place - 1, all_rooms)  # behind all rooms what has none, or is no expert
        weights = mint.where(fits.reshape(n, k), wider(weights), 0)  # infinite times nothing would be no number
        placed_rows = added_at(wider(rows_at(x, np.repeat(np.arange(n), k))), at, all_rooms + 1)
        rows = rounded(placed_rows[:all_rooms], x)  # a CPU has no gradient of slices of bfloat16
    else:
        rows = Nothing.apply((all_rooms, d), x.dtype, x)
    got, = sent(there, owners.group, rows)
    y = _turned(products(_turned(got, members, end - first, room), np.full(end - first, members * room), w1, w2, w3),
                end - first, members, room)
    back, = ReturnRows.apply(there, owners.group, y)
    choices = rows_at(mint.cat((back, full((1, d), 0, back.dtype))), at) if n else back
    return weighted(choices, weights, x)


def _turned(rows: Tensor, outer: int, inner: int, room: int) -> Tensor:
    """Rooms [outer, inner, room] in the order [inner, outer, room]."""
    if not inner or not outer:
        return rows
    return mint.permute(rows.reshape(outer, inner, room, -1), (1, 0, 2, 3)).reshape(outer * inner * room, -1)
