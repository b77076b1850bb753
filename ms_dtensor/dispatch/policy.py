# SPDX-License-Identifier: Apache-2.0
"""The redistribution policy: the one door of every communication that nobody wrote into the program.

Whoever is about to move data by itself asks here first and names itself: under "explicit" it is refused, under "warn" the
call in the user's program is told once, inside `loss_parallel()` nothing gathers logits. An op asks for all its operands
before it moves the first (`check_op`); `redistribute(..., implicit=...)` asks again, so that no path can forget to. Moves
that the user wrote, and their gradients, never come here.
"""
from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from ..comm.record import user_frame
from ..comm.world import get_backend
from ..core.layout import Layout
from ..core.placements import REPLICATE
from ..errors import ImplicitCommError
from ..ops.rules.select import gathers
from ..redistribute.plan import plan
from .modes import Mode, mode

# a world's backend -> {(file, line, place in the bytecode, ...)}: one call warns once, another world is told anew
_warned: WeakKeyDictionary = WeakKeyDictionary()
_lock = threading.Lock()


def check(who: str, attempt: str, operands: str, fixes: Sequence[str], why: str = "") -> None:
    """Refuses, warns of, or lets pass a communication of `who` that is not written in the program.

    Args:
        who: an op, or what else communicates.
        attempt: what it is about to do; follows "For 'who', ".
        operands: on what.
        fixes: what to write instead.
        why: why it communicates, where that is not plain.

    Raises:
        ImplicitCommError: the policy is "explicit".
    """
    policy = mode.get().policy
    if policy == "auto":
        return
    error = ImplicitCommError(f"For '{who}', {attempt}.", operands,
                              f"The redistribution policy is '{policy}'." + (f" {why}" if why else ""), fixes)
    if policy == "explicit":
        raise error
    frame = user_frame()
    site = ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, frame.f_code)
    module = None if frame is None else frame.f_globals.get("__name__")
    with _lock:
        told = _warned.setdefault(get_backend(), set())
        if site in told:
            return
        told.add(site)
    try:
        warnings.warn_explicit(str(error), UserWarning, *site[:2], module)
    except BaseException:  # warnings are errors: nothing has moved, so the next call is told too
        told.discard(site)
        raise


def check_move(who: str, src: Layout, dst: Layout, what: str = "an operand", fixes: Sequence[str] = (),
               now: Mode | None = None, back: Layout | None = None) -> None:
    """`check` of a move from one layout to another, if it or its gradient communicates: a replica is cut for nothing.

    Args:
        who: the op.
        src: layout before.
        dst: layout after.
        what: what is moved.
        fixes: what to write instead; default the `redistribute` that does the same.
        now: the mode in force, if known.
        back: the layout to which the gradient has to be brought back; None where there is none.
    """
    now = now or mode.get()
    if now.no_gather:
        _check_gather(who, src, dst)
    if now.policy != "auto":
        kinds = _kinds(src, dst)
        back_kinds = [] if kinds or back is None or back.partial_axes else _kinds(dst.gradient(), back)
        if kinds or back_kinds:
            check(who, f"{what} has to be moved first: {', '.join(kinds)}" if kinds else
                  f"{what} is cut for nothing, but its gradient has to be moved: {', '.join(back_kinds)}",
                  f"{src.describe()} -> {dst}", fixes or (f"insert .redistribute(placements={list(dst.placements)})",))


def _kinds(src: Layout, dst: Layout) -> list[str]:
    return [m.kind for m in plan(src, dst) if m.kind not in ("cut", "reorder")]


def check_op(who: str, tensors: Sequence, targets: Iterable[Layout | None], reduced: Sequence[int], now: Mode) -> None:
    """Asks for all that an op is about to move: its operands, and results that autograd lets no axis keep partial.

    Args:
        who: the op.
        tensors: its operands, as they lie.
        targets: the layout each is moved to; None for one that stays.
        reduced: axes on which its result is reduced at once.
        now: the mode in force.
    """
    if now.policy == "auto" and not now.no_gather:
        return
    for x, target in zip(tensors, targets):
        layout = getattr(x, "_layout", None)
        if target is not None and layout is not None:
            check_move(who, layout, target, now=now)
    layouts = [x._layout for x in tensors if getattr(x, "_layout", None) is not None]
    mesh = layouts[0].mesh
    reduced = [a for a in reduced if mesh.shape[a] > 1]
    if reduced:
        whole = {x.placements: [REPLICATE if a in reduced else p for a, p in enumerate(x.placements)] for x in layouts}
        check(who, f"the result has to be reduced over {', '.join(mesh.mesh_dim_names[a] for a in reduced)}",
              "\n".join(x.describe() for x in layouts),
              (*(f"insert .redistribute(placements={new}) before" for old, new in whole.items() if list(old) != new),
               'with redistribution_policy("auto"): around this op alone, whose result is less to move'),
              "Under autograd only sums may stay partial.")


def _check_gather(who: str, src: Layout, dst: Layout) -> None:
    """Inside `loss_parallel()`: refuses to make whole a sharded dim of logits, which is any but the first of a float."""
    if any(set(have) - set(want) and gathers(src, d) for d, (have, want) in enumerate(zip(src.dim_axes, dst.dim_axes))):
        raise ImplicitCommError(
            f"For '{who}', an operand would be gathered inside loss_parallel().", f"{src.describe()} -> {dst}",
            "Inside that block logits stay sharded.",
            ("use a cross entropy, and lay the labels out like the logits' rows",
             f".redistribute(placements={list(dst.placements)}), if the whole is meant"))
