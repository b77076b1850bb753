# SPDX-License-Identifier: Apache-2.0
"""Cutting arrays into shards and putting them together again, by the definition of each placement. NumPy only.

Partial operands are split asymmetrically (random summands, random losers), so that no rule passes by accident. This
file shares no code with `redistribute/`: it is what that code is compared with.
"""
from __future__ import annotations

import numpy as np

from ...core.layout import Layout
from ...core.mesh import coordinates


def box_slices(layout: Layout, at) -> tuple:
    """The index of what the shard at a coordinate holds of the global array: slices, or numbers of rows (`FusedShard`)."""
    pieces = layout.pieces(at)
    if all(len(held) == 1 for held in pieces):
        return tuple(slice(lo, hi) for (lo, hi), in pieces)
    return np.ix_(*(np.concatenate([np.arange(lo, hi) for lo, hi in held]) for held in pieces))


def split(array: np.ndarray, layout: Layout, rng: np.random.Generator) -> dict[tuple[int, ...], np.ndarray]:
    """Coordinate -> local array, such that the layout's meaning of them is `array`."""
    values = {at: array for at in coordinates(layout.mesh)}
    for axis in layout.partial_axes:
        op, n = layout.placements[axis].reduce_op, layout.mesh.shape[axis]
        lines: dict[tuple, list] = {}
        for at in values:
            lines.setdefault((*at[:axis], *at[axis + 1:]), []).append(at)
        fresh: dict[bytes, list] = {}  # ranks that held the same values before still agree on the split
        for line in lines.values():
            whole = values[line[0]]
            key = whole.tobytes()
            if key not in fresh:
                fresh[key] = _summands(whole, op, n, rng)
            for at, part in zip(line, fresh[key]):
                values[at] = part
    return {at: np.array(v[box_slices(layout, at)], order="C") for at, v in values.items()}


def _summands(x: np.ndarray, op: str, n: int, rng) -> list[np.ndarray]:
    if op in ("max", "min"):
        winner = rng.integers(0, n, x.shape)
        worse = -1 if op == "max" else 1
        if x.dtype == bool:
            return [np.where(winner == r, x, op == "min") for r in range(n)]
        if x.dtype.kind == "u":  # no room below 0
            return [np.where(winner == r, x, np.maximum(x, x + 1) if op == "min" else 0).astype(x.dtype) for r in range(n)]
        if x.dtype.kind == "i":
            info, wide = np.iinfo(x.dtype), x.astype(object)
            return [np.where(winner == r, x, np.clip(wide + worse * (1 + rng.integers(0, 3, x.shape)), info.min, info.max)
                             ).astype(x.dtype) for r in range(n)]
        return [np.where(winner == r, x, x + worse * (1 + rng.integers(0, 3, x.shape))).astype(x.dtype) for r in range(n)]
    if op == "prod":
        parts = [rng.uniform(0.5, 2.0, x.shape).astype(x.dtype) for _ in range(n - 1)]
        return [*parts, (x / np.prod(parts, axis=0)).astype(x.dtype)]
    if np.issubdtype(x.dtype, np.floating):
        parts = [rng.normal(size=x.shape).astype(x.dtype) for _ in range(n - 1)]
    else:
        parts = [rng.integers(-3, 4, x.shape).astype(x.dtype) for _ in range(n - 1)]
    scale = n if op == "avg" else 1
    return [*parts, (x * scale - sum(parts)).astype(x.dtype)]


_REDUCE: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply, "avg": np.add}


def assemble(parts: dict[tuple[int, ...], np.ndarray], layout: Layout):
    """The global array that local arrays mean, and the coordinates whose replicas disagree (should be none)."""
    values = dict(parts)
    for axis in layout.partial_axes:
        op, n = layout.placements[axis].reduce_op, layout.mesh.shape[axis]
        reduced = {}
        for at in values:
            line = [values[at[:axis] + (i,) + at[axis + 1:]] for i in range(n)]
            out = line[0]
            for v in line[1:]:
                out = _REDUCE[op](out, v)
            reduced[at] = out / n if op == "avg" else out
        values = reduced
    some = next(iter(values.values()))
    whole = np.zeros(layout.shape, some.dtype)
    for at, v in values.items():
        whole[box_slices(layout, at)] = v
    wrong = [at for at, v in values.items() if not same(whole[box_slices(layout, at)], v)]
    return whole, wrong


def same(a: np.ndarray, b: np.ndarray, rtol: float = 2e-4, atol: float = 2e-4, half: bool = False) -> bool:
    """Equal up to float32 rounding of small sums (tolerances: a few hundred ulp of values of size one; of float16, ten)."""
    if a.shape != b.shape:
        return False
    if np.array_equal(a, b):
        return True
    if not np.issubdtype(a.dtype, np.inexact):
        return False
    if a.dtype == np.float16 or half:  # `half`: from operands of that width
        rtol, atol = 1e-2, 1e-2
    with np.errstate(invalid="ignore", over="ignore"):
        scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=1.0))
        close = np.abs(a - b) <= atol * scale + rtol * np.abs(b)  # np.allclose, at a third of its cost
        return bool(np.all(close & np.isfinite(b) | (a == b) | ((a != a) & (b != b))))
