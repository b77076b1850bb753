# SPDX-License-Identifier: Apache-2.0
"""Moves from one type to another on an axis, inside a local function: differentiable, and recorded as any communication.

Each is a node whose backward is the transposed move, so they may be differentiated to any order. They do the same whether
types are checked or not: what a move does is said by its name and by `to`, never by a type that was found out. Public as
`ms_dtensor.debug.convert` and so on.
"""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from mindspore import Tensor, mint, ops

from ... import comm
from ...comm.group import Group
from ...comm.record import active
from ...core.mesh import DeviceMesh
from ...core.placements import chunk_bounds
from ...dispatch.operands import dtype_name
from ...errors import ConfigError, MeshError
from ...internals.names import Function
from ...ops.local.dtypes import full
from ...ops.rules import spmd
from ...ops.rules.spmd import Kind, Refused
from .account import Types, account
from .doors import reinterpreted
from .typed import Typed, plain, types_of

mesh_inside: ContextVar[DeviceMesh | None] = ContextVar("ms_dtensor_local_mesh", default=None)  # of the local function


class _Move(Function):
    """A linear move and its transpose, each other's backward."""

    @staticmethod
    def forward(ctx, x, run, back):
        ctx.run, ctx.back, ctx.site = run, back, comm.user_site() if active() else None
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        with comm.annotate(phase="backward", **({"site": ctx.site} if ctx.site else {})):
            return _Move.apply(grad, ctx.back, ctx.run), None, None


def all_reduce(x: Tensor, axis: str, to: str = "I") -> Tensor:
    """The sum of all ranks' tensors over an axis; of what is partial its value, of what varies the sum of it.

    Args:
        x: a local tensor.
        axis: an axis of the mesh.
        to: "I" (invariant) if all ranks go on alike with it: its cotangent is whole on each, and passes. "R" (replicated) if
            ranks do different work with it: their cotangents are summed up.

    Returns:
        A tensor of the same shape, the same on all ranks.

    Raises:
        OpRuleError: in a check, `x` is no summand and does not vary.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import all_reduce
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> norm = md.local_map(lambda x: all_reduce((x * x).sum(), "tp"), [md.Replicate()], check=True)
        >>> norm(md.ones((3, 2), device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[], mesh=(tp=1), rank 0 holds [])
    """
    _one_of("all_reduce", to, "RI")
    group = _group("all_reduce", axis)
    return _run("all_reduce", x, axis, to, _summed(group), _summed(group) if to == "R" else _same)


def all_gather(x: Tensor, axis: str, dim: int = 0, *, to: str = "I", size: int | None = None) -> Tensor:
    """All ranks' parts joined on a dim.

    Args:
        x: this rank's part.
        axis: an axis of the mesh.
        dim: where they are joined.
        to: as in `all_reduce`; of "R" the backward sums up and scatters.
        size: of the whole dim, if the parts are not alike (chunks, the first ones the larger).

    Returns:
        The whole, the same on all ranks.

    Raises:
        OpRuleError: in a check, `x` does not vary.
        ConfigError: there is no such dim.
        CommError: parts that are not chunks of `size`.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import all_gather
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> whole = md.local_map(lambda x: all_gather(x, "tp"), [md.Replicate()], check=True)
        >>> whole(md.ones((3, 2), device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[3, 2], mesh=(tp=1), rank 0 holds [3, 2])
    """
    _one_of("all_gather", to, "RI")
    group, dim = _group("all_gather", axis), _dim("all_gather", x, dim)
    bounds = chunk_bounds(x.shape[dim] * group.size if size is None else size, group.size)
    back = _scattered(group, dim, bounds) if to == "R" else _cut(group, dim, bounds)
    return _run("all_gather", x, axis, to, _gathered(group, dim, bounds), back)


