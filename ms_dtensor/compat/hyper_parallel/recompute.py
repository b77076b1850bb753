# SPDX-License-Identifier: Apache-2.0
"""hyper_parallel's `checkpoint_wrapper` over our recompute: contexts around both runs, and a policy for ops on DTensors."""
from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

from mindspore import nn

from ...dispatch import patches
from ...dispatch.patches.recomputed import Recompute, excluded
from ...errors import ConfigError
from ...parallel.layouts import around_construct


class CheckpointPolicy(enum.Enum):
    """What a `policy_fn` says of an op's results: kept, or computed again.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import CheckpointPolicy
        >>> CheckpointPolicy.MUST_SAVE.name
        'MUST_SAVE'
    """

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_SWAP = 4


def checkpoint_wrapper(module: nn.Cell | Callable, *,
                       context_fn: Callable[[], tuple[AbstractContextManager, AbstractContextManager]] | None = None,
                       policy_fn: Callable | None = None, early_stop: bool = True, output_recompute: bool = False,
                       group_swap: bool = False):
    """Lets a cell or a function run again in the backward, in place of keeping what it made.

    Args:
        module: a cell, which is told and returned (there it is wrapped in another cell, so that its parameters change their
            names; here they keep them); or a function, of which a new one is returned.
        context_fn: gives, at each call, what to be in during the first run and during the second.
        policy_fn: `(None, op, *arguments) -> CheckpointPolicy`, asked of ops on DTensors by their names in rules. Ops on
            plain tensors nobody sees: a cell of plain tensors with a policy is refused when it runs.
        early_stop: without effect: the second run goes to its end.
        output_recompute: without effect: outputs are kept by who reads them.
        group_swap: refused.

    Raises:
        ConfigError: `group_swap`, or a policy that says MUST_SWAP.

    Example:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import checkpoint_wrapper
        >>> net = nn.SequentialCell(checkpoint_wrapper(nn.Dense(4, 4)), nn.Dense(4, 1))
        >>> [p.name for p in net.trainable_params()]
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    if group_swap:
        raise _no_swap("group_swap=True")
    keeps = None if policy_fn is None else functools.partial(_keeps, policy_fn)
    patches.install()  # gradients that are asked for inside are ours
    if isinstance(module, nn.Cell):
        module._cells.pop("_recompute_cell", None)  # MindSpore's own, chosen before: a cell inside the cell
        module._recompute_cell = Recompute(module.construct, keeps, context_fn)
        return module
    run = Recompute(module, keeps, context_fn)
    return functools.wraps(module)(lambda *args, **kwargs: run(*args, **kwargs))


def checkpoint_exclude_wrapper(module: nn.Cell | Callable):
    """Lets a cell or a function run once only, where a cell around it runs again in the backward: what it made is kept.

    Args:
        module: a cell, which is told and returned; or a function, of which a new one is returned.

    Example:
        >>> from mindspore import nn
        >>> from ms_dtensor.compat.hyper_parallel import checkpoint_exclude_wrapper, checkpoint_wrapper
        >>> net = nn.SequentialCell(nn.Dense(4, 4), checkpoint_exclude_wrapper(nn.Dense(4, 4)))
        >>> checkpoint_wrapper(net) is net
        True
    """
    if not isinstance(module, nn.Cell):
        return excluded(module)
    around_construct(module, excluded)
    return module


def _keeps(policy_fn: Callable, op: str, arguments: tuple) -> bool:
    said = policy_fn(None, op, *arguments)
    if said is CheckpointPolicy.MUST_SWAP:
        raise _no_swap(f"{op}: MUST_SWAP")
    return said in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _no_swap(asked: str) -> ConfigError:
    return ConfigError("For 'checkpoint_wrapper', activations are not moved to the host.", asked,
                       "What is not kept is computed again.", ("MUST_SAVE, for what is dear to compute",
                                                              "MUST_RECOMPUTE, for what is large"))
