# SPDX-License-Identifier: Apache-2.0
"""Random ops: pointwise for layouts, and every element's number is decided by its *global* index.

MindSpore's own generators know local shapes only, so each shard would repeat the same mask. All ops here draw from the
one stream of `ops/rng.py` instead, on every device. A dropout is linear given its mask, so a Partial passes.
"""
from __future__ import annotations

from collections.abc import Callable

from ...errors import OpRuleError
from .create import like_cases
from .pointwise import shard_cases
from .spec import SUMS, Call, Case, Local, LocalCall, OpSpec, R, broadcast_shapes

NAMES = """
dropout:Dropout:input keep_prob seed0 seed1
dropout_channels:Dropout2D,Dropout3D:input keep_prob
func_dropout:FuncDropoutExt:input p training inplace seed offset
func_dropout_channels:Dropout2dExt:input p training inplace seed offset
rand_like:RandLikeExt:input seed offset dtype device
randn_like:RandnLike:input seed offset dtype device
randint_like:RandIntLike:input low high seed offset dtype device
bernoulli:BernoulliExt:p seed offset
bernoulli_like:Bernoulli:input p
normal_of:NormalTensorTensor,NormalTensorFloat,NormalFloatTensor:mean std seed offset
multinomial:Multinomial,MultinomialExt:input num_samples replacement seed offset
"""


def _alike(call: Call, count: int, linear: bool) -> tuple[Case, ...]:
    """Operand 0 and all `count` results sharded alike; other operands (seeds) replicated."""
    x = call.operands[0]
    cases = call.like_first((d for d, n in enumerate(x.shape) if n != 1), results=count)
    return (*cases, *(call.case({x.index: p}, p, *(R,) * (count - 1)) for p in (SUMS if linear else ())))


_RIGHT: dict[str, tuple[Callable, str]] = {
    **dict.fromkeys(("p", "keep_prob"), (lambda v: 0 <= v <= 1, "a probability, from 0 to 1")),
    "std": (lambda v: v >= 0, "0 or more"), **dict.fromkeys(("rate", "num_samples"), (lambda v: v > 0, "above 0")),
}


def checked(rule: Callable[[Call], OpSpec]) -> Callable[[Call], OpSpec]:
    """`rule`, after a look at the numbers: what no distribution has is refused before the stream goes on, on every rank."""
    def check(call: Call) -> OpSpec:
        args = {**call.args.get("attrs", {}), **call.args}
        wrong = [f"{k!r} must be {words}, but got {args[k]!r}" for k, (right, words) in _RIGHT.items()
                 if isinstance(args.get(k), int | float) and not right(args[k])]
        low, high = args.get("low"), args.get("high")
        if isinstance(low, int | float) and isinstance(high, int | float):
            whole = call.op != "uniform_into"
            if low > high or whole and low == high:
                wrong.append(f"'low' must be below 'high', but got {low} and {high}")
            elif whole and not -1 << 63 <= low < high <= 1 << 63:
                wrong.append(f"'low' and 'high' must fit int64, but got {low} and {high}")
        if wrong:
            x = call.operands[0]
            raise OpRuleError(f"For '{call.op}', {'; '.join(wrong)}.", f"{x.dtype}{list(x.shape)}",
                              "There are no such random numbers. None was drawn; the stream is where it was.",
                              "pass other numbers")
        return rule(call)
    return check


def _box(at: Local):
    return at.outs[0].shape, at.outs[0].local_box(at.coordinate)


def dropout(call: Call) -> OpSpec:
    """The classic `Dropout` (result, mask); `keep_prob` is an argument or an attribute."""
    x = call.operands[0]
    keep = call.get("keep_prob", call.args.get("attrs", {}).get("keep_prob", 0.5))
    form = "dropout" if call.op == "dropout" else "dropout_channels"
    return OpSpec((x.shape, x.shape), _alike(call, 2, linear="int" not in x.dtype),
                  lambda at: LocalCall(form, (x, float(keep), *_box(at))))


def func_dropout(call: Call) -> OpSpec:
    """`F.dropout`, `mint.nn.Dropout`: one result."""
    x = call.operands[0]
    if call.get("inplace"):
        raise OpRuleError(f"For '{call.op}', 'inplace' is not supported on DTensors.", "",
                          "MindSpore 2.10 itself does not write in place on every device.", "leave out inplace=True")
    p = float(call.get("p", 0.5)) if call.get("training", False) else 0.0

    def local(at: Local) -> LocalCall:  # where nothing is dropped nothing is drawn
        return LocalCall(call.op, (x, 1.0 - p, *_box(at))) if p else LocalCall("clone", (x,))
    return OpSpec((x.shape,), _alike(call, 1, linear=True), local)