def reduce_scatter(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """This rank's part, along a dim, of the sum of all ranks' tensors.

    Args:
        x: a summand of the whole.
        axis: an axis of the mesh.
        dim: the dim that is cut; the axis divides it.

    Raises:
        OpRuleError: in a check, `x` is no summand and does not vary.
        ConfigError: there is no such dim, or the axis does not divide it.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import reduce_scatter
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> piece = md.local_map(lambda x: reduce_scatter(x, "tp"), [md.Shard(0)], check=True)
        >>> piece(md.DTensor.from_local(md.ones(4, device_mesh=mesh).to_local(), mesh, [md.Partial()]))
        DTensor(f32[4@tp], mesh=(tp=1), rank 0 holds [4])
    """
    group, dim = _group("reduce_scatter", axis), _dim("reduce_scatter", x, dim)
    _divided("reduce_scatter", x, dim, group)
    bounds = chunk_bounds(x.shape[dim], group.size)
    return _run("reduce_scatter", x, axis, "V", _scattered(group, dim, bounds), _gathered(group, dim, bounds), dim)


def all_to_all(x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    """A dim is cut over the ranks, and another joined: a shard of one dim becomes a shard of the other.

    Args:
        x: this rank's part, whole along `split_dim`.
        axis: an axis of the mesh; it divides `split_dim`, and the ranks' parts are of one shape.
        split_dim: the dim that is cut.
        concat_dim: the dim that is joined.

    Raises:
        OpRuleError: in a check, `x` does not vary.
        ConfigError: there is no such dim, or the axis does not divide it.

    Example:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import all_to_all
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> turn = md.local_map(lambda x: all_to_all(x, "tp", 1, 0), [md.Shard(1)], check=True)
        >>> turn(md.ones((3, 2), device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[3, 2@tp], mesh=(tp=1), rank 0 holds [3, 2])
    """
    group = _group("all_to_all", axis)
    a, b = _dim("all_to_all", x, split_dim, "split_dim"), _dim("all_to_all", x, concat_dim, "concat_dim")
    n, each = group.size, x.shape[b]
    _divided("all_to_all", x, a, group)
    parts = [x.shape[a] // n] * n

    def turn(split, splits, concat, concats):
        return lambda t: group.all_to_all(t.contiguous(), split, splits, concat, concats)
    return _run("all_to_all", x, axis, "V", turn(a, parts, b, [each] * n), turn(b, [each] * n, a, parts), a)


def convert(x: Tensor, axis: str, to: str, dim: int = 0) -> Tensor:
    """Another type of what all ranks have alike on an axis; the forward sends nothing.

    Args:
        x: a local tensor: invariant for `to="R"`, else replicated.
        axis: an axis of the mesh.
        to: "R": ranks are going to do different work with it, so its gradient is summed up (an all-reduce). "I": it goes on
            as a value whose cotangent comes whole to every rank; one rank's is taken. "V": each rank takes its part along
            `dim`. "P": a summand on one rank and zeros on the others.
        dim: of the parts.

    Returns:
        The tensor, its part, or zeros.

    Raises:
        OpRuleError: in a check, `x` is of another type.
        ConfigError: `to` is none of these, or there is no such dim.

    Example: a bias is added to a sum once:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import convert
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> row = md.local_map(lambda x, w, b: x @ w + convert(b, "tp", to="P"), [md.Partial()], check=True)
        >>> x, w = (md.ones((4, 4), device_mesh=mesh, placements=[md.Shard(d)]) for d in (1, 0))
        >>> row(x, w, md.ones(4, device_mesh=mesh))
        DTensor(f32[4, 4]{sum: tp}, mesh=(tp=1), rank 0 holds [4, 4])
    """
    _one_of("convert", to, "RIVP")
    group = _group("convert", axis)
    if to in "RI":
        return _run("convert", x, axis, to, _same, _summed(group) if to == "R" else _on_first(group))
    if to == "P":
        return _run("convert", x, axis, to, _on_first(group), _on_first(group))
    dim = _dim("convert", x, dim)
    bounds = chunk_bounds(x.shape[dim], group.size)
    return _run("convert", x, axis, to, _cut(group, dim, bounds), _padded(group, dim, bounds), dim)


def reinterpret(x: Tensor, axis: str, as_: str) -> Tensor:
    """The same local tensors, called another type: what only the author of a function knows.

    Nothing is computed or sent, and the cotangent passes as it is. A check believes it.

    Args:
        x: a local tensor.
        axis: an axis of the mesh.
        as_: "R", "I", "V" or "P".

    Raises:
        ConfigError: `as_` is none of these.

    Example: each rank's loss is its share of the whole loss:
        >>> import ms_dtensor as md
        >>> from ms_dtensor.debug import reinterpret
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> loss = md.local_map(lambda x: reinterpret(x.exp().mean(), "dp", as_="P"), [md.Partial()], check=True)
        >>> loss(md.ones((4, 2), device_mesh=mesh, placements=[md.Shard(0)]))
        DTensor(f32[]{sum: dp}, mesh=(dp=1), rank 0 holds [])
    """
    _one_of("reinterpret", as_, "RIVP", "as_")
    now = account.get()
    if now is None or axis not in now.names:
        return x
    return reinterpreted(x, now.names.index(axis), spmd.OF_LETTER[as_])


# -- how they run --------------------------------------------------------------------------------------------------------
def _run(move: str, x: Tensor, axis: str, to: str, run: Callable, back: Callable, dim: int | None = None) -> Tensor:
    now = account.get()
    if now is None:
        with comm.annotate(src=move, dst=to):
            return _Move.apply(x, run, back)
    types = types_of(x)
    kinds = list(types.kinds)
    for k, name in enumerate(now.names):
        try:
            kinds[k] = _after(move, kinds[k], types.graded, to, dim) if name == axis else _beside(kinds[k], move, to)
        except Refused as refused:
            raise now.refusal(f"'{move}'", k, name, refused, [types]) from None
    with comm.annotate(src=move, dst=to):
        out = _Move.apply(plain(x), run, back)
    return Typed(out, Types(tuple(kinds), types.graded, now.made(move, kinds, [types])))


def _after(move: str, kind: Kind, graded: bool, to: str, dim: int | None) -> Kind:
    """The type on the move's axis; a constant that all have alike is as well R as I."""
    if not graded and kind.letter in "RI" and move == "convert":
        return spmd.OF_LETTER[to] if to in "RI" else spmd.after_move(move, spmd.R, to, dim)
    return spmd.after_move(move, kind, to, dim)


def _beside(kind: Kind, move: str, to: str) -> Kind:
    """On another axis these are linear ops of one operand."""
    return kind if kind.letter != "V" or move in ("all_reduce", "convert") and to != "V" else spmd.V


def _group(who: str, axis: str) -> Group:
    mesh = mesh_inside.get()
    if mesh is None:
        raise ConfigError(f"For '{who}', no local function is running.", f"axis {axis!r}",
                          "An axis is one of the mesh whose tensors a function was given.",
                          "call it inside a function of local_map, or a DFunction with placements")
    if axis not in mesh.mesh_dim_names:
        raise MeshError(f"For '{who}', there is no axis {axis!r}.", f"mesh({mesh.describe()})", "",
                        f"one of {', '.join(mesh.mesh_dim_names)}")
    return mesh.get_group(axis)


def _one_of(who: str, letter: str, letters: str, name: str = "to") -> None:
    if letter not in tuple(letters):
        raise ConfigError(f"For '{who}', '{name}' is {letter!r}.", "", f"It is one of {', '.join(letters)}.",
                          ", ".join(f"{k} for {spmd.WORDS[k]}" for k in letters))


def _dim(who: str, x: Tensor, dim: int, name: str = "dim") -> int:
    """A dim of a tensor, counted from its first."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ConfigError(f"For '{who}', '{name}' is {dim!r}.", f"{dtype_name(x.dtype)}{list(x.shape)}",
                          f"It is one of the tensor's {x.ndim} dims, counted from the first or, below 0, from the last.",
                          f"an int from {-x.ndim} to {x.ndim - 1}" if x.ndim else "x.reshape(1) has a dim")
    return dim % x.ndim


def _divided(who: str, x: Tensor, dim: int, group: Group) -> None:
    if x.shape[dim] % group.size:
        raise ConfigError(f"For '{who}', dim {dim} of {x.shape[dim]} is not divided by {group.size} ranks.",
                          f"{dtype_name(x.dtype)}{list(x.shape)}", "Every rank gets as much of it.",
                          f"pad it to a multiple of {group.size}")


def _same(x):
    return ops.stop_gradient(x)


def _summed(group: Group) -> Callable:
    return lambda x: group.all_reduce(x.contiguous())


def _on_first(group: Group) -> Callable:
    return lambda x: _same(x) if group.rank_index == 0 else full(tuple(x._shape), 0, x.dtype)


def _sizes(bounds) -> list[int]:
    return [hi - lo for lo, hi in bounds]


def _gathered(group: Group, dim: int, bounds) -> Callable:
    return lambda x: group.all_gather(x.contiguous(), dim, _sizes(bounds))


def _scattered(group: Group, dim: int, bounds) -> Callable:
    return lambda x: group.reduce_scatter(x.contiguous(), "sum", dim, _sizes(bounds))


def _cut(group: Group, dim: int, bounds) -> Callable:
    lo, hi = bounds[group.rank_index]
    return lambda x: mint.narrow(x, dim, lo, hi - lo).contiguous()


def _padded(group: Group, dim: int, bounds) -> Callable:
    lo, hi = bounds[group.rank_index]

    def pad(x):
        shape, parts = tuple(x._shape), [x]
        for at, n in ((0, lo), (1, bounds[-1][1] - hi)):
            if n:
                zeros = full((*shape[:dim], n, *shape[dim + 1:]), 0, x.dtype)
                parts = [zeros, *parts] if at == 0 else [*parts, zeros]
        return mint.cat(parts, dim) if len(parts) > 1 else _same(x)
    return pad
