# SPDX-License-Identifier: Apache-2.0
"""A program on real ranks against its reference: values, structure, dtypes and kinds of all variables, and derivatives.

Variables are compared at the end, so that a write that reached too much or too little shows. All ranks do this together
and agree about what came out. A step that is refused on all of them is left out, and the rest is checked.
"""
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np

from ms_dtensor import DTensor, grad, init_device_mesh
from ms_dtensor.errors import CommError, DTensorError, OpRuleError
from tests.fuzz.judged import agreed, references
from tests.fuzz.programs import Program, grids, in_float64, lay_out, minimised, run, without
from tests.fuzz.reference import (
    Reference,
    derivative,
    differentiated,
    direction,
    goes_twice,
    input_arrays,
    refer,
    slope,
    slope_of_gradients,
)


@dataclass
class Result:
    """What one program showed on this rank."""

    wrong: list[str] = field(default_factory=list)
    refused: str = ""
    step: int | None = None  # the refused one
    plain_wrong: int = 0
    orders: int = 0  # of derivatives compared


def close(got: np.ndarray, want: np.ndarray, rtol: float) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype.kind != "f":
        return bool((got == want).all())
    return bool(np.abs(got - want).max(initial=0) <= rtol * max(1.0, np.abs(want).max(initial=0)))


def check(reference: Reference, mesh) -> Result:
    """Runs a program on DTensors, forward, backward and once more."""
    out, at, program = Result(), [], reference.program
    exact = all(v is None or v.dtype != np.float32 for v in reference.values)
    try:
        ours = run(program, lay_out(program, mesh), at=at)
        for i, (x, y) in enumerate(zip(ours, reference.values)):
            if y is None:
                continue
            if not isinstance(x, DTensor):
                out.wrong.append(f"v{i} is a {type(x).__name__}")
            elif not close(x.full_tensor().asnumpy(), y, 1e-8 if exact else 3e-4):
                out.wrong.append(f"v{i}: {x} differs from {y.dtype}{list(y.shape)}")
        if differentiated(program):
            check_derivatives(reference, mesh, exact, out)
    except CommError:
        raise
    except DTensorError as e:
        out.refused, out.step = f"{type(e).__name__}: {e.attempt}", at[0] if at else None
    except Exception as e:
        out.wrong.append(f"{type(e).__name__}: {e}"[:500])
    return out


def check_derivatives(reference: Reference, mesh, exact: bool, out: Result) -> None:
    """First derivatives, and second ones where plain MindSpore has them."""
    program = reference.program
    try:
        firsts = _derived(program, 1, mesh)
    except DTensorError:
        raise
    except Exception as e:
        if reference.first is not None:
            raise
        out.refused = f"{type(e).__name__}, as on one device"
        ms.common.api._pynative_executor.clear_res()
        return
    gradients = _compared(reference, 1, firsts, None, exact, mesh, out)
    if not goes_twice(program) or reference.second is None or gradients is None:
        return
    try:
        seconds = _derived(program, 2, mesh)
    except OpRuleError as e:
        if "derivative of its gradient" not in e.attempt:
            raise
        return
    _compared(reference, 2, seconds, gradients, exact, mesh, out)


def _derived(program: Program, order: int, mesh) -> tuple:
    got = derivative(grad, program, order)(*lay_out(program, mesh))
    return got if isinstance(got, tuple) else (got,)


def _compared(reference: Reference, order: int, derived, gradients, exact: bool, mesh,
              out: Result) -> list[np.ndarray] | None:
    """The derivatives' arrays, if they are right."""
    program, wanted = reference.program, (reference.first, reference.second)[order - 1]
    what, wrt = ("gradient", "second derivative")[order - 1], differentiated(program)
    arrays = []
    for i, g in zip(wrt, derived):
        if not isinstance(g, DTensor):
            out.wrong.append(f"{what} of v{i} is a {type(g).__name__}")
            return None
        arrays.append(g.full_tensor().asnumpy())
    rtol = (1e-8 if exact else 3e-4) * (1, 10)[order - 1]
    for k, (i, have) in enumerate(zip(wrt, arrays)):
        if wanted is not None and close(have, wanted[k], rtol):
            continue
        slopes = [slope(program, order, i, gradients)]
        if order == 2:
            slopes += slope_of_gradients(program, i)
        along = direction(have)
        told = float((have.astype(np.float64) * along).sum())
        size = max(1.0, float(np.linalg.norm(have.astype(np.float64))))  # a slope may be a small rest of large terms
        judges = [(s, rounding if rounding <= COARSE * size else 0.0) for s, rounding in slopes]
        measured, rounding = min(judges, key=lambda judge: abs(judge[0] - told) - judge[1])
        if have.dtype == input_arrays(program)[i].dtype and abs(told - measured) <= SLOPES[exact, order] * size + rounding:
            out.plain_wrong += 1
            continue
        if not exact and abs(told - measured) <= 30 * SLOPES[exact, order] * size and _right_in_float64(program, mesh):
            continue  # 1 - tanh(x) ** 2 of a large x has few digits in float32, on one device too
        plain = "none" if wanted is None else f"{float((wanted[k].astype(np.float64) * along).sum()):.8g}"
        out.wrong.append(f"{what} of v{i}: slope {told:.8g}, plain {plain}, measured {measured:.8g}")
    out.orders = order
    return None if out.wrong else arrays


def _right_in_float64(program: Program, mesh) -> bool:
    """Whether the same program without float32 is right: then a small difference was rounding."""
    out = Result()
    check_derivatives(refer(in_float64(program)), mesh, True, out)
    return not out.wrong


# Of a difference quotient in float64; for programs with float32 in them, of float32 sums of some hundred terms.
COARSE = 1e-2  # rounding above this excuses nothing
SLOPES = {(True, 1): 1e-7, (True, 2): 1e-5, (False, 1): 1e-3, (False, 2): 1e-3}


class Judge:
    """Checks a program on all ranks without the steps that all refuse; what is wrong is made small."""

    def __init__(self, world, program: Program, want: Reference):
        self.world, self.want, self.noted = world, want, dict[str, int]()
        shapes = grids(world.size)
        self.mesh = init_device_mesh("cpu", shapes[program.seed % len(shapes)])

    def run(self) -> list[str]:
        reference, refused = self.want, 0
        while True:
            program, result = reference.program, check(reference, self.mesh)
            texts = agreed(self.world, f"{result.refused}|{result.step}|{bool(result.wrong)}")
            failed = any(t.endswith("True") for t in texts)
            if failed or len(set(texts)) > 1:
                break
            refused += bool(result.refused)
            if result.step is None or len(program.steps) == 1:
                break
            reference = references(refer, [without(program, result.step)])[0]
        self.noted = {"steps": len(program.steps), "gradients": int(result.orders > 0), "second": int(result.orders > 1),
                      "plain_mindspore_wrong": result.plain_wrong, "refused": refused}
        if failed:
            small = minimised(program, lambda p: any(agreed(self.world, "x" if self.wrong(p) else "")))
            return [*(self.wrong(small) or result.wrong)[:3], str(small)]
        return [f"the ranks parted: {texts}", str(program)] if len(set(texts)) > 1 else []

    def wrong(self, program: Program) -> list[str]:
        return check(references(refer, [program])[0], self.mesh).wrong
