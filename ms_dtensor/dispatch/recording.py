# SPDX-License-Identifier: Apache-2.0
"""A recording: a forward whose backward may come at any time, before or after those of other forwards.

`ms.grad` and `ms.vjp` hold one forward at a time (MindSpore 2.10: "Can not find top cell for backward"), so a pipeline,
which has several micro-batches in flight, cannot stand on them. Below them lies an engine that knows no such limit,
`run_backward`. It is called here with the duties of the one door of MindSpore's gradients (`patches/gradients.py`): layouts
of what comes back, who is asked for, what is owed, and that nothing is left behind where something raises. Not here:
derivatives of derivatives; a gradient that is taken inside a recording is refused, as MindSpore would cut it off.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor

from ..comm.packing import added
from ..comm.pretended import executing
from ..core.tree import leaves, map_leaves
from ..errors import OpRuleError
from ..internals.names import NoFallbackGuard, enabled, executor, run_backward
from ..internals.probes import check_recordings
from ..ops.local.dtypes import full
from . import patches
from .cotangent import summed_gradient
from .held import Holding, holding
from .memo import written_apart
from .operands import leaf_of, local_alias, recording, retag, wrap
from .patches.gradients import apart, as_cotangents, deliver, end_abandoned, layouts_of


class Recording:
    """One forward and its backward, which runs once.

    Attributes:
        inputs: what the forward ran on: of tensors of floating point leaves of its own, with the values given.
        outputs: what it returned; its tensors are those that the backward begins at.
        written: names of parameters that the forward has written.
    """

    def __init__(self, inputs: tuple, outputs: Any, participants: list, written: list[str]):
        self.inputs, self.outputs, self._participants, self.written = inputs, outputs, participants, written

    @classmethod
    def of(cls, fn: Callable, *inputs) -> Recording:
        """Runs a function, recorded.

        Args:
            fn: a function or cell.
            *inputs: of which tensors are detached; no gradient flows to where they came from.

        Raises:
            OpRuleError: inside a gradient or another recording, or where nothing is recorded.
            ConfigError: this MindSpore has no such engine.
        """
        check_recordings()
        patches.install_for_recordings()
        end_abandoned()
        if recording() or not enabled():
            raise OpRuleError("For 'Recording.of', a forward cannot be recorded here.", str(fn),
                              "It is recorded by itself: not within a gradient, and not under no_grad.",
                              "call it outside of value_and_grad, grad and no_grad")
        with NoFallbackGuard():
            inputs = map_leaves(lambda x: leaf_of(x, True) if x.is_floating_point() else x, inputs, Tensor)
        if (dry := executing()) is not None:
            dry.forward_begins()
        written: list[str] = []
        token = written_apart.set(written)
        with apart() as participants:
            executor.set_grad_flag(True)
            try:
                outputs = fn(*inputs)
            finally:
                executor.set_grad_flag(False)
                written_apart.reset(token)
        return cls(inputs, outputs, participants, written)

    def backward(self, cotangents: Any = None, params: Sequence[Parameter] = ()) -> tuple[list, list]:
        """Gradients of the inputs that are tensors of floating point, and of parameters; zeros where none arrives.

        Args:
            cotangents: of the outputs, in the same structure: DTensors of any layout for DTensors; None for 1 each, of
                numbers as a loss is one.
            params: whose gradients are wanted; of others none is computed.

        Raises:
            OpRuleError: it has run, or was dropped.
            MixedOperandError: a plain cotangent for a DTensor.
        """
        roots, inputs = self._taken(cotangents)
        of = [*inputs, *params]
        with apart(self._participants, of):
            grads = handed_out(of, self._gradients(roots, of))
        return grads[:len(inputs)], grads[len(inputs):]

    def _taken(self, cotangents: Any) -> tuple[list, list]:
        """Where a backward begins, (tensor, cotangent), and inputs that have a gradient; the recording lets go of them."""
        if self.outputs is None:
            raise OpRuleError("For 'Recording.backward', there is nothing left of the forward.", "",
                              "What was recorded goes with its backward, or by drop().", "Recording.of(...) once more")
        given = leaves(self.outputs, Tensor)
        layouts = layouts_of(given)
        if cotangents is None:
            cotangents = [full(local_alias(y)._shape, 1, y.dtype) for y in given]
            cotangents = [g if at is None else retag(g, at.gradient()) for g, at in zip(cotangents, layouts)]
        sens = leaves((as_cotangents(layouts, cotangents),), Tensor)
        roots = [(y, g) for y, g in zip(given, sens, strict=True) if y._requires_grad and y.is_floating_point()]
        of = [x for x in leaves(self.inputs, Tensor) if x._requires_grad and x.is_floating_point()]
        self.outputs, self.inputs = None, ()
        return roots, of

    @staticmethod
    def _gradients(roots: list, of: list, keep: bool = False) -> list:
        """Of each its gradient, None where none arrives; `keep`: what is run may be run again."""
        if not roots or not of:
            return [None] * len(of)
        return list(run_backward(tuple(y for y, _ in roots), tuple(g for _, g in roots), keep, False, tuple(of), True,
                                 accumulate_grad=False))

    def drop(self) -> None:
        """No backward will come: what it would have needed goes."""
        self.outputs, self.inputs, self._participants = None, (), []


class HeldRecording(Recording):
    """A recording whose backward comes in two parts, `backward_inputs` and then `backward_weights`."""

    _store: Holding
    _early: list | None = None  # gradients of gates that came in the first part

    @classmethod
    def of(cls, fn: Callable, *inputs) -> HeldRecording:
        patches.install()  # by which plain parameters are met
        store = Holding()
        token = holding.set(store)
        try:
            made: Any = super().of(fn, *inputs)
        finally:
            holding.reset(token)
        store.weights = {}
        made._store = store
        return made

    def backward_inputs(self, cotangents: Any = None, params: Sequence[Parameter] = ()) -> list:
        """The gradients of the inputs; arguments as of `backward`. What is not held of the forward goes."""
        roots, of = self._taken(cotangents)
        store, gates = self._store, self._gates()
        asked = [store.anchor, *of, *gates, *params]
        with apart(self._participants, asked):
            found = self._gradients(roots, asked, store.shared)
        it = iter(found[1:])
        own, self._early, self._direct = ([next(it) for _ in some] for some in (of, gates, params))
        with NoFallbackGuard():
            # past gates: by a loss's own weights, say
            met = [i for i, g in enumerate(self._direct) if g is not None]
            for i, g in zip(met, deliver([params[i] for i in met], [self._direct[i] for i in met])):
                self._direct[i] = g
            return handed_out(of, own)

    def backward_weights(self, params: Sequence[Parameter] = ()) -> list:
        """The gradients of parameters, the same as in the first part; zeros where none arrives."""
        if self._early is None:
            raise OpRuleError("For 'HeldRecording.backward_weights', nothing is held.", "",
                              "It comes once, after backward_inputs, which leaves what it needs.", "backward_inputs first")
        store, gates = self._store, self._gates()
        early, self._early = self._early, None  # whatever raises below: products go
        with apart(self._participants, list(params)):
            store.products.reverse()
            roots: list = []
            while store.products:  # what one needed goes before the next is made
                roots.extend(store.products.pop()())
            late = self._gradients(roots, gates)
            sums = [_sum(a, b) for a, b in zip(early, late)]
            roots = [(source, g) for (_, source), g in zip(store.gates.values(), sums) if g is not None]
            found = [_sum(a, b) for a, b in zip(self._direct, self._gradients(roots, list(params)))]
            grads = handed_out(list(params), found)
            if (dry := executing()) is not None:
                for grad in grads:
                    dry.ledger.is_now(grad, "gradients")
        self.drop()
        return grads

    def backward(self, cotangents: Any = None, params: Sequence[Parameter] = ()) -> tuple[list, list]:
        return self.backward_inputs(cotangents, params), self.backward_weights(params)

    def _gates(self) -> list[Tensor]:
        return [gate for gate, _ in self._store.gates.values()]

    def drop(self) -> None:
        super().drop()
        self._store, self._early = Holding(), None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    with NoFallbackGuard():
        return added(a, b)


def handed_out(of: list, found: list) -> list:
    """Gradients as the caller gets them: zeros where none has arrived, completed where summands are owed, as DTensors."""
    grads = deliver(of, [ms.ops.zeros(x._shape, x.dtype) if g is None else g for x, g in zip(of, found, strict=True)])
    # aliases: an identity gives the cotangent itself
    return [g if at is None else wrap(g, summed_gradient(at)) for g, at in zip(grads, layouts_of(of))]
