# SPDX-License-Identifier: Apache-2.0
"""`explain`: what a redistribution will do and cost, or what a function communicates and where in your code.

For two layouts nothing runs: the plan is printed as a strip, beside the naive way (make it whole everywhere, then
cut). The plan never holds more than the larger end; the naive way may be quicker where it may. For a function the
recorder runs along. Costs are those of the planner's model (`redistribute/cost.py`), not
measurements.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.layout import Layout
from ..core.placements import REPLICATE
from ..errors import ConfigError
from ..redistribute.cost import CostModel, costs, shard_bytes
from ..redistribute.plan import Move, cost, exchange_messages, plan
from .comm_mode import CommDebugMode, columns, human


def explain(what, *args, **kwargs):
    """Prints the plan between two layouts, or the communication of a call.

    Args:
        what: a Layout or DTensor (then the target follows: a Layout, a DTensor or placements); or a function or Cell.
        *args: the target; or the arguments of a call. `explain(fn)` without any returns a function that runs `fn`.
        **kwargs: keyword arguments of the call.

    Returns:
        For a call, what it returns. For layouts, nothing.

    Example:
        >>> from ms_dtensor import DeviceMesh, Layout, Shard
        >>> from ms_dtensor.debug import explain
        >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
        >>> layout = Layout(mesh, [Shard(0)], (4096, 1024))
        >>> explain(layout, [Shard(1)])
        f32[4096@tp, 1024] -> f32[4096, 1024@tp] on mesh(tp=4)
        plan                    holds    sends     cost
          f32[4096@tp, 1024]  4.0 MiB
          | all_to_all(tp)             3.0 MiB  0.86 ms
          f32[4096, 1024@tp]  4.0 MiB
        naive                    holds     sends     cost
          f32[4096@tp, 1024]   4.0 MiB
          | all_gather(tp)              12.0 MiB  3.38 ms
          f32[4096, 1024]     16.0 MiB
          | cut(tp)                          0 B  0.21 ms
          f32[4096, 1024@tp]   4.0 MiB
          2 moves                       12.0 MiB  3.59 ms
        the plan sends 4.0x less, takes 4.2x less, holds 4.0x less
    """
    src = what if isinstance(what, Layout) else getattr(what, "layout", None)
    if isinstance(src, Layout):
        if len(args) != 1 or kwargs:
            raise ConfigError("For 'explain', a layout needs exactly one target.", src.describe(), "",
                              "explain(src, dst) with a Layout or placements")
        print(plan_text(src, _target(src, args[0])))
        return None
    if not callable(what):
        raise ConfigError(f"For 'explain', the first argument must be a Layout, a DTensor or a function, but got "
                          f"{type(what).__name__}.", "", "", ("explain(src, dst)", "explain(fn, *args)"))
    if not args and not kwargs:
        return lambda *a, **k: _run(what, a, k)
    return _run(what, args, kwargs)


def _target(src: Layout, given) -> Layout:
    dst = given if isinstance(given, Layout) else getattr(given, "_layout", None)
    if dst is None:
        if hasattr(given, "asnumpy"):
            raise ConfigError("For 'explain', a target is a Layout, a DTensor or placements, but got "
                              f"{type(given).__name__}.", src.describe(), "A plain tensor does not say how it is laid out.",
                              "explain(src, [Replicate()])")
        return src.with_placements(given)
    if dst.shape != src.shape:
        raise ConfigError("For 'explain', the target has another shape.", f"{src.describe()} -> {dst}",
                          "A redistribution moves a tensor; it does not change it.", "explain(fn, *args) of an op")
    return dst


def _run(fn: Callable, args: Sequence, kwargs: dict):
    mode = CommDebugMode()
    try:
        with mode:
            return fn(*args, **kwargs)
    finally:
        name = getattr(fn, "__name__", type(fn).__name__)
        print(f"{name}: {mode.table()}")


def plan_text(src: Layout, dst: Layout) -> str:
    """What `explain(src, dst)` prints."""
    model = costs(src.mesh.device_type)
    head = f"{src} -> {dst} on mesh({src.mesh.describe()})"
    if src.mesh != dst.mesh:
        head += f" -> mesh({dst.mesh.describe()})"
    best = plan(src, dst, model)
    if not best:
        return f"{head}\nnothing to do"
    simple = naive(src, dst)
    if [(m.kind, m.dst) for m in best] == [(m.kind, m.dst) for m in simple]:
        return "\n".join((head, *_strip("plan", best, model), "the naive way is the best one"))
    return "\n".join((head, *_strip("plan", best, model), *_strip("naive", simple, model),
                      f"the plan sends {_ratio(_sent(best), _sent(simple))}, takes "
                      f"{_ratio(cost(best, model), cost(simple, model))}, holds {_ratio(_peak(best), _peak(simple))}"))


def _ratio(ours: float, other: float) -> str:
    if ours == other:
        return "the same"
    if not ours:
        return "nothing"
    return f"{other / ours:.1f}x less" if ours < other else f"{ours / max(other, 1e-30):.1f}x more"


def naive(src: Layout, dst: Layout) -> tuple[Move, ...]:
    """The way everybody knows: reduce and gather until every rank holds all, then cut."""
    out: list[Move] = []
    at = src
    kept = {a for a in dst.partial_axes if src.mesh == dst.mesh}

    def step(kind, axes, placements, order, src_dim=None, dst_dim=None, op=None):
        nonlocal at
        after = at.with_placements(placements, order)
        out.append(Move(kind, tuple(axes), at, after, src_dim, dst_dim, op))
        at = after

    def without(axes):
        return [REPLICATE if a in axes else p for a, p in enumerate(at.placements)]
    for op in dict.fromkeys(src.placements[a].reduce_op for a in src.partial_axes if a not in kept):
        reduced = [a for a in src.partial_axes if src.placements[a].reduce_op == op and a not in kept]
        step("all_reduce", reduced, without(reduced), at.order, op=op)
    for d, axes in enumerate(src.dim_axes):
        if axes:
            step("all_gather", axes, without(axes), at.order, src_dim=d)
    if src.mesh != dst.mesh:
        return (*out, Move("exchange", (), at, dst)) if at is not dst else tuple(out)
    for d, axes in enumerate(dst.dim_axes):
        if axes:
            step("cut", axes, [dst.placements[a] if a in axes else p for a, p in enumerate(at.placements)], dst.order,
                 dst_dim=d)
    return tuple(out)


def _sent(moves: Sequence[Move]) -> float:
    return sum(m.bytes() for m in moves)


def _peak(moves: Sequence[Move]) -> int:
    return max(shard_bytes(layout) for m in moves for layout in (m.src, m.dst))


def _strip(title: str, moves: tuple[Move, ...], model: CostModel) -> list[str]:
    rows = [(title, "holds", "sends", "cost")]
    for move in moves:
        rows.append((f"  {move.src}", _holds(move.src), "", ""))
        axes = ", ".join(move.src.mesh.mesh_dim_names[a] for a in move.axes)
        rows.append((f"  | {move.kind}({axes})" if axes else f"  | {move.kind}", "", human(move.bytes()),
                     _time(_seconds(moves, move, model))))
    rows.append((f"  {moves[-1].dst}", _holds(moves[-1].dst), "", ""))
    if len(moves) > 1:
        rows.append((f"  {len(moves)} moves", "", human(_sent(moves)), _time(cost(moves, model))))
    return columns(rows, right=(1, 2, 3)).split("\n")


def _seconds(moves: Sequence[Move], move: Move, model: CostModel) -> float:
    return model.seconds(move.kind, move.ranks, shard_bytes(move.src), shard_bytes(move.dst),
                         exchange_messages(moves[0].src, moves[-1].dst))


def _holds(layout: Layout) -> str:
    return human(shard_bytes(layout))


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
