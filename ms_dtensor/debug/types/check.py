# SPDX-License-Identifier: Apache-2.0
"""One checked run of a local function: inputs get types by their layouts, and results must be what they are said to be.

Called by `local_map` and `DFunction`, once for a function and layouts. Axes of one rank are passed over: any program is
right there. Invariant: the results are those of the unchecked run, plain and still connected.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from mindspore import Tensor

from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...errors import OpRuleError
from ...ops.rules import spmd
from .account import Account
from .doors import watched
from .typed import Typed, plain


def checked_run(who: str, fn: Callable, tensors: Sequence[Tensor], layouts: Sequence[Layout | None],
                cotangents: Sequence[Layout | None], outs: tuple[Sequence, bool], results_on: DeviceMesh, mesh: DeviceMesh):
    """`fn(tensors)`, followed by types.

    Args:
        who: what messages call it.
        fn: takes the list of local tensors.
        tensors: these.
        layouts: how they lie; None for a plain one.
        cotangents: how their cotangents are to lie.
        outs: what is said of each result, None for a plain one; whether there is one result, and no tuple.
        results_on: the mesh of the results.
        mesh: that of the inputs.

    Raises:
        OpRuleError: an op does not fit its operands' types, or a result is not what it is said to be.
    """
    entries, single = outs
    now = Account(who, mesh, tuple(a for a, n in enumerate(mesh.shape) if n > 1))
    with watched(now):
        given = [x if t is None or c is None else Typed(x, now.of_input(f"argument {i}", t, c))
                 for i, (x, t, c) in enumerate(zip(tensors, layouts, cotangents))]
        result = fn(given)
        several = (result,) if single else result
        if results_on == mesh and isinstance(several, tuple | list) and len(several) == len(entries):
            for i, (r, entry) in enumerate(zip(several, entries)):
                if entry is not None and isinstance(r, Tensor):
                    _fits(now, i, r, entry)
    return plain(result)


def _fits(now: Account, number: int, r: Tensor, entry) -> None:
    placements = Layout(now.mesh, entry, (prod(now.mesh.shape),) * max(len(r._shape), 1)).placements
    types = r._types if isinstance(r, Typed) else now.outsider(bool(r._requires_grad))
    for k, (a, axis) in enumerate(zip(now.axes, now.names)):
        wrong = spmd.misfit(types.kinds[k], types.graded, placements[a])
        if wrong is not None:
            why, ways = wrong
            word, alike = spmd.WORDS[types.kinds[k].letter], ", which is invariant" * placements[a].is_replicate()
            raise OpRuleError(
                f"For '{now.who}', result {number} is said to be {placements[a]!r} over '{axis}'{alike}, and is {word}.",
                f"result {number}: {types.origins[k]}", why, [w.format(x="x", axis=axis) for w in ways])
