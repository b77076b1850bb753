# SPDX-License-Identifier: Apache-2.0
"""What one device says of a program: values, gradients, derivatives of gradients; and slopes, where MindSpore errs in them.

One rank asks plain MindSpore and tells the others, so that an uninitialised value is at least the same one everywhere. A
slope is measured by differences of float64 values alone, with what has no derivative (casts to integers, detached values)
held as it was: it decides where plain MindSpore's gradient and ours differ, or where plain MindSpore has none.
"""
import math
from dataclasses import dataclass, replace

import mindspore as ms
import numpy as np
from mindspore import Tensor

from tests.fuzz.ops import FLOATS, Op, is_float
from tests.fuzz.programs import TABLE, Program, in_float64, input_arrays, run

WRITES = frozenset(op.name for op in TABLE.values() if op.writes)
ONCE = frozenset(op.name for op in TABLE.values() if op.orders < 1)
ROUNDING = 5e-16  # of a value, in a difference of it: float64's, times the weights of `_difference`
STEP = 1e-4  # of the differences; their error is its fourth power, and float64's rounding through it


@dataclass(frozen=True)
class Reference:
    """Arrays of every variable, of the gradients of `wrt`, and of their squares' sum's; None where MindSpore has none."""

    program: Program
    values: tuple
    first: tuple | None
    second: tuple | None


def differentiated(program: Program) -> tuple[int, ...]:
    """The inputs with gradients; none if all of them are empty."""
    floats = {i: shape for i, (shape, dtype) in enumerate(program.inputs) if dtype in FLOATS}
    return tuple(floats) if any(0 not in shape for shape in floats.values()) else ()


def goes_twice(program: Program) -> bool:
    return bool(program.seed % 2) and max((math.prod(s) for s, _ in program.inputs), default=0) <= 256


def loss_of(program: Program, table=TABLE):
    """A weighted sum of what the program ends in, without its writes; and of what goes twice, where it shall."""
    skip = WRITES | ONCE if goes_twice(program) else WRITES
    wrt = differentiated(program)

    def loss(*inputs):
        values = run(program, list(inputs), skip, table)
        ran = [s for s in program.steps if s.op not in skip and all(values[t] is not None for t in s.takes)]
        used = {i for s in ran for i in s.takes}
        ends = [(i, v) for i, v in enumerate(values)
                if v is not None and is_float(v) and (i not in used or i in wrt)]
        return sum((v.astype(ms.float64) * math.sin(i + 1)).sum() for i, v in ends if 0 not in v.shape)
    return loss


def derivative(take, program: Program, order: int):
    """The function of the inputs that is compared; `take` is one device's `grad`, or ours."""
    loss, wrt = loss_of(program), differentiated(program)
    inner = take(loss, wrt)
    if order == 1:
        return inner
    return take(lambda *xs: sum((g * g).sum() for g in inner(*xs)), wrt)


def refer(program: Program) -> Reference:
    """What plain MindSpore says."""
    plain = run(program, [Tensor(a) for a in input_arrays(program)])
    derived = [_derived(program, order) if order == 1 or goes_twice(program) else None for order in (1, 2)]
    return Reference(program, tuple(v if v is None else v.asnumpy() for v in plain), *derived)


def _derived(program: Program, order: int) -> tuple | None:
    if not differentiated(program):
        return None
    try:
        return tuple(g.asnumpy() for g in derivative(ms.grad, program, order)(*map(Tensor, input_arrays(program))))
    except Exception:  # plain MindSpore has no such derivative
        ms.common.api._pynative_executor.clear_res()
        return None


# -- slopes -----------------------------------------------------------------------------------------------------------
def direction(a: np.ndarray) -> np.ndarray:
    x = np.random.default_rng(5).normal(size=a.shape)
    return x / max(np.linalg.norm(x), 1e-9)


def slope(program: Program, order: int, i: int, gradients) -> tuple[float, float]:
    """The slope, along `direction` of input i, of the loss; for order 2 of the gradients' squares' sum. And its rounding.

    That one is 2 g . H d: the mixed difference of the loss along d and along the `gradients` g, held fixed.
    """
    wrt, arrays = differentiated(program), input_arrays(program)
    held: list = []
    loss = loss_of(program, _holding(held))
    along = {i: direction(arrays[i])}

    def at(moves) -> float:
        moved = [a if a.dtype.kind != "f" else a.astype(np.float64) + sum((eps * d[k] for eps, d in moves if k in d),
                                                                          np.zeros(a.shape))
                 for k, a in enumerate(arrays)]
        held.append(0)
        return float(loss(*map(Tensor, moved)).asnumpy())
    rounding = ROUNDING * abs(at([]))
    if order == 1:
        return _difference(lambda e: at([(e, along)]), STEP), rounding / STEP
    size = max(np.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in gradients)), 1e-9)
    unit = {k: np.asarray(g, np.float64) / size for k, g in zip(wrt, gradients)}
    wide = 10 * STEP  # rounding is divided by its square here
    mixed = _difference(lambda e: _difference(lambda s: at([(e, along), (s, unit)]), wide), wide)
    return 2 * size * mixed, 2 * size * rounding / wide ** 2


def slope_of_gradients(program: Program, i: int) -> list[tuple[float, float]]:
    """The slope, along `direction` of input i, of the squares' sum of plain MindSpore's first gradients.

    Its rounding, told too, is divided by the step once only; but it is there, and right, only where those gradients are.
    """
    wide, arrays = in_float64(program), input_arrays(program)
    held: list = []
    loss = loss_of(wide, _holding(held))

    def at(e: float, take) -> list:
        moved = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
        moved[i] = moved[i] + e * direction(arrays[i])
        held.append(0)
        return take(loss)(*map(Tensor, moved))

    def squares(e: float) -> float:
        return sum(float((g.asnumpy() ** 2).sum()) for g in at(e, lambda f: ms.grad(f, differentiated(program))))
    try:
        at(0.0, lambda f: f)
        return [(_difference(squares, STEP), ROUNDING * squares(0.0) / STEP)]
    except Exception:  # in float64 plain MindSpore has no such gradient
        ms.common.api._pynative_executor.clear_res()
        return []


def _difference(f, h: float) -> float:
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def _holding(held: list) -> dict[str, Op]:
    """The ops, with floats kept in float64 and with what has no derivative as in the first run.

    `held` gets an item before each run; the first run fills what is kept.
    """
    kept: list = []
    turn = [0, 0]  # the run, the place in it

    def hold(x):
        if turn[0] != len(held):
            turn[:] = [len(held), 0]
        if len(held) == 1:
            kept.append(x)
        turn[1] += 1
        return kept[turn[1] - 1]

    def changed(op: Op) -> Op:
        def run(xs, *parameters):
            if op.name == "detach":
                return hold(xs[0] * 1) + xs[0] * 0.5
            if op.name == "cast" and parameters[0] in FLOATS:
                parameters = ("float64",)
            result = op.run(xs, *parameters)
            return result if isinstance(result, tuple | list) or is_float(result) else hold(result)
        return replace(op, run=run)
    return {name: changed(op) for name, op in TABLE.items()}
