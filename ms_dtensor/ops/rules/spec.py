# SPDX-License-Identifier: Apache-2.0
"""What a rule says, as data: the legal single-axis cases of one call, its global result shapes, its local form.

A rule is a function `Call -> OpSpec`. It sees global shapes and static arguments, never a tensor, a mesh or a rank.
It lists, for ONE mesh axis, which operand placements give which result placements; the mesh of any rank is the
product, built axis by axis in `select.py`. Its `S(d)` is a placeholder: sharded on dim d, in the operand's own way, and
the results in the same; an operand that has to be moved there is cut plainly. Where the local call needs other static
arguments than the global one (a view's shape), or another function (a masked lookup), the spec's `local` says so from
local shapes.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ...core.layout import Layout
from ...core.placements import PARTIAL, REDUCE_OPS, REPLICATE, Partial, Placement, Shard
from ...errors import OpRuleError

R, P, S = REPLICATE, PARTIAL, Shard
SUMS = (PARTIAL, Partial("avg"))  # pass through what is linear
PARTIALS = tuple(Partial(op) for op in REDUCE_OPS)  # pass through what only moves elements about


class Unfit(Exception):
    """Sizes that meet in a call and cannot, said by a rule; the planner says of which call.

    The op cannot be left to find it: a shard of what is too large by the number of ranks would fit a whole operand.
    """


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a call: its position among the tensor arguments, global shape and dtype."""

    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __index__(self):
        raise OpRuleError("For an op, a tensor stands where numbers are needed.", f"{self.dtype}{list(self.shape)}",
                          "A plan is made of layouts and numbers, before any value is known.",
                          "pass numbers, e.g. *t.tolist() of a replicated tensor")

    __iter__ = __index__


@dataclass(frozen=True, slots=True)
class Call:
    """One op call as rules see it: canonical op name, arguments by name with tensors as `Operand`s."""

    op: str
    args: dict[str, Any]
    operands: tuple[Operand, ...]

    def get(self, name: str, default=None) -> Any:
        """An argument by name; `default` if it was not passed, or passed as None."""
        value = self.args.get(name)
        return default if value is None else value

    def case(self, places: Mapping[int, Placement], *outs: Placement, even=()) -> Case:
        """A case by the operands' indices; those that are not named are replicated."""
        return Case(tuple(places.get(o.index, R) for o in self.operands), outs, even)

    def like_first(self, dims: Iterable[int], partials: Iterable[Placement] = (), results: int = 1) -> list[Case]:
        """Cases with all results as operand 0, sharded on one of `dims` or partial; further operands are replicated."""
        return [self.case({self.operands[0].index: p}, *(p,) * results) for p in (*map(S, dims), *partials)]


@dataclass(frozen=True, slots=True)
class Case:
    """One legal combination on one axis: operand placements -> result placements.

    `even` lists (operand, dim, extent) that the shards of that dim must divide: views of a sharded dim need it.
    `invariant` lists replicated operands whose cotangent every rank computes whole, though ranks differ in another one.
    """

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    even: tuple[tuple[int, int, int], ...] = ()
    invariant: tuple[int, ...] = ()

    def cut_like(self, way: Placement) -> Case:
        """This case with every `S(d)` cut in the way of this shard."""
        ins, outs = (tuple(way.with_dim(p.dim) if p.__class__ is Shard else p for p in side)
                     for side in (self.ins, self.outs))
        return Case(ins, outs, self.even, self.invariant)

    def __repr__(self):
        return f"{', '.join(map(short, self.ins))} -> {', '.join(map(short, self.outs))}"


