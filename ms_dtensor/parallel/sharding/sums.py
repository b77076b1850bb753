# SPDX-License-Identifier: Apache-2.0
"""Whole gradients of a block's parameters on their way to shards, and where the shards will lie.

On a host a sum is there at once. On a device it is under way until the backward ends, and autograd has to be given
something before: a *blank*, zeros that are one number in memory. If a parameter's gradient is nothing but that and one sum,
its caller is handed the place in the sum's memory; so of each block one piece of memory holds all gradients, and no kernel
is spent on any one of them. Else the sum is added to what the caller has got. Invariant: what is handed out is not read
before the backward ends; whoever wants to see a gradient has a hook, which runs then (`reduce.py`).
"""
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor

from ...comm.packing import cast, copy, write
from ...comm.pretended import executing
from ...core.layout import in_dtype
from ...dispatch.operands import local_alias, wrap
from ...internals.names import NoFallbackGuard
from ...internals.target import on_cpu

if TYPE_CHECKING:
    from .block import Block
    from .reduce import Reduction


@functools.lru_cache(maxsize=64)
def _zero(dtype) -> Tensor:
    """The second of two, as no tensor that a kernel has made begins there."""
    return ms.mint.narrow(ms.ops.zeros((2,), dtype), 0, 1, 1)


def blank(shape: tuple[int, ...], dtype) -> Tensor:
    """Zeros that nobody writes into: one number in memory, and no kernel."""
    return _zero(dtype).expand(shape) if math.prod(shape) else ms.ops.zeros(shape, dtype)


def is_blank(x: Tensor) -> bool:
    """Whether a gradient to which a blank belongs is that alone: what autograd has added to it is a tensor of its own."""
    return executing() is not None or x.storage_offset() == 1 and \
        not any(step for n, step in zip(x._shape, Tensor.stride(x)) if n > 1)


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
        self.numbers = {id(block.params[i]): i for i in grads}  # of these parameters, by id
        self._memory: Tensor | None = None  # of which callers have been handed places
        self._handed = set[int]()

    def place(self, key: int) -> Tensor | None:
        """Where the gradient of the parameter of this id will lie, whose caller is handed it; None: it has no such place."""
        place = self._places.get(self.numbers[key])
        if place is not None:
            self._handed.add(key)
        return place

    @functools.cached_property
    def _places(self) -> dict[int, Tensor]:
        """Where gradients will lie, by number; none if sums are no gradients yet, go elsewhere, or are of several dtypes."""
        of, (dtype, *others) = self._of, [self._block.params[i].dtype for i in self._widths]
        if of.main or of.copies is not None and not of.sync_copies or any(other != dtype for other in others):
            return {}
        coming = self._work.pending_result
        if coming is not None and coming.dtype == dtype:
            self._memory = gradient(coming)
        else:
            self._memory = fresh((sum(self._widths.values()),), dtype, zero=False)
        return self._block.shards(self._widths, self._memory)

    def finish(self) -> dict[int, Tensor]:
        """Waits. Gives gradients by id of the parameter, but those that lie in places that were handed out."""
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
            for key, i in self.numbers.items():
                if key in of.past:
                    write(shards[i], of.past.pop(key) + shards[i])
            for axes, beside in of.beside(block, shards).items():
                group = block.params[beside[0]].device_mesh.get_group(axes)
                total = group.all_reduce(block.row({i: shards[i] for i in beside}, flat.dtype), "sum")
                for i, x in block.shards({i: block.widths[i] for i in beside}, total).items():
                    write(shards[i], x)
            if of.scale != 1:
                if on_cpu():
                    shards = {i: x * of.scale for i, x in shards.items()}
                elif executing() is None:
                    flat.mul_(of.scale)
            if of.main:
                for i, x in shards.items():
                    add_main(block.params[i], x)
                return {}
            if self._memory is not None and self._memory is not flat:
                write(self._memory, flat)
            return {key: gradient(cast(shards[i], block.params[i].dtype)) for key, i in self.numbers.items()
                    if key not in self._handed}


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