def like(call: Call) -> OpSpec:
    """New numbers in the shape and layout of the operand, whose values do not matter."""
    x = call.operands[0]
    dtype = call.args.get("dtype")
    extra = (int(call.args["low"]), int(call.args["high"])) if call.op == "randint_like" else ()
    return OpSpec((x.shape,), tuple(like_cases(call)), lambda at: LocalCall(call.op, (x, *extra, dtype, *_box(at))))


def bernoulli(call: Call) -> OpSpec:
    """1 with the probability that each element gives, else 0."""
    p = call.operands[0]
    return OpSpec((p.shape,), _alike(call, 1, linear=False), lambda at: LocalCall("bernoulli", (p, *_box(at))))


def bernoulli_like(call: Call) -> OpSpec:
    """The classic `ops.bernoulli(input, p)`: shape and layout of `input`, probabilities `p` broadcast to it."""
    x, p = call.args["input"], call.args["p"]
    operands = [o.shape for o in call.operands]
    return OpSpec((x.shape,), tuple(shard_cases(operands, x.shape)),
                  lambda at: LocalCall("bernoulli_like", (x, p, *_box(at))), (x.dtype,))


def normal_of(call: Call) -> OpSpec:
    """Normal numbers with a mean and a deviation per element."""
    mean, std = call.args["mean"], call.args["std"]
    members = [v for v in (mean, std) if hasattr(v, "ndim")]
    shape = broadcast_shapes(*(m.shape for m in members))
    rest = (R,) * (len(call.operands) - len(members))
    cases = tuple(Case((*c.ins, *rest), c.outs) for c in shard_cases([m.shape for m in members], shape))
    return OpSpec((shape,), cases, lambda at: LocalCall("normal_of", (mean, std, *_box(at))), (members[0].dtype,))


def into(call: Call) -> OpSpec:
    """`x.normal_()` and its kin: new numbers in x's place; a parameter may be a tensor only for `bernoulli_`."""
    x, p = call.args["input"], call.args.get("p")
    seeds = tuple(o.index for o in call.operands if o is not x and o is not p)
    members = [o for o in call.operands if o.index not in seeds]
    cases = [call.case({o.index: p for o, p in zip(members, c.ins)}, *c.outs)
             for c in shard_cases([o.shape for o in members], x.shape)]
    static = [v for k, v in call.args.items() if k not in ("input", "seed", "offset", "attrs")]
    if any(hasattr(v, "ndim") for v in static) and call.op != "bernoulli_into":
        raise OpRuleError(f"For '{call.op}', a distribution's parameters must be numbers.", "", "", "pass floats")
    form, static = ("bernoulli_like", static) if call.op == "bernoulli_into" else (call.op, [*static, None])
    return OpSpec((x.shape,), tuple(cases), lambda at: LocalCall(form, (x, *static, *_box(at))))


def multinomial(call: Call) -> OpSpec:
    """Places drawn by the weights of each row, which must be whole; with replacement or without."""
    p, count = call.operands[0], int(call.args["num_samples"])
    again = bool(call.get("replacement", "attrs" in call.args))
    shape = (*p.shape[:-1], count)
    if not again and count > p.shape[-1]:
        raise OpRuleError("For 'multinomial', there are fewer weights than samples.", f"weights {list(p.shape)}",
                          f"Without replacement, {count} samples need as many weights.", "replacement=True")
    cases = call.like_first(range(p.ndim - 1))
    return OpSpec((shape,), tuple(cases), lambda at: LocalCall("multinomial", (
        p, count, again, "attrs" not in call.args and call.get("dtype") is None, *_box(at))))


RULES = {op: checked(rule) for op, rule in {
    "dropout": dropout, "dropout_channels": dropout, "func_dropout": func_dropout, "func_dropout_channels": func_dropout,
    "rand_like": like, "randn_like": like, "randint_like": like, "bernoulli": bernoulli, "bernoulli_like": bernoulli_like,
    "normal_of": normal_of, "multinomial": multinomial,
    **dict.fromkeys(("normal_into", "uniform_into", "random_into", "exponential_into", "bernoulli_into"), into)}.items()}
