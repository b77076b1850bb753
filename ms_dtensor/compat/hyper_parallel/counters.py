# SPDX-License-Identifier: Apache-2.0
"""Counters of cells that compute on local tensors: a parameter without a gradient, to which each rank adds its own.

MindFormers' expert layers count their tokens so, in a DTensor that says Replicate, and add the counts up over ranks
themselves before they read them. While hyper_parallel's package is registered this is taken as it is meant there; elsewhere
a plain operand beside a DTensor is refused, since one rank's data could pass for the whole.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor

from ...dispatch.modes import implicit_replication
from ...tensor.dtensor import DTensor

_NAME = "add_"
_add: Callable = Tensor.add_


def _add_own(self: Any, other: Any, *args, **kwargs):
    """`add_`; of a plain tensor to such a parameter: on each rank to what this rank holds."""
    if (isinstance(self, Parameter) and not self.requires_grad and isinstance(other, Tensor)
            and not isinstance(other, DTensor) and all(p.is_replicate() for p in self.placements)):
        with implicit_replication():
            return _add(self, other, *args, **kwargs)
    return _add(self, other, *args, **kwargs)


def counters_are_each_ranks_own(on: bool) -> None:
    """Lets a plain tensor be added to a replicated parameter that has no gradient, or refuses it again."""
    if on:
        setattr(DTensor, _NAME, _add_own)
    elif _NAME in DTensor.__dict__:
        delattr(DTensor, _NAME)
