# SPDX-License-Identifier: Apache-2.0
"""The autograd node of any recorded op in a dry run: what it keeps, and the event and the gradients of its backward.

A held product's backward comes in two parts (`dispatch/held.py`): each has the gradients of its operands, and is an event.
Not here: the forward's event, which an op has that is not recorded, too.
"""
from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor

from ...dispatch.held import holding
from ...dispatch.operands import local_alias
from ...errors import OpRuleError
from ...internals.names import Function
from .abstract import differentiable, nbytes, on_storage_of
from .formulas import backward_flops, kept, passes, stays, within

if TYPE_CHECKING:
    from .executor import Executor

SEVERAL = frozenset(("split", "chunk", "unstack", "unbind", "tensor_split", "meshgrid", "split_with_size",
                     "grouped_matmul"))  # a tuple, also of one result


class Op(Function):
    """Any op: its results and its gradients have shapes, and no data."""

    @staticmethod
    def forward(ctx, job: Job, *xs):
        ctx.job = job
        ctx.set_materialize_grads(False)
        outs, saved = job.results()
        ctx.save_for_backward(*saved)  # recomputation replaces what is saved, as of any op
        return outs[0] if job.single else outs

    @staticmethod
    def backward(ctx, *grads):
        job = ctx.job
        if not job.parts:
            raise OpRuleError("For 'dry_run', a backward runs a second time.", "",
                              "What a forward keeps goes with its backward.", "one backward of each forward")
        return None, *job.gradients(grads, ctx.saved_tensors, job.parts.pop(0))


class Job:
    """One recorded op."""

    def __init__(self, executor: Executor, what, xs, event: int, shapes, dtypes, single: bool, cost: int, scratch=None):
        self.executor, self.what, self.single = executor, what, single
        self.event, self.shapes, self.dtypes, self.cost = event, shapes, dtypes, cost
        self.operands = [(tuple(x._shape), x.dtype, x._requires_grad and differentiable(x)) for x in xs]
        self.site = executor.events[event].site
        asked = [i for i, (_, _, wanted) in enumerate(self.operands) if wanted]
        self.parts = _parts(xs, asked)
        self.kept, results = kept(what.op, [wanted for _, _, wanted in self.operands], executor.on_host)
        self.where = executor.where(what.op, scratch)
        self.read = executor.read(what, xs, executor.events[event].phase, self.where)
        self.saved: list = [local_alias(self.read[i]) for i in self.kept] if asked else []
        self.kept_results = results if asked else slice(0)
        self.within = within(what.op, executor.on_host) if asked else (0, 0, 0)
        self.scratch = scratch if asked else None  # of a node of ours, as `Executor.node` has it

    def results(self) -> tuple[tuple, list]:
        """The results, and what the backward needs."""
        outs = self.executor.made(self.what, self.read[0], self.shapes, self.dtypes, self.event, self.where)
        _until_it_ends, (saved, self.saved) = self.read, (self.saved, [])
        self.read = []
        own = [self._like_first() for _ in range(self.within[1])]
        own += self._arrays(0, self.event)
        _for_itself = [self._like_first() for _ in range(self.within[0])] + self._arrays(1, self.event)  # until this ends
        return outs, [*saved, *own, *(on_storage_of(x, x._shape) for x in outs[self.kept_results])]

    def _arrays(self, which: int, event: int) -> list[Tensor]:
        return self.executor.arrays(self.scratch[which], self.dtypes[0], event) if self.scratch else []

    def _like_first(self) -> Tensor:
        shape, dtype, _ = self.operands[0]
        if not self.executor.on_host and nbytes(dtype) == 2:
            dtype = ms.float32  # as `wider` makes them
        return self.executor.ledger.new(shape, dtype, "activations", self.event)

    def gradients(self, grads, saved, part: list[int]) -> list:
        """Those of the operands of this part of the backward; its event."""
        executor = self.executor
        came = [g for g in grads if g is not None]
        given = came[0] if came else None
        if len(part) < sum(wanted for _, _, wanted in self.operands):  # a product: what the other gradient is made of
            saved = [x for i, x in zip(self.kept, saved) if i not in part]
        view = self.what.view and self.what.op not in SEVERAL  # a sum of what came of each
        read = 0 if view else sum(prod(x._shape) * x.itemsize for x in (*saved, *came))
        written = 0 if view else sum(
            prod(self.operands[i][0]) * nbytes(self.operands[i][1]) for i in part)
        cost = backward_flops(self.what.op, self.cost, len(part))
        at = executor.note(self.what.op, "backward", self.site, cost, read, written, came, self.dtypes[0])
        shape = self.operands[0][0]
        if executor.on_host and (own := stays(self.what.op, prod(shape))):
            executor.ledger.kernels[self.what.op, shape] = own
        out: list = []
        for i, (shape, dtype, _) in enumerate(self.operands):
            if i not in part:
                out.append(None)
            elif passes(self.what.op, i) and given is not None and (shape, dtype) == (tuple(given._shape), given.dtype):
                out.append(local_alias(given))
            elif given is not None and given.dtype == dtype and (
                    view and prod(shape) == prod(given._shape) or self.what.op == "cat"):  # of which it is a piece
                out.append(executor.view(self.what.op, given, shape))
            else:
                _until_it_is_there = [] if self.what.view else executor.copies(came, "backward")  # each has a kernel
                out.append(executor.as_made(self.what.op, executor.ledger.new(shape, dtype, "activations", at, self.where)))
                del _until_it_is_there
        _for_itself = [self._like_first() for _ in range(self.within[2])] + self._arrays(2, at)  # until the end of this
        return out


def _parts(xs, asked: list[int]) -> list[list[int]]:
    """Of which operands each part of an op's backward gives gradients: a held product's in two, those of weights later."""
    store = holding.get()
    if store is None:
        return [asked]
    if store.cut:
        parts = [i for i in asked if id(xs[i]) in store.cut], [i for i in asked if id(xs[i]) not in store.cut]
        return [part for part in parts if part]
    return [asked] * (1 + all(id(x) in store.weights for x in xs))  # what is made of weights alone may be used in both
