# SPDX-License-Identifier: Apache-2.0
"""Whole gradients of a block's parameters on their way to shards; and what autograd is given before they are there.

A sum is under way until the backward ends. So autograd is given a *blank*, zeros that are one number in memory, and in its
place the caller gets its part of the memory of the sum (`reduce.py`): of each block one piece of memory holds all gradients,
and no kernel is spent on any one of them. Invariant: what is handed out is not read before the backward ends; whoever wants
to see a gradient has a hook, which runs then.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor

from ...comm.packing import cast, copy, write
from ...comm.pretended import executing
from ...core.layout import in_dtype
from ...dispatch.operands import local_alias, wrap
from ...internals.names import NoFallbackGuard, TensorPy

if TYPE_CHECKING:
    from .block import Block
    from .reduce import Reduction


@functools.lru_cache(maxsize=64)
def _zero(dtype) -> Tensor:
    """The second of two, as no tensor that a kernel has made begins there."""
    return ms.mint.narrow(ms.ops.zeros((2,), dtype), 0, 1, 1)


def blank(shape: tuple[int, ...], dtype) -> Tensor:
    """Zeros that nobody writes into: one number in memory, and no kernel."""
    return _zero(dtype).expand(shape) if shape and all(shape) else ms.ops.zeros(shape, dtype)


@functools.lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> list[int]:
    return TensorPy.stride(_zero(ms.float32).expand(shape))


def is_blank(x: Tensor) -> bool:
    """Whether a gradient to which a blank belongs is that alone: what autograd has added to it is a tensor of its own."""
    return executing() is not None or TensorPy.storage_offset(x) == 1 and TensorPy.stride(x) == _strides(x._shape)


class Sums:
    """Of whole gradients of a block, under way: made, they begin to be added up.

    Args:
        of: whose gradients they are.
        block: the block.
        grads: whole gradients, by number of the parameter.
        when: at which point of the program, which ranks compare.
    """

    def __init__(self, of: Reduction, block: Block, grads: dict[int, Tensor], when: str):
        of.unit.log("reduce", "backward")
        self._of, self._block = of, block
        self._work, self._widths = block.reduce(grads, when)  # whole gradients may go before the backward ends
        if not of.main and self._work.pending_result is not None:
            gradient(self._work.pending_result)
        self.numbers = {id(block.params[i]): i for i in grads}  # of these parameters, by id

    def finish(self, scale: float) -> dict[int, Tensor]:
        """Waits. Gives sums, times a number, by id of the parameter; none that are not over all ranks yet."""
        of, block = self._of, self._block
        with NoFallbackGuard(), block.note("backward", "sharded gradients"):
            flat = self._work.wait()
            shards = block.shards(self._widths, flat)
            for key, i in self.numbers.items():
                if key in of.owed_shards:
                    write(shards[i], of.owed_shards.pop(key) + shards[i])
            if of.copies is not None:
                if not of.sync_copies:
                    of.owed_shards.update({key: shards[i] * 1 for key, i in self.numbers.items()})
                    return {}
                of.copies.all_reduce_(flat, "sum").wait()
            for axes, beside in of.beside(block, shards).items():
                group = block.params[beside[0]].device_mesh.get_group(axes)
                total = group.all_reduce(block.row({i: shards[i] for i in beside}, flat.dtype), "sum")
                for i, x in block.shards({i: block.widths[i] for i in beside}, total).items():
                    write(shards[i], x)
            total, dtype = flat if scale == 1 else flat * scale, block.params[next(iter(shards))].dtype
            if flat.dtype != dtype and not of.main and all(block.params[i].dtype == dtype for i in shards):
                total = cast(total, dtype)  # one kernel for all of them
            if not of.main:
                gradient(total)
            shards = shards if total is flat else block.shards(self._widths, total)
            return {key: shards[i] for key, i in self.numbers.items()}


def add_main(param, total: Tensor) -> None:
    """A sum over ranks is added to what a parameter has in `main_grad`, in float32."""
    total, have = total.astype(ms.float32), getattr(param, "main_grad", None)
    total = copy(total) if have is None else local_alias(have) + total
    param.main_grad = wrap(total, in_dtype(param.layout.gradient(), "float32"))


def fresh(shape: tuple[int, ...], dtype, zero: bool = True) -> Tensor:
    """A gradient that is zero, or that is to be written."""
    dry, make = executing(), ms.ops.zeros if zero else ms.mint.empty
    return make(shape, dtype=dtype) if dry is None else dry.ledger.new(shape, dtype, "gradients")


def gradient(x: Tensor) -> Tensor:
    """The same; a dry run counts it among the gradients."""
    dry = executing()
    return x if dry is None else dry.ledger.is_now(x, "gradients")
