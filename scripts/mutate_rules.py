# SPDX-License-Identifier: Apache-2.0
"""Plants faults in op rules and asks the verifier about each: a fault that passes is a hole in the proof.

    python scripts/mutate_rules.py [--only TEXT]

A fault is a legal-looking lie: a case with another placement, one that does not hold, a local form that forgets the
shard's offset, one whose value is right and whose gradient is not, or an empty shard that gives another kind of thing.
What no single call shows (a second derivative, a write that a sibling view must see) has a small program as its judge.
Prints JSON; exits non-zero if one survives.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])

import mindspore as ms  # noqa: E402
from mindspore import mint, nn, ops  # noqa: E402

import ms_dtensor as md  # noqa: E402
from ms_dtensor.core.placements import Partial, Replicate, Shard  # noqa: E402
from ms_dtensor.debug.verify import Report, check_rule  # noqa: E402
from ms_dtensor.dispatch import inplace, views  # noqa: E402
from ms_dtensor.dispatch.dispatcher import clear_cache  # noqa: E402
from ms_dtensor.ops.local import CPU, LOCAL_OPS, run  # noqa: E402
from ms_dtensor.ops.rules import RULES, Case  # noqa: E402
from ms_dtensor.redistribute import execute  # noqa: E402

R, P, S = Replicate(), Partial(), Shard
RNG = np.random.default_rng(7)


def f(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ids(high, *shape):
    return RNG.integers(0, high, shape).astype(np.int32)


@dataclass(frozen=True)
class Fault:
    """One planted fault: what is lied about, in which op or local form, and the public call that must expose it."""

    family: str
    lie: str
    target: str
    change: Callable
    call: Callable
    args: tuple
    where: dict | None = None  # a module's names; then `call` tells whether a small program is right


def add(*ins_outs):
    """The rule claims one more case."""
    *ins, out = ins_outs
    outs = out if isinstance(out, tuple) else (out,)
    return lambda spec: replace(spec, cases=(*spec.cases, Case(tuple(ins), outs)))


def outs(old, new):
    """Results said to be `old` are said to be `new`."""
    return lambda spec: replace(spec, cases=tuple(
        Case(c.ins, tuple(new if p == old else p for p in c.outs), c.even) for c in spec.cases))


def no_even(spec):
    """Views forget that shards must divide."""
    return replace(spec, cases=tuple(Case(c.ins, c.outs) for c in spec.cases))


def no_local(spec):
    """The original call runs where a local form is due."""
    return replace(spec, local=None)


def shape(fn):
    """The promised global shape is another."""
    return lambda spec: replace(spec, shapes=tuple(fn(s) for s in spec.shapes))


def dead_gradient(form):
    """A local form with the right value and no gradient."""
    return lambda *a, **k: ops.stop_gradient(form(*a, **k))


def double_gradient(form):
    """A local form with the right value and twice the gradient."""
    def wrapped(*a, **k):
        out = form(*a, **k)
        return 2 * out - ops.stop_gradient(out)
    return wrapped


def shifted(position):
    """A local form whose offset argument is off by one."""
    def change(form):
        def wrapped(*a, **k):
            a = list(a)
            a[position] = a[position] + 1
            return form(*a, **k)
        return wrapped
    return change


def winners(**lie):
    """An extreme says something else about who its gradient belongs to."""
    return lambda spec: replace(spec, winners=spec.winners and replace(spec.winners, **lie))


def native_split(_):
    """Split by MindSpore's own kernel, which reads strided cotangents as contiguous."""
    return lambda x, sizes, dim=0: mint.split(x, sizes, dim)


def first_of_one(_):
    """An empty shard gives a single result as a tensor."""
    real = run.on_stand_ins

    def wrapped(*args):
        out = real(*args)
        return out[0] if isinstance(out, tuple) and len(out) == 1 else out
    return wrapped


def as_float(_):
    """An empty shard's results are float32, whatever MindSpore promotes to."""
    real = run.on_stand_ins

    def wrapped(*args):
        out = real(*args)
        return out.astype(ms.float32) if isinstance(out, ms.Tensor) else out
    return wrapped


def connected(_):
    """An empty shard gives a gradient to every operand, also where the call gives none."""
    return lambda original, empty, tensors: run.zeros_of(tensors, empty.results[0][0])


