# SPDX-License-Identifier: Apache-2.0
"""`parallelize_module`: a plan, from cell paths to styles, applied to a model.

A pattern is a cell path with wildcards per level (`layers.*.attention.wq`); one that matches nothing raises, because a
typo would otherwise leave a layer quietly unparallelised. All patterns are checked before any parameter is touched.
"""
from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase

from mindspore import nn

from ..core.mesh import DeviceMesh, resolve_mesh
from ..errors import ConfigError
from ..internals.target import with_values
from ..tensor import deferred_init
from ..tensor.distribute import check_source
from .constants import ALIKE, with_constants
from .fused import FusedColwiseParallel
from .layouts import STYLES_MESH, around_construct, check_ties, explained
from .styles import ParallelStyle

_told: list[str] = []  # the last table that was printed; of blocks that are dealt with one by one it is said once
ELSEWHERE = "_ms_dtensor_elsewhere"  # cell attribute: it stands for one of another stage of a pipeline
_WRAPPED = "_backbone"  # the level that MindSpore's wrappers add (`amp`, `WithLossCell`); a pattern need not spell it


@with_values
def parallelize_module(module: nn.Cell, device_mesh: DeviceMesh | None = None,
                       parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None, *,
                       src_data_rank: int | None = 0, constants: str | None = None) -> nn.Cell:
    """Applies styles to a cell and its sub-cells, in place.

    Args:
        module: the model.
        device_mesh: mesh of one axis, e.g. `mesh["tp"]`; default the current one.
        parallelize_plan: one style for `module` itself, or {pattern: style}; `suggest_plan` computes one. What matched
            what is printed by one rank, once for blocks that match alike. Without a plan nothing happens, with a warning.
        src_data_rank: coordinate whose initial parameter values all take; None: every rank's own.
        constants: "replicate": a plain tensor that `module` or a cell inside makes in `construct` (`arange`, `zeros`,
            `Tensor(...)`), or keeps as an attribute, counts as the same on all ranks where it meets a DTensor; else it is
            refused there. For models that you did not write, also without a plan, also beside `fully_shard` and
            `replicate`. All tensors that come in must be DTensors (`replicate` makes those that come into it), or the call
            is as without it; Parameters are no constants; styles inside keep DTensors. `debug.checks()` compares ranks.

    Returns:
        The same cell.

    Raises:
        ConfigError: a pattern that matches no cell, nor one of another stage of a pipeline; a plan that is neither, a
            style that cannot cut its cell, or other `constants`. All of this is found before any parameter is touched.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import nn
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 4))
        >>> net = md.parallelize_module(net, mesh, {"0": md.ColwiseParallel(), "2": md.RowwiseParallel()})
        parallelize_module over tp=1:
          0  ColwiseParallel: 0
          2  RowwiseParallel: 2
        >>> net[0].weight
        DTensor(Parameter '0.weight', f32[8@tp, 4], mesh=(tp=1), rank 0 holds [8, 4])
    """
    mesh = resolve_mesh(device_mesh, "parallelize_module")
    check_source(src_data_rank, mesh, "parallelize_module")
    if constants not in (None, "replicate"):
        raise ConfigError(f"For 'parallelize_module', 'constants' must be None or \"replicate\", but got {constants!r}.")
    if parallelize_plan is None and constants is None:
        warnings.warn("parallelize_module: no plan was given, so nothing is parallelised", UserWarning, stacklevel=2)
        return module
    if not isinstance(module, nn.Cell):
        raise ConfigError(f"For 'parallelize_module', 'module' must be a Cell, but got {type(module).__name__}.", "",
                          "Styles cut the parameters of cells.", "pass the model, or one of its cells")
    work = _matched(module, {} if parallelize_plan is None else parallelize_plan)
    check_ties([(cell, style.check(cell, mesh)) for _, style, found in work for cell in found.values()], mesh)
    deferred_init.remember(module, mesh, src_data_rank)
    if parallelize_plan and not work:  # what comes here from another stage lies on this mesh, too
        module.__dict__[STYLES_MESH] = mesh
    _tell(mesh, work)
    for _, style, found in work:
        style.src_data_rank = src_data_rank
        for cell in found.values():
            style.apply(cell, mesh)
    if isinstance(parallelize_plan, Mapping) and any(
            getattr(style, "use_local_output", False) or isinstance(style, FusedColwiseParallel) for _, style, _ in work):
        around_construct(module, explained)
    if constants is not None:
        around_construct(module, with_constants)
        module.__dict__[ALIKE] = True
    return module


def _matched(module: nn.Cell, plan) -> list[tuple[str, ParallelStyle, dict[str, nn.Cell]]]:
    """Each pattern of a plan, its style, and the cells it is for, by name."""
    if isinstance(plan, ParallelStyle):
        return [("", plan, {type(module).__name__: module})]
    if not isinstance(plan, Mapping):
        raise ConfigError("For 'parallelize_module', 'parallelize_plan' must be a ParallelStyle or a dict of them, but "
                          f"got {type(plan).__name__}.")
    cells = dict(module.cells_and_names())
    inner = {".".join(p for p in name.split(".") if p != _WRAPPED): cell for name, cell in cells.items()}
    absent = [name for name, cell in inner.items() if getattr(cell, ELSEWHERE, False)]
    work = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(f"For 'parallelize_module', the plan's entry {pattern!r} must be a ParallelStyle, but got "
                              f"{type(style).__name__}.")
        among = cells if _WRAPPED in pattern.split(".") else inner
        if set("*?[") & set(pattern):
            found = {name: cell for name, cell in among.items() if _match(pattern, name)}
        else:  # thousands of exact patterns would each be compared with thousands of names
            found = {pattern: among[pattern]} if pattern in among else {}
        found = {name: cell for name, cell in found.items() if not getattr(cell, ELSEWHERE, False)}
        if not found and any(_match(".".join(pattern.split(".")[:name.count(".") + 1]), name) for name in absent):
            continue  # it is for cells of another stage, or inside of one
        if not found:
            near = difflib.get_close_matches(pattern, inner, 2, 0.4)
            raise ConfigError(f"For 'parallelize_module', the pattern {pattern!r} matches no cell.",
                              f"{type(module).__name__} of {len(cells)} cells", "Every entry of a plan names some cell.",
                              [f"did you mean {n!r}?" for n in near] or "list the paths with cells_and_names()")
        work.append((pattern, style, found))
    return work


def _tell(mesh: DeviceMesh, work) -> None:
    """Prints what matched what, on the first rank of the mesh that `mesh` was sliced from."""
    if not work or mesh.get_rank() != mesh.root.rank_list[0]:
        return
    wide = max((len(pattern) for pattern, _, _ in work), default=0)
    lines = [f"parallelize_module over {mesh.describe()}:"]
    for pattern, style, matched in work:
        names = list(matched)
        shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} cells)"
        lines.append(f"  {pattern:<{wide}}  {type(style).__name__}: {shown}")
    if lines != _told:
        _told[:] = lines
        print("\n".join(lines), flush=True)


def _match(pattern: str, name: str) -> bool:
    levels, parts = pattern.split("."), name.split(".")
    if not name:  # the module itself, which "*" does not mean
        return not pattern
    return len(levels) == len(parts) and all(fnmatchcase(p, level) for p, level in zip(parts, levels))
