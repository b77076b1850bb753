# SPDX-License-Identifier: Apache-2.0
"""Activation recompute: which cells of a model run their forward again in the backward instead of keeping what it made.

How they do it is `dispatch/patches/recomputed.py`'s: on DTensors and plain tensors, before or after styles, `replicate` and
`fully_shard`; on DTensors with the same random numbers. Here the cells are chosen.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from mindspore import nn

from ..dispatch import patches
from ..dispatch.modes import named, op_names
from ..dispatch.patches.recomputed import Recompute
from ..errors import ConfigError


def checkpoint_wrapper(module: nn.Cell, policy: str | Callable[[str, nn.Cell], bool] | Iterable = "full", *,
                       save: Iterable | Callable[[str, tuple], bool] | None = None) -> nn.Cell:
    """Lets cells run again in the backward (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

    Args:
        module: a cell; or a `CellList` or `SequentialCell` of blocks, each of which is chosen or not.
        policy: "full": every block; "every:n": the first of each n blocks; or `(path, cell) -> bool`, asked of every cell
            inside, outermost first: one inside a chosen cell is not asked. A list of ops is "full" with these as `save`.
        save: ops whose results are kept, while the rest runs again (PyTorch's selective checkpointing: these are
            MUST_SAVE, others PREFER_RECOMPUTE): callables or names as for `SkipDTensorDispatch`; "redistribute", which is
            communication, and "send_rows", which brings keys or tokens of other ranks; or `(op, arguments) -> bool`, asked
            of each call by the op's name in rules ("matmul"). Of a kept op's operands nothing is kept but what it moved or
            cast itself. Ops on DTensors are seen, inside a `local_map` none but "send_rows".

    Returns:
        The same module.

    Raises:
        ConfigError: another policy, "every" without blocks, a function that chose nothing, or a name of no op. Later, by a
            forward: plain tensors only, of which no op is seen.

    Example:
        >>> import ms_dtensor as md
        >>> from mindspore import mint, nn
        >>> blocks = nn.CellList([nn.Dense(4, 4) for _ in range(4)])
        >>> _ = md.checkpoint_wrapper(blocks, "every:2")
        >>> [block._recompute_cell is not None for block in blocks]
        [True, False, True, False]
        >>> _ = md.checkpoint_wrapper(blocks, save=[mint.matmul, "redistribute"])
    """
    if not isinstance(module, nn.Cell):
        raise ConfigError(f"For 'checkpoint_wrapper', 'module' must be a Cell, but got {type(module).__name__}.", "",
                          "A cell runs again, or each of a CellList.",
                          ("pass the CellList of blocks", "for block in blocks: checkpoint_wrapper(block)"))
    if isinstance(policy, list | tuple | set | frozenset):
        policy, save = "full", policy if save is None else save
    keeps = _keeps(save)
    blocks = list(module) if isinstance(module, nn.CellList | nn.SequentialCell) else None
    every = re.fullmatch(r"every:([1-9]\d*)", policy) if isinstance(policy, str) else None
    if policy == "full":
        chosen = blocks or [module]
    elif every and blocks:
        chosen = blocks[::int(every[1])]
    elif callable(policy):
        chosen, taken = [], list[str]()
        for path, cell in module.cells_and_names():
            if path and not path.startswith(tuple(f"{t}." for t in taken)) and policy(path, cell):
                chosen.append(cell)
                taken.append(path)
    else:
        chosen = []
    if not chosen:
        raise ConfigError(f"For 'checkpoint_wrapper', the policy {policy!r} chooses no cell.",
                          f"{type(module).__name__} of {len(dict(module.cells_and_names()))} cells",
                          '"full", "every:n" of a list of blocks, or a function that is true for some cell.',
                          ("pass the CellList of blocks", 'policy="full" for this one cell'))
    patches.install()  # gradients that are asked for inside are ours
    for cell in chosen:
        cell._cells.pop("_recompute_cell", None)  # MindSpore's own, chosen before: a cell inside the cell
        cell._recompute_cell = Recompute(cell.construct, keeps)
    return module


def _keeps(save) -> Callable[[str, tuple], bool] | None:
    if save is None or callable(save):
        return save
    names = op_names(save, "checkpoint_wrapper", "save")
    return lambda op, arguments: named(op, names)
