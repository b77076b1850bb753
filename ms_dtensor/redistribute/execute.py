# SPDX-License-Identifier: Apache-2.0
"""Runs plans on local tensors, and makes them differentiable: the backward of a move is the plan of its cotangent.

`run` is the plain interpreter; `Redistribute` is one autograd node that runs a plan forward and, backward, the plan from the
cotangent's layout to the layout the source's producer expects. Invariant: a forward that already has its data passes
it in, so asking for a value with another cotangent never communicates twice.
"""
from __future__ import annotations

import contextvars
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .. import comm
from ..comm.packing import cast
from ..comm.packing import copy as fresh_copy
from ..comm.pretended import executing
from ..comm.record import active
from ..core.layout import Layout
from ..core.placements import PARTIAL, REPLICATE, FusedShard
from ..errors import RedistributeError
from ..internals.names import Function, NoFallbackGuard, recording
from ..internals.target import on_cpu
from .boxes import relative, sizes_along, transfers
from .plan import Move, plan


def run(moves: tuple[Move, ...], x, works: list | None = None):
    """Executes moves on the local tensor `x` of the first move's source layout; returns the last one's local.

    With `works`, the last collective may still be under way: then its `Work` is put there, and what is returned may not
    be read before its `wait`.
    """
    # a rank outside the mesh takes no part, and holds nothing before and after; in an exchange it may receive
    moves = tuple(m for m in moves if m.kind == "exchange" or _here(m.src) is not None)
    with NoFallbackGuard():
        for move in moves[:-1] if works is not None else moves:
            x = _EXECUTORS[move.kind](move, x)
        if works is None or not moves:
            return x
        last = moves[-1]
        if last.kind in ("cut", "reorder", "exchange"):
            return _EXECUTORS[last.kind](last, x)
        work = _EXECUTORS[last.kind](last, x, async_op=True)
        if work.pending_result is None:
            return work.wait()
        works.append(work)
        return work.pending_result


def _group(move: Move):
    return move.src.mesh.get_group(move.axes)


def _here(layout: Layout):
    return layout.mesh.get_coordinate()


def _all_gather(move: Move, x, **how):
    d = move.src_dim
    return _group(move).all_gather(x, d, sizes_along(move.src, move.axes, d, _here(move.src)), **how)


def _all_reduce(move: Move, x, **how):
    return _group(move).all_reduce(x, move.reduce_op, **how)


def _reduce_scatter(move: Move, x, **how):
    d = move.dst_dim
    return _group(move).reduce_scatter(x, move.reduce_op, d, sizes_along(move.dst, move.axes, d, _here(move.src)), **how)


def _all_to_all(move: Move, x, **how):
    here, a, b = _here(move.src), move.src_dim, move.dst_dim
    return _group(move).all_to_all(x, b, sizes_along(move.dst, move.axes, b, here),
                                   a, sizes_along(move.src, move.axes, a, here), **how)


def _cut(move: Move, x):
    return slice_local(x, relative(move.dst.local_box(), move.src.local_box()), copy=True)


def _reorder(move: Move, x):
    back = bool(move.src.fused)
    p, = (p for axes, p in (move.src if back else move.dst).fused if axes == move.axes)
    return in_order(x, p, move.ranks, back)


def _exchange(move: Move, x):
    src, dst = move.src, move.dst
    me = src.mesh.get_rank()
    sends, wanted, keeps = transfers(src, dst, me)
    held, need = src.local_box(), dst.local_box()
    ranks = tuple(sorted({*src.mesh.rank_list, *dst.mesh.rank_list}))
    names = src.mesh.mesh_dim_names if src.mesh == dst.mesh else (*src.mesh.mesh_dim_names, "->", *dst.mesh.mesh_dim_names)
    got = [] if me not in ranks else comm.group(ranks, names).exchange(
        [(to, slice_local(x, relative(box, held))) for to, box in sends],
        [(frm, tuple(hi - lo for lo, hi in box), x.dtype) for frm, box in wanted])
    out = _zeros(tuple(hi - lo for lo, hi in need), x)
    if me in dst.mesh.rank_list:
        mine = [] if keeps is None else [(keeps, slice_local(x, relative(keeps, held)))]
        for box, piece in [*mine, *((box, t) for (_, box), t in zip(wanted, got))]:
            _place(out, relative(box, need), piece)
    return out


