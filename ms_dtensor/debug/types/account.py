# SPDX-License-Identifier: Apache-2.0
"""What one check of a local function knows: the axes, the types of its tensors and where they come from; and how it refuses.

A check is a run of the function on tensors that carry types (`typed.py`). Invariant: all it says depends on types, shapes
and static arguments, which are alike on all ranks, so all ranks refuse alike.
"""
from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mindspore import Tensor

from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...dispatch.views import storage_of
from ...errors import LayoutError, OpRuleError
from ...ops.rules import spmd
from ...ops.rules.spmd import Kind, Refused

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_NO_PLACE = tuple(_HERE + part for part in ("debug", "dispatch", "tensor", "ops", "comm", "core", "internals", "custom_ops"))


class Origin(NamedTuple):
    """Where a type on an axis comes from: an input, the op that made it so, and the one that made it no summand."""

    root: str
    op: str = ""
    lost: str = ""

    def __str__(self):
        made = f"{self.op} of {self.root}" if self.op else self.root
        return f"{made}; no summand since {self.lost}" if self.lost else made


class Types(NamedTuple):
    """A local tensor's types, one for each axis of several ranks; whether it has a gradient."""

    kinds: tuple[Kind, ...]
    graded: bool
    origins: tuple[Origin, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Account:
    """One check: whose it is, the mesh, and its axes of several ranks; whether the author wrote the gradient, too.

    `read`: names of axes over which Python has seen an array that varies. What numbers are made of it nobody knows, so from
    there on every op may have one of them among its arguments.
    `met`: the tensors whose types the check tells, so that a write finds those that share the storage.
    """

    who: str
    mesh: DeviceMesh
    axes: tuple[int, ...]
    own_gradient: bool = False
    read: set[str] = field(default_factory=set)
    met: list[weakref.ref] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return tuple(self.mesh.mesh_dim_names[a] for a in self.axes)

    def sharing(self, x: Tensor) -> list[Tensor]:
        """Living tensors that are in the storage of `x`, but for itself."""
        self.met[:] = [ref for ref in self.met if ref() is not None]
        if 0 in x._shape:
            return []
        mine = storage_of(x)
        return [t for ref in self.met if (t := ref()) is not None and t is not x and storage_of(t) == mine]

    def of_input(self, what: str, layout: Layout, cotangent: Layout) -> Types:
        """The types of an input that lies so, and whose cotangent is to lie so.

        Raises:
            LayoutError: these do not belong together.
        """
        kinds = []
        for a, name in zip(self.axes, self.names):
            have, back = layout.placements[a], cotangent.placements[a]
            kind = spmd.of_input(have, back)
            if kind is None:
                raise LayoutError(f"For '{self.who}', {what} is {have!r} on axis '{name}', and its gradient {back!r}.",
                                  layout.describe(), "A shard's gradient is a shard, a summand's is whole, and a "
                                  "replicated value's is whole or a sum.", "leave out 'in_grad_placements'")
            kinds.append(kind)
        graded = layout.dtype.startswith(("float", "bfloat", "complex"))
        return Types(tuple(kinds), graded, tuple(Origin(f"{what} ({layout.placements[a]!r})") for a in self.axes))

    def constant(self) -> Types:
        """The types of numbers of the program: the same on all ranks, but over axes where Python has read others."""
        kinds = tuple(spmd.V if name in self.read else spmd.R for name in self.names)
        return Types(kinds, False, (Origin("numbers of the program"),) * len(kinds))

    def outsider(self, graded: bool) -> Types:
        """The types of a plain tensor that the function did not get as a DTensor: each rank's own."""
        n = len(self.axes)
        return Types((spmd.V,) * n, graded, (Origin("a plain tensor that came from outside, or was made inside"),) * n)

    def results(self, op: str, call, operands: Sequence[Types], unless: Any = None) -> tuple[tuple[Kind, ...], ...]:
        """Per axis the types of an op's results; refuses.

        Args:
            op: how messages call it.
            call: as rules see it; None: no rule does.
            operands: their types.
            unless: signatures that say it in place of a rule.

        Raises:
            OpRuleError: it has none.
        """
        spec = None if call is None else spmd.spec_of(call)
        call = call or spmd.Call(op, {}, ())
        graded, out = [t.graded for t in operands], []
        for k, axis in enumerate(self.names):
            kinds = [t.kinds[k] for t in operands]
            try:
                said = None if unless is None else spmd.by_signature(unless, kinds, graded)
                if unless is not None and said is None:
                    raise Refused(0, f"Its types are {_told(unless)}; it was given {', '.join(x.letter for x in kinds)}.",
                                  "convert an operand, or add what it does there to its `types`")
                said = spmd.results(call, spec, kinds, graded) if said is None else said
                out.append(spmd.beside_numbers(kinds, graded, said) if axis in self.read else said)
            except Refused as refused:
                raise self.refusal(op, k, axis, refused, operands) from None
        return tuple(out)

    def refusal(self, op: str, k: int, axis: str, refused: Refused, operands: Sequence[Types]) -> OpRuleError:
        """The error of an op that an operand does not fit on axis number `k`."""
        on = [f"operand {i}: {spmd.WORDS[t.kinds[k].letter]} over '{axis}', {t.origins[k]}" for i, t in enumerate(operands)]
        fault = operands[refused.operand].kinds[k].letter
        return OpRuleError(f"For '{self.who}', {op} at {site()} takes what is {spmd.WORDS[fault]} over '{axis}' "
                           f"(operand {refused.operand}).", "\n".join(on), refused.why,
                           [way.format(x="x", axis=axis) for way in refused.ways])

    def made(self, op: str, kinds: Sequence[Kind], operands: Sequence[Types]) -> tuple[Origin, ...]:
        """Where a result's types come from."""
        at, out = f"'{op}' at {site()}", []
        for k, kind in enumerate(kinds):
            alike = [t for t in operands if t.kinds[k].letter == kind.letter] or list(operands)
            root, lost = (alike[0].origins[k].root, alike[0].origins[k].lost) if alike else ("no tensor", "")
            summand = any(t.kinds[k].reads is not None and t.kinds[k].reads.is_partial() for t in operands)  # type: ignore
            if summand and kind.letter == "V" and (kind.reads is None or not kind.reads.is_partial()):
                lost = at
            out.append(Origin(root, at, lost))
        return tuple(out)


def _told(signatures) -> str:
    return " or ".join(f"{', '.join(ins)} -> {', '.join(outs)}" for ins, outs in signatures)


account: ContextVar[Account | None] = ContextVar("ms_dtensor_types", default=None)


def site() -> str:
    """ "file:line" of the op: the innermost frame that is neither MindSpore's nor how it reached us."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = os.path.abspath(frame.f_code.co_filename)
        if not (name.startswith(_NO_PLACE) or f"{os.sep}mindspore{os.sep}" in name or "<frozen" in name
                or name.endswith((f"{os.sep}contextlib.py", f"{os.sep}functools.py"))):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
