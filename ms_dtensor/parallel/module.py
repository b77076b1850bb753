# SPDX-License-Identifier: Apache-2.0
"""`parallelize_module`: a plan, from cell paths to styles, applied to a model.

A pattern is a cell path with wildcards per level (`layers.*.attention.wq`); one that matches nothing raises, because a
typo would otherwise leave a layer quietly unparallelised. All patterns are checked before any parameter is touched.
"""
from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase

from mindspore import nn

from ..errors import ConfigError
from ..mesh import DeviceMesh, resolve_mesh
from .styles import ParallelStyle

logger = logging.getLogger("ms_dtensor")


def parallelize_module(module: nn.Cell, device_mesh: DeviceMesh | None = None,
                       parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None, *,
                       src_data_rank: int | None = 0) -> nn.Cell:
    """Applies styles to a cell and its sub-cells, in place.

    Args:
        module: the model.
        device_mesh: mesh of one axis, e.g. `mesh["tp"]`; default the current one.
        parallelize_plan: one style for `module` itself, or {pattern: style}.
        src_data_rank: coordinate whose initial parameter values are the truth; None: every rank's own.

    Returns:
        The same cell.

    Raises:
        ConfigError: a pattern that matches no cell, or a plan that is neither.
    """
    mesh = resolve_mesh(device_mesh, "parallelize_module")
    if isinstance(parallelize_plan, ParallelStyle):
        return _apply(parallelize_plan, module, mesh, src_data_rank)
    if not isinstance(parallelize_plan, Mapping):
        raise ConfigError("For 'parallelize_module', 'parallelize_plan' must be a ParallelStyle or a dict of them, but "
                          f"got {type(parallelize_plan).__name__}.")
    cells = {name: cell for name, cell in module.cells_and_names()}
    work = []
    for pattern, style in parallelize_plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(f"For 'parallelize_module', the plan's entry {pattern!r} must be a ParallelStyle, but got "
                              f"{type(style).__name__}.")
        names = [name for name in cells if _match(pattern, name)]
        if not names:
            near = difflib.get_close_matches(pattern, cells, 2, 0.4)
            raise ConfigError(f"For 'parallelize_module', the pattern {pattern!r} matches no cell.",
                              f"{type(module).__name__} of {len(cells)} cells", "Every entry of a plan names some cell.",
                              [f"did you mean {n!r}?" for n in near] or "list the paths with cells_and_names()")
        work += [(style, name) for name in names]
        logger.info("parallelize_module: %s -> %s", pattern, ", ".join(names))
    for style, name in work:
        _apply(style, cells[name], mesh, src_data_rank)
    return module


def _apply(style: ParallelStyle, cell: nn.Cell, mesh: DeviceMesh, src_data_rank: int | None) -> nn.Cell:
    style.src_data_rank = src_data_rank
    return style.apply(cell, mesh)


def _match(pattern: str, name: str) -> bool:
    levels, parts = pattern.split("."), name.split(".")
    return len(levels) == len(parts) and all(fnmatchcase(p, level) for p, level in zip(parts, levels))