def in_order(x, p, ranks: int, back: bool = False):
    """A tensor whose dim is whole, its rows as the ranks hold them by this `FusedShard`; or `back` from there."""
    dry = executing()
    if dry is not None:
        return dry.like(x)
    rows = np.concatenate([np.arange(lo, hi) for held in p.pieces(ranks) for lo, hi in held])
    rows = np.argsort(rows) if back else rows
    if on_cpu():
        return Tensor.from_numpy(np.ascontiguousarray(np.take(x.asnumpy(), rows, p.dim)))
    if any(n % ranks for n in p.parts):
        return ms.mint.index_select(x, p.dim, Tensor(rows, ms.int64))
    d, shape = p.dim, x._shape  # where all ranks have as much of each part, views do, and no index goes to the device
    before, after, each = shape[:d], shape[d + 1:], [n // ranks for n in p.parts]
    ends = [*itertools.accumulate(each, initial=0)]
    if back:
        by_rank = x.reshape(*before, ranks, ends[-1], *after)
        parts = [ms.mint.narrow(by_rank, d + 1, at, n).reshape(*before, n * ranks, *after) for at, n in zip(ends, each)]
        return ms.mint.cat(parts, d)
    parts = [ms.mint.narrow(x, d, at * ranks, n * ranks).reshape(*before, ranks, n, *after) for at, n in zip(ends, each)]
    return ms.mint.cat(parts, d + 1).reshape(shape)


def cut_whole(x, layout: Layout):
    """This rank's shard of a plain tensor that is all of it."""
    return cut_further(x, layout.replicated(), layout, False)


def cut_further(x, src: Layout, dst: Layout, copy: bool = True):
    """This rank's shard of `dst`, from that of `src`, of which it is a part. The axes of `src` are outermost."""
    here, slices = dst.mesh.get_coordinate() or (), list(relative(dst.local_box(), src.local_box()))
    for axes, p in dst.fused if here else ():
        sizes = [dst.mesh.shape[a] for a in axes]
        ranks, rows = math.prod(sizes), x._shape[p.dim]
        sharing = ranks * rows // (sum(p.parts) or 1)  # so many of them have a part of what this one has
        if sharing > 1:
            parts = FusedShard(p.dim, tuple(n * sharing // ranks for n in p.parts))
            index = int(np.ravel_multi_index([here[a] for a in axes], sizes)) % sharing
            x = _runs(x, p.dim, parts.pieces(sharing)[index])
            slices[p.dim], copy = slice(0, x._shape[p.dim]), False
    return slice_local(x, tuple(slices), copy)


def _runs(x, dim: int, runs):
    """Of a dim what lies in these runs, (start, stop) each, one behind another; a copy."""
    dry, shape = executing(), x._shape
    if dry is not None:
        return dry.like(x, (*shape[:dim], sum(hi - lo for lo, hi in runs), *shape[dim + 1:]))
    if on_cpu():
        return Tensor.from_numpy(np.concatenate([x.asnumpy()[(slice(None),) * dim + (slice(*run),)] for run in runs], dim))
    return ms.mint.cat([ms.mint.narrow(x, dim, lo, hi - lo) for lo, hi in runs], dim)


def _zeros(shape: tuple[int, ...], x):
    """Of the dtype of `x`."""
    dry = executing()
    return ms.ops.zeros(shape, x.dtype) if dry is None else dry.like(x, shape)


def in_row_order(x):
    """A tensor whose elements lie in order, as who sends it needs."""
    return x.contiguous() if executing() is None else x


def _place(out, slices, piece) -> None:
    if executing() is not None:
        return
    if on_cpu():  # MindSpore's setitem has no kernel for every dtype there; its arrays are views
        out.asnumpy()[slices] = piece.asnumpy()
    else:
        out[slices] = piece


_EXECUTORS: dict[str, Callable] = {"all_gather": _all_gather, "all_reduce": _all_reduce, "cut": _cut, "exchange": _exchange,
                                   "reorder": _reorder, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all}


def slice_local(x, slices, copy: bool = False):
    """`x[slices]` as contiguous memory of its own, unless that is all of `x`.

    `copy`: even then. A dim of size 1 is one rank's whole shard, and a write into it must not reach that rank's replica.
    """
    part = [(d, s) for d, s in enumerate(slices) if s.start != 0 or s.stop != x.shape[d]]
    dry = executing()
    if dry is not None:
        return dry.like(x, [s.stop - s.start for s in slices]) if part or copy else x
    if (part or copy) and on_cpu():  # in a node, MindSpore 2.10 forgets the history of a view when it differentiates again
        return Tensor.from_numpy(np.array(x.asnumpy()[tuple(slices)], order="C"))
    for d, s in part:
        x = ms.mint.narrow(x, d, s.start, s.stop - s.start)
    return fresh_copy(x) if copy or part else x.contiguous()


_LARGE = 1 << 16  # elements


@dataclass(slots=True)
class Conversion:
    """What `Redistribute` does to a tensor; the fields are the arguments of `redistribute_local`.

    `data` stands in here to be hidden from autograd: a second tensor input would send a zero cotangent through its history.
    """

    src: Layout
    dst: Layout
    cotangent: Layout
    wanted: Layout
    data: Tensor | None
    works: list | None
    context: contextvars.Context
    fresh: Callable
    winners: Tensor | int | None
    through: Any = None
    takes: Callable[[Tensor], Tensor | None] | None = None


class Redistribute(Function):
    """The source's shard as another layout's."""

    @staticmethod
    def forward(ctx, x, what: Conversion):
        src, dst = what.src, what.dst
        ctx.move = src, dst, what.cotangent, what.wanted, what.context
        if what.through is not None:
            ctx.dtypes = what.through, x.dtype
            ctx.takes = what.takes
        if what.data is not None:
            return x if what.data is x and math.prod(x._shape) < _LARGE else what.fresh(what.data)
        local = Tensor._make_subclass(Tensor, x)
        # A maximum or minimum over ranks: its cotangent belongs to those that hold the winner. (A product is refused.)
        extremum = any(not p.is_partial("sum") and not p.is_partial("avg") and p != q
                       for p, q in zip(src.placements, dst.placements) if p.is_partial())
        if extremum:
            _check_differentiable(src, dst)
        local, start = _as_summand(local, src, dst)
        out = run(plan(start, dst), local, None if extremum else what.works)
        if extremum:
            ctx.extremum = src, local, out, what.winners
        return what.fresh(out)

    @staticmethod
    def backward(ctx, grad):
        src, dst, cotangent, wanted, context = ctx.move
        extremum = getattr(ctx, "extremum", None)
        # Backends that run asynchronously call this on a thread of their own, without the user's contextvars.
        through, back = getattr(ctx, "dtypes", (None, None))
        takes = getattr(ctx, "takes", None) if cotangent is wanted and not recording() else None
        with NoFallbackGuard():
            if takes is not None and (taken := takes(grad)) is not None:
                return taken, None
            grad = grad if through is None else cast(grad, through)
            if cotangent is not wanted or recording():
                grad = context.copy().run(_backward, grad, src, dst, cotangent, wanted)
            scale = _average(src, dst) if src.partial_axes else 1
            if scale != 1:
                grad = grad * scale
            if extremum is not None:
                grad = grad * context.copy().run(_winners_share, *extremum)
            grad = grad if back is None else cast(grad, back)
        return grad, None


def _view(x):
    # A new tensor on the same storage: an alias would share the leaf's autograd identity and skip this node silently.
    # most CPU kernels copy a view, at every use; of a view, this copies
    if on_cpu():
        dry, large = executing(), math.prod(x._shape) >= _LARGE
        if large and dry is None:
            return Tensor.from_numpy(Tensor.asnumpy(x))
        if dry is not None and not large:
            return dry.on_storage_of(x, x._shape, True)
    return x.view(x._shape)


def _as_summand(x, src: Layout, dst: Layout):
    """A value that is no sum where summands are wanted: of a whole one coordinate 0 gives all, of shards each its own."""
    axes = [a for a in dst.partial_axes if not src.placements[a].is_partial()]
    if not axes:
        return x, src
    whole = src.with_placements([REPLICATE if a in axes else p for a, p in enumerate(src.placements)], src.order)
    cut = [a for a in axes if not src.placements[a].is_replicate()]
    if all(p.is_shard() and not p.parts and src.dim_axes[p.dim] == (a,) for a in cut for p in (src.placements[a],)):
        for d in sorted(src.placements[a].dim for a in cut):
            x = among_zeros(x, d, *src.local_box()[d], src.shape[d])
    else:
        x, cut = run(plan(src, whole), x), []
    here = src.mesh.get_coordinate() or (0,) * src.mesh.ndim
    if any(here[a] for a in axes if a not in cut):
        x = _zeros(tuple(x._shape), x)
    placements = [dst.placements[a] if a in axes else p for a, p in enumerate(whole.placements)]
    return x, whole.with_placements(placements, whole.order)


def among_zeros(x, dim: int, start: int, stop: int, size: int):
    """A dim's elements from start to stop, with zeros around."""
    def zeros(n):
        return ms.ops.zeros((*x._shape[:dim], n, *x._shape[dim + 1:]), x.dtype)
    if executing() is not None:
        return _zeros((*x._shape[:dim], size, *x._shape[dim + 1:]), x)
    return ms.mint.cat([piece for piece in (zeros(start), x, zeros(size - stop)) if piece._shape[dim]] or [x], dim)


def _average(src: Layout, dst: Layout) -> float:
    """The derivative of an average with respect to one rank's summand."""
    scale = 1.0
    for a in src.partial_axes:
        if src.placements[a].is_partial("avg") and not (src.mesh == dst.mesh and dst.placements[a].is_partial()):
            scale /= src.mesh.shape[a]
    return scale


def _check_differentiable(src: Layout, dst: Layout) -> None:
    kept = all(q.is_replicate() if p.is_partial() else p == q for p, q in zip(src.placements, dst.placements))
    if any(src.placements[a].is_partial("prod") for a in src.partial_axes) or not kept:
        raise RedistributeError("For 'redistribute', this reduction has no gradient here.", f"{src.describe()} -> {dst}",
                                "Partial products, and maxima reduced straight into shards, are not differentiated.",
                                "redistribute to Replicate() first")


def _winners_share(src: Layout, local, out, winners):
    """d(extreme)/d(local extreme): what share of the cotangent goes to this rank; see `redistribute_local`."""
    wide = ms.float64 if local.dtype == ms.float64 else ms.float32
    won = local.astype(wide) == out.astype(wide)
    with comm.annotate(phase="backward", src=repr(src), dst="ties"):
        if isinstance(winners, int):
            mine = ms.ops.select(won, ms.ops.full(won.shape, winners, dtype=ms.int32),
                                 ms.ops.full(won.shape, 2**31 - 1, dtype=ms.int32))
            return ms.mint.logical_and(won, mine == _over_ranks(src, mine, "min")).astype(local.dtype)
        weight = won.astype(wide) if winners is None else won.astype(wide) * winners.astype(wide)
        return (weight / _over_ranks(src, weight, "sum")).astype(local.dtype)


def _over_ranks(src: Layout, x, op: str):
    for a in src.partial_axes:
        x = src.mesh.get_group(a).all_reduce(x, op)
    return x


def _backward(grad, src: Layout, dst: Layout, cotangent: Layout, wanted: Layout):
    """The gradient of a move, moved from `cotangent` to `wanted`."""
    if recording():  # of which a derivative will be asked for: its move is a node, whose own backward moves as the value did
        src, dst = src.reduced(PARTIAL), dst.reduced(PARTIAL)  # sums: the gradient holds the factors of other reductions
        if cotangent is wanted and src is dst:
            return grad
        with comm.annotate(phase="backward"):
            # as a constant: in a backward, MindSpore 2.10 forgets the history of a node whose result is a view
            return redistribute_local(grad, cotangent, wanted, src, dst, fresh=ms.ops.stop_gradient)
    grad, start = _as_summand(grad, cotangent, wanted)
    moves = plan(start, wanted)
    if not moves:
        return grad
    if not active():
        return run(moves, in_row_order(grad))
    with comm.annotate(phase="backward", src=repr(start), dst=repr(wanted)):
        return run(moves, in_row_order(grad))


def redistribute_local(x, src: Layout, dst: Layout, cotangent: Layout, wanted: Layout, data=None, works=None, fresh=None,
                       winners=None, through=None, takes=None):
    """Differentiable `plan(src, dst)` on the tensor `x` whose storage is a shard of `src`; returns a plain tensor.

    Args:
        x: the DTensor (or local tensor) that autograd knows; never an alias of a Parameter.
        src: layout of `x`.
        dst: layout of the result.
        cotangent: layout in which the result's gradient will arrive.
        wanted: layout in which the producer of `x` expects it.
        data: the result's local tensor, where a forward has produced it already.
        works: as for `run`.
        fresh: makes a tensor of its own of the result; default a view.
        winners: of an extreme, who attains it on this rank: how many elements, or from where if the first takes all. Without
            it each rank holds one candidate.
        through: the dtype in which the gradient is moved, where `data` is a copy of `x` in another dtype.
        takes: of such a copy, is given a gradient that need not be moved, as it comes; gives what autograd has instead,
            or None if it does not take it.
    """
    if active():  # the backward's communication is told by the line that caused it
        with comm.annotate(site=comm.user_site()):
            context = contextvars.copy_context()
    else:
        context = contextvars.copy_context()
    dry = executing()
    with NoFallbackGuard():
        if dry is not None and recording() and x._requires_grad:
            x = dry.forked(x)
        return Redistribute.apply(x, Conversion(src, dst, cotangent, wanted, data, works, context, fresh or _view, winners,
                                                through, takes))


def recorded_gradient(grad, layout: Layout):
    """The gradient of a value of that layout, as autograd must see it if it is differentiated again.

    The cotangent of a partial value is whole, and each rank multiplies its own summand with it: so in the graph the
    derivative by it is a sum over ranks, while whoever is handed it takes it for one whole value.
    """
    if not layout.partial_axes or not recording():
        return grad
    whole = layout.gradient()
    return redistribute_local(grad, whole, whole, whole, layout.reduced(PARTIAL), fresh=ms.ops.stop_gradient)