@dataclass(frozen=True, slots=True)
class Local:
    """The local view of a planned call on one rank: layouts chosen for operands and results."""

    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    coordinate: tuple[int, ...] | None  # None: outside the mesh

    def in_shape(self, i: int) -> tuple[int, ...]:
        """Local shape of operand i."""
        return self.ins[i].local_shape(self.coordinate)

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """Local shape of result i."""
        return self.outs[i].local_shape(self.coordinate)

    def in_offset(self, i: int) -> tuple[int, ...]:
        """Global index of operand i's first local element."""
        return self.ins[i].local_offset(self.coordinate)

    def in_pieces(self, i: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dim, the runs of global rows that operand i's shard is made of: one, but for a `FusedShard`."""
        return self.ins[i].pieces(self.coordinate)

    def is_empty(self, coordinate: Sequence[int]) -> bool:
        """True where sharding left an operand without elements."""
        return any(prod(x.shape) and not prod(x.local_shape(coordinate)) for x in self.ins)

    def first(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Coordinate of the first rank along `axes`, the others as here, that has something to compute."""
        shape = self.ins[0].mesh.shape
        at = list(self.coordinate or (0,) * len(shape))
        for numbers in itertools.product(*(range(shape[a]) for a in axes)):
            for a, i in zip(axes, numbers):
                at[a] = i
            if not self.is_empty(at):
                break
        return tuple(at)

    def is_first(self, axes: Sequence[int]) -> bool:
        """True on one rank of each group over `axes`, which has something to compute."""
        return self.first(axes) == self.coordinate


@dataclass(frozen=True, slots=True)
class LocalCall:
    """The local call to make instead of the original: a name in `ops.local.LOCAL_OPS` and its positional arguments."""

    name: str
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Winners:
    """Which elements share the cotangent of an extreme over `dims` of operand 0 (of its `magnitude`, for a norm).

    All that attain it, equally; or the `first` only, along one dim. MindSpore does either, by the form of the call.
    """

    dims: tuple[int, ...]
    keepdim: bool
    first: bool = False
    magnitude: bool = False


@dataclass(frozen=True, slots=True)
class OpSpec:
    """All a rule says about one call.

    Args:
        shapes: global shape of each tensor result; None where only the local result tells (cases must then be even).
        cases: legal single-axis cases; the all-replicated one is always legal and need not be listed.
        local: optional `Local -> LocalCall | None`; None: call the original with the same static arguments.
        dtypes: of each result, where operands of bfloat16 do not give it: a CPU computes such calls in float32 and has to
            know what to round. Everywhere else the kernel tells.
        writes: operands that the op changes in place besides giving results; no gradient passes through them.
        by_data: the shapes depend on data, so operands must come whole: nothing is gathered, and no shape is remembered.
        winners: of an extreme whose reduced dims may be sharded: who its gradient belongs to.
        any_rows: `local` does not ask which rows its shards are, or asks for all their runs (`in_pieces`), so that they need
            be no run of rows (`FusedShard`).
        uncut: dims of operand 0 that are not gathered for the caller: a call with one of them cut is refused.
        shape_only: operands of which nothing but the global shape is read; a rank without elements of one has work to do.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    cases: tuple[Case, ...]
    local: Callable[[Local], LocalCall | None] | None = None
    dtypes: tuple[str, ...] | None = None
    writes: tuple[int, ...] = ()
    by_data: bool = False
    winners: Winners | None = None
    shape_only: tuple[int, ...] = ()
    any_rows: bool = False
    uncut: tuple[int, ...] = ()


_WIDTH = ("bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 bfloat16 float16 float32 float64 complex64 "
          "complex128").split()
# MindSpore passes a dtype as its number in some calls
TYPE_IDS = {30: "bool", 32: "int8", 33: "int16", 34: "int32", 35: "int64", 37: "uint8", 38: "uint16", 39: "uint32",
             40: "uint64", 42: "float16", 43: "float32", 44: "float64", 45: "bfloat16", 51: "complex64",
             52: "complex128"}


def kind(dtype: str) -> int:
    """0 boolean, 1 integer, 2 float, 3 complex."""
    return 3 if "complex" in dtype else 2 if "float" in dtype else 1 if "int" in dtype else 0


def summand(dtype: str):
    """What ranks hold of what is zero on all but one: a summand; of truth values, which nobody adds up, any of them."""
    return Partial("max") if dtype == "bool" else P


def result_dtype(call: Call) -> str:
    """dtype of an arithmetic op's results by MindSpore's promotion, or the one that the call asks for."""
    wanted = call.args.get("dtype")
    if wanted is not None:
        return TYPE_IDS[wanted] if isinstance(wanted, int) else str(wanted).lower().rsplit(".", 1)[-1]
    known = [o for o in call.operands if o.dtype in _WIDTH]
    kinds = [o.dtype for o in known]
    if call.op in ("mul", "div"):  # here alone a 0-d operand counts as a Python number does (MindSpore 2.10)
        wide = [o.dtype for o in known if o.shape]
        if wide and max(map(kind, wide)) == max(map(kind, kinds)):
            kinds = wide
    if call.op == "sum" and "skip_mode" not in call.args and all(kind(k) < 2 for k in kinds):
        return "int64"  # the classic ReduceSum, which is told a skip_mode, keeps small integers
    floats = {k for k in kinds if "float" in k}
    if floats == {"float16", "bfloat16"} or not floats and (call.op == "div" or any(
            isinstance(v, float) for v in call.args.values())):
        return "float32"
    return max(kinds, key=_WIDTH.index, default="float32")


class EmptyShard(NamedTuple):
    """What a rank does that has nothing to compute: another rank's call on stand-ins, whose results it throws away.

    So dtypes, the structure of results, a kernel's refusal and what autograd records are those of the other ranks.

    Attributes:
        stand_ins: (shape, value) per operand.
        results: (local shape, fill value) per result; a value of None: as the stand-ins give it.
        promised: shapes that the rule says of the other rank's results; None where no rank has anything to compute.
    """

    stand_ins: tuple[tuple[tuple[int, ...], int], ...]
    results: tuple[tuple[tuple[int, ...], float | None], ...]
    promised: tuple[tuple[int, ...], ...] | None = None


def any_layout(cases: Iterable[Case], ndim: int) -> tuple[Case, ...]:
    """The cases of operand 0 with an operand 1 of `ndim` dims whose shape alone is read: it lies in any way."""
    return tuple(Case((*c.ins, p), c.outs, c.even, (0, 1) if c.ins == (R,) else (1,))
                 for c in cases for p in (R, *map(S, range(ndim)), *PARTIALS))


def mixed_sums(count: int) -> list[Case]:
    """Summands of some operands and whole values of others: one rank of the axis takes these in, see `taken_once`.

    The result is a sum, so its cotangent is whole on every rank, and so are those of all operands.
    """
    if not 1 < count < 4:
        return []
    ways = [ins for ins in itertools.product((P, R), repeat=count) if len(set(ins)) > 1]
    return [Case(ins, (P,), invariant=tuple(i for i, p in enumerate(ins) if p is R)) for ins in ways]


def taken_once(at: Local) -> tuple[bool | None, ...] | None:
    """Whether this rank takes in each operand that is whole where the result is a sum; None: of others, and if all are."""
    axes = [[a for a in at.outs[0].partial_axes if x.placements[a].is_replicate()] for x in at.ins]
    return tuple(at.is_first(a) if a else None for a in axes) if any(axes) else None


def short(p: Placement) -> str:
    """`S(0)`, `R`, `P(sum)`: placements as case notation prints them."""
    return f"S({p.dim})" if p.is_shard() else p._letter if p.is_replicate() else f"P({p.reduce_op})"


def dims_of(value, ndim: int) -> tuple[int, ...]:
    """A `dim` argument (None or (): all; int or sequence, maybe negative) as sorted non-negative dims."""
    if value is None or (isinstance(value, tuple | list) and not value):
        return tuple(range(ndim))
    seq = value if isinstance(value, tuple | list) else (value,)
    return tuple(sorted({int(d) % max(ndim, 1) for d in seq}))


def default_softmax_dim(ndim: int) -> int:
    """Along which dim log_softmax works where none is told, as in PyTorch."""
    return 0 if ndim in (0, 1, 3) else 1


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy broadcasting of shapes; of sizes that do not fit the first wins, and `shard_cases` refuses them."""
    nd = max(map(len, shapes), default=0)
    out = []
    for d in range(nd):
        sizes = [s[d - nd + len(s)] for s in shapes if d - nd + len(s) >= 0]
        out.append(next((n for n in sizes if n != 1), 1))
    return tuple(out)
