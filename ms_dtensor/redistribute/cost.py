# SPDX-License-Identifier: Apache-2.0
"""The stated cost of a move: alpha per collective + beta per byte sent by a rank + gamma per byte copied locally.

A model for choosing, not a clock: all ranks must choose alike, so it depends on layouts only, and on shards at
coordinate zero, which are the largest. Bytes are the textbook lower bounds (ring or direct). The figures may be told per
device type, by `set_costs` or a JSON file named in MS_DTENSOR_COSTS; every rank must be told the same. Read next: `plan.py`.
"""
from __future__ import annotations

import json
import os
import reprlib
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path

from ..core.layout import Layout
from ..errors import ConfigError

ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
            **{f"{u}int{b}": b // 8 for u in ("", "u") for b in (8, 16, 32, 64)}}


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per collective, per byte on the wire, and per byte copied."""

    alpha: float = 20e-6
    beta: float = 1 / 5e9
    gamma: float = 1 / 20e9

    def seconds(self, kind: str, ranks: int, before: int, after: int, messages: int = 1) -> float:
        """Cost of one move of a shard of `before` bytes into one of `after` bytes over `ranks` ranks.

        An exchange pays alpha for each of `messages`, a collective once.
        """
        if kind in ("cut", "reorder"):
            return self.gamma * after
        alphas = messages if kind == "exchange" else 1
        return self.alpha * alphas + self.beta * sent_bytes(kind, ranks, before, after) + self.gamma * after


def sent_bytes(kind: str, ranks: int, before: int, after: int) -> float:
    """Bytes a rank must at least send for one move.

    Example:
        >>> from ms_dtensor.redistribute.cost import sent_bytes
        >>> sent_bytes("all_gather", 4, 100, 400), sent_bytes("all_reduce", 4, 100, 100)
        (300, 150.0)
    """
    if kind in ("cut", "reorder"):
        return 0
    if kind == "all_gather":
        return before * (ranks - 1)
    if kind == "all_reduce":
        return 2 * before * (ranks - 1) / ranks
    if kind in ("reduce_scatter", "all_to_all"):
        return before * (ranks - 1) / ranks
    return after  # exchange: at worst all of the new shard comes from elsewhere


def nbytes(shape, dtype: str) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * ITEMSIZE.get(dtype, 4)


def shard_bytes(layout: Layout) -> int:
    """Bytes of the largest shard, the one at coordinate zero."""
    return nbytes(layout.local_shape((0,) * layout.mesh.ndim), layout.dtype)


DEFAULT = CostModel()
_told: dict[str, CostModel] | None = None  # per device type; None until the environment has been asked


def costs(device_type: str) -> CostModel:
    """The model in force for meshes of this device type."""
    global _told
    if _told is None:
        path = os.environ.get("MS_DTENSOR_COSTS")
        _told = load_costs(path) if path else {}
    return _told.get(device_type, DEFAULT)


def set_costs(models: dict[str, CostModel] | str | os.PathLike | None) -> None:
    """Replaces the models in force, for plans made from now on; call it on every rank alike.

    Args:
        models: per device type ("cpu", "npu", "gpu"); or the path of a JSON file of them; None for the built-in one.

    Example:
        >>> from ms_dtensor.redistribute.cost import CostModel, costs, set_costs
        >>> set_costs({"cpu": CostModel(alpha=5e-6)})
        >>> costs("cpu").alpha, costs("npu").alpha
        (5e-06, 2e-05)
        >>> set_costs(None)
    """
    global _told
    _told = {} if models is None else dict(models) if isinstance(models, dict) else load_costs(models)


def load_costs(path: str | os.PathLike) -> dict[str, CostModel]:
    """Reads `{"cpu": {"alpha": 2e-5, "beta": 2e-10, "gamma": 5e-11}}`; figures left out keep their default.

    Raises:
        ConfigError: the file is no such JSON.
    """
    known, shown = [f.name for f in fields(CostModel)], os.fspath(path)[:200]
    shape = 'write {"cpu": {"alpha": seconds, "beta": seconds per byte, "gamma": seconds per byte}}'
    try:
        if not Path(path).is_file():  # nothing that blocks, or never ends
            raise FileNotFoundError("no such file")
        told = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"For 'MS_DTENSOR_COSTS', {shown!r} cannot be read.", str(e)[:300], "It names a file of JSON.",
                          shape) from None
    for device, figures in told.items() if isinstance(told, dict) else [(None, None)]:
        wrong = not isinstance(figures, dict) or [k for k, v in figures.items() if k not in known or not _is_cost(v)]
        if device not in ("cpu", "npu", "gpu") or wrong:
            raise ConfigError(f"For 'MS_DTENSOR_COSTS', {shown!r} does not state costs.", reprlib.repr({device: figures}),
                              f"Per device type (cpu, npu, gpu), some of {', '.join(known)}, each from 0 to 1e9.", shape)
    return {device: CostModel(**figures) for device, figures in told.items()}


def _is_cost(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e9