def ties(*shape):
    return RNG.integers(0, 2, shape).astype(np.float32)


def on_two_ranks(program):
    """Whether `program(mesh)` gives what it should where two ranks hold the same, as in a fake world."""
    def right():
        with md.comm.fake_world(2):
            return program(md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",)))
    return right


def slope(identity):
    """Whether the gradient of the sum of squares of a cube's gradient is 36 x^3, in float64."""
    x = RNG.normal(size=(3, 4))

    def program(mesh):
        cube = md.grad(lambda t: (identity(t) ** 3).sum())
        got = md.grad(lambda t: (cube(t) ** 2).sum())(md.DTensor.from_local(ms.Tensor(x), mesh, [S(0)]))
        return np.allclose(got.to_local().asnumpy(), 36 * x ** 3)
    return on_two_ranks(program)


def siblings_refuse(mesh):
    """Whether a write through one view is refused while another, a copy, would not see it."""
    x = md.DTensor.from_local(ms.Tensor(f(4, 5)), mesh, [S(0)])
    copied, shared = x[2:7], x[:, 1:3]
    try:
        shared[:] = -1.0
    except md.errors.OpRuleError:
        return copied.shape == (5, 5)
    return False


def siblings_see(mesh):
    """Whether what was derived from a view is derived anew after a write through its sibling."""
    x = md.DTensor.from_local(ms.Tensor(f(4, 5)), mesh, [S(0)])
    one, other = x[:, 0:3], x[:, 1:4]
    one.redistribute(placements=[R])
    other[:] = -1.0
    return (one.redistribute(placements=[R]).to_local().asnumpy()[:, 1:] == -1).all()


def family_only(real):
    """Views are asked for ancestors and descendants, not for siblings."""
    def descends(x, other):
        return any(kin is other._kin for kin in views._path(x._kin))

    def wrapped(x):
        for other, shared in real(x):
            if descends(x, other) or descends(other, x):
                yield other, shared
    return wrapped


X, Y, V = f(4, 6), f(4, 6), f(6)
FAULTS = [
    Fault("pointwise", "exp of a sum is a sum", "exp", add(P, P), mint.exp, (X,)),
    Fault("pointwise", "silu of a sum is a sum", "silu", add(P, P), mint.nn.functional.silu, (X,)),
    Fault("pointwise", "rsqrt of an average is an average", "rsqrt", add(Partial("avg"), Partial("avg")), mint.rsqrt,
          (abs(X) + 1,)),
    Fault("pointwise", "product of two sums", "mul", add(P, P, P), mint.mul, (X, Y)),
    Fault("pointwise", "sum plus whole", "add", add(P, R, P), mint.add, (X, Y)),
    Fault("pointwise", "sum plus constant", "add", add(P, P), lambda x: x + 1.0, (X,)),
    Fault("pointwise", "rows said to be columns", "mul", outs(S(0), S(1)), mint.mul, (X, Y)),
    Fault("pointwise", "shards said to be whole", "sub", outs(S(1), R), mint.sub, (X, Y)),
    Fault("pointwise", "divisor may be a sum", "div", add(R, P, P), mint.div, (X, abs(Y) + 1)),
    Fault("pointwise", "broadcast rows sharded", "add", add(S(0), R, S(1)), mint.add, (X, V)),
    Fault("pointwise", "maximum of sums is a sum", "maximum", add(P, P, P), mint.maximum, (X, Y)),
    Fault("pointwise", "square of a sum", "square", add(P, P), mint.square, (X,)),
    Fault("pointwise", "comparison of sums", "gt", add(P, R, Partial("max")), mint.gt, (X, Y)),
    Fault("pointwise", "masked fill of a sum by 1", "masked_fill", add(P, R, P), lambda x, m: x.masked_fill(m, 1.0),
          (X, X > 0)),
    Fault("matmul", "contraction said to be whole", "matmul", outs(P, R), mint.matmul, (X, f(6, 3))),
    Fault("matmul", "contraction averages", "matmul", outs(P, Partial("avg")), mint.matmul, (X, f(6, 3))),
    Fault("matmul", "rows of the left are columns", "matmul", outs(S(0), S(1)), mint.matmul, (X, f(6, 4))),
    Fault("matmul", "both operands partial", "matmul", add(P, P, P), mint.matmul, (X, f(6, 3))),
    Fault("matmul", "one side of the contraction", "matmul", add(S(1), R, P), mint.matmul, (f(4, 4), f(4, 4))),
    Fault("matmul", "batch cut as rows", "matmul", outs(S(0), S(1)), mint.bmm, (f(4, 4, 6), f(4, 6, 4))),
    Fault("matmul", "bias added on every rank", "linear", no_local, mint.nn.functional.linear, (X, f(3, 6), f(3))),
    Fault("matmul", "bias without gradient", "linear_bias_once",
          lambda form: lambda x, w, b, share: form(x, w, ops.stop_gradient(b), share),
          mint.nn.functional.linear, (X, f(3, 6), f(3))),
    Fault("matmul", "bias_add on every rank", "bias_add", no_local, nn.Dense(6, 3), (X,)),
    Fault("reduce", "mean of means", "mean", no_local, lambda x: x.mean(0), (f(5, 3),)),
    Fault("reduce", "mean with dead gradient", "mean_of_shard", dead_gradient, mint.mean, (X,)),
    Fault("reduce", "sum over shards said to be whole", "sum", outs(P, R), lambda x: x.sum(0), (X,)),
    Fault("reduce", "sum over shards is a maximum", "sum", outs(P, Partial("max")), lambda x: x.sum(0), (X,)),
    Fault("reduce", "maximum of summands", "max", add(P, P), lambda x: ops.amax(x, 1), (X,)),
    Fault("reduce", "maximum over shards is a sum", "max", outs(Partial("max"), P), lambda x: ops.amax(x, 0), (X,)),
    Fault("reduce", "kept dim shifts", "sum", outs(S(0), S(1)), lambda x: x.sum(1), (f(4, 2, 4),)),
    Fault("reduce", "softmax over shards", "softmax", add(S(1), S(1)), lambda x: mint.softmax(x, 1), (X,)),
    Fault("reduce", "log_softmax of a sum", "log_softmax", add(P, P), lambda x: ops.log_softmax(x, -1), (X,)),
    Fault("view", "uneven split of a dim", "reshape", no_even, lambda x: x.reshape(3, 2, 4), (f(6, 4),)),
    Fault("view", "uneven merge of dims", "reshape", no_even, lambda x: x.reshape(15, 4), (f(5, 3, 4),)),
    Fault("view", "inner dim survives a merge", "reshape", add(S(1), S(0)), lambda x: x.reshape(24), (X,)),
    Fault("view", "transpose keeps the dim", "swap", outs(S(1), S(0)), lambda x: mint.transpose(x, 0, 1), (f(4, 4),)),
    Fault("view", "permute the other way", "permute", add(S(0), S(2)), lambda x: mint.permute(x, (2, 0, 1)), (f(4, 4, 4),)),
    Fault("view", "local shape is the global one", "reshape", no_local, lambda x: x.reshape(4, 2, 3), (X,)),
    Fault("view", "cat along shards", "cat", add(S(0), S(0), S(0)), lambda x, y: mint.cat([x, y], 0), (X, Y)),
    Fault("view", "tile along shards", "tile", add(S(0), S(0)), lambda x: x.tile((2, 1)), (X,)),
    Fault("view", "split along shards", "split", add(S(0), (S(0), S(0))), lambda x: mint.split(x, 2, 0), (X,)),
    Fault("view", "promised shape is transposed", "swap", shape(lambda s: s[::-1]),
          lambda x: mint.transpose(x, 0, 1), (X,)),
    Fault("index", "table rows without offset", "gather_shard", shifted(3), lambda t, i: ops.gather(t, i, 0),
          (f(8, 3), ids(8, 5))),
    Fault("index", "masked rows said to be whole", "gather", outs(P, R), lambda t, i: ops.gather(t, i, 0),
          (f(8, 3), ids(8, 5))),
    Fault("index", "lookup with dead gradient", "gather_shard", dead_gradient, lambda t, i: ops.gather(t, i, 0),
          (f(8, 3), ids(8, 5))),
    Fault("index", "lookup with double gradient", "take_along_shard", double_gradient,
          lambda x, i: mint.gather(x, 1, i), (X, ids(6, 4, 2))),
    Fault("index", "index dim lands elsewhere", "gather", outs(S(0), S(1)), lambda t, i: ops.gather(t, i, 0),
          (f(8, 4), ids(8, 4, 4))),
    Fault("index", "slice of the sharded dim", "slice", add(S(0), S(0)), lambda x: x[2:4], (X,)),
    Fault("index", "triangle without offset", "triu", no_local, lambda x: mint.triu(x, 1), (f(4, 4),)),
    Fault("index", "where of unlike operands", "where", add(R, P, R, P), mint.where, (X > 0, X, Y)),
    Fault("kinds", "strided cotangents of pieces", "SplitTensorView", native_split, lambda x: mint.split(x, 3, 1), (X,)),
    Fault("kinds", "strided cotangents of sizes", "SplitWithSizeView", native_split, lambda x: mint.split(x, [2, 4], 1),
          (X,)),
    Fault("kinds", "each rank a like share of a tie", "max", winners(first=True), lambda x: mint.amax(x, 0), (ties(6, 3),)),
    Fault("kinds", "a tie shared that goes to the first", "first_max", winners(first=False), lambda x: x.max(axis=0),
          (np.float32([1, 1, 1, 0, 1, 0]),)),
    Fault("kinds", "winners over other dims", "min", winners(dims=(1,)), mint.min, (ties(5, 4),)),
    Fault("kinds", "winners of a norm without magnitudes", "vector_norm", winners(magnitude=False),
          lambda x: mint.norm(x, float("inf"), 0), (1 - 2 * ties(6, 3),)),
    Fault("kinds", "a mean of integers sums shares", "mean", add(S(0), P), lambda x: mint.mean(x, 0), (ids(9, 5, 3),)),
    Fault("kinds", "wrapped summands add up in a wider dtype", "sum", add(P, P), lambda x: mint.sum(x, 0),
          (RNG.integers(0, 9, (4, 3)).astype(np.uint8),)),
    Fault("kinds", "one piece is no tuple", "on_stand_ins", first_of_one, lambda x: mint.split(x, 6, 1), (f(2, 6),)),
    Fault("kinds", "an empty shard's own dtype", "on_stand_ins", as_float, lambda x: 1 - x, (X > 0,)),
    Fault("kinds", "an empty shard's gradient of a floor", "on_stand_ins", connected, mint.floor_divide,
          (f(5, 3), f(3) + 3)),
    Fault("order", "a gradient's move is no node", "recording", lambda _: lambda: False,
          slope(lambda t: t.redistribute(placements=[R])), (), vars(execute)),
    Fault("views", "a sibling that is a copy goes stale", "relatives_of", family_only, on_two_ranks(siblings_refuse), (),
          vars(inplace)),
    Fault("views", "a sibling keeps what it was", "relatives_of", lambda _: lambda x: (), on_two_ranks(siblings_see), (),
          vars(inplace)),
]


def caught(fault: Fault) -> bool:
    """Whether the verifier, or the fault's own judge, objects while it is planted; neither may object without it."""
    if fault.where is not None:
        if not fault.call():
            raise SystemExit(f"{fault.lie}: wrong before the fault was planted")
        real = fault.where[fault.target]
        fault.where[fault.target] = fault.change(real)
        clear_cache()
        try:
            return not fault.call()
        finally:
            fault.where[fault.target] = real
            clear_cache()
    clean = check_rule(fault.call, *fault.args, axes=((2,), (3,)))
    if clean.wrong:
        raise SystemExit(f"{fault.lie}: wrong before the fault was planted: {clean.wrong[0]}")
    name = fault.target
    table = next(t for t in (RULES, LOCAL_OPS, CPU, vars(run)) if name in t)
    real = table[name]
    table[name] = fault.change(real) if table is not RULES else lambda call: fault.change(real(call))
    clear_cache()
    report = Report()
    try:
        check_rule(fault.call, *fault.args, axes=((2,), (3,)), report=report)
    finally:
        table[name] = real
        clear_cache()
    return bool(report.wrong)


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults whose family or lie contains this")
    options = parser.parse_args()
    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    chosen = [x for x in FAULTS if options.only in x.family or options.only in x.lie]
    survived = [f"{x.family}: {x.lie}" for x in chosen if not caught(x)]
    print(json.dumps({"planted": len(chosen), "caught": len(chosen) - len(survived), "survived": survived}, indent=1))
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
