# SPDX-License-Identifier: Apache-2.0
"""Random programs: made by running them on plain tensors, then run on DTensors of random layouts and compared.

A program is inputs and steps; a step names an `Op`, the variables it takes and its static arguments. What plain MindSpore
refuses is never part of one. Values, structure, dtypes and kinds of all variables are compared at the end, so that a write
that reached too much or too little shows; gradients and derivatives of gradients are compared too, and where plain
MindSpore's own do not agree with finite differences, those decide. Every rank makes and runs the same program.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ms_dtensor import DTensor, Partial, Replicate, Shard, comm, distribute_tensor, grad
from ms_dtensor.errors import CommError, DTensorError, OpRuleError
from tests.fuzz.ops import FLOATS, OPS, Op, dtype_of, is_float


def _redistribute(xs, seed):
    x = xs[0]
    if isinstance(x, DTensor):
        placed = placements(np.random.default_rng(seed), x.device_mesh, x.shape)
        return x.redistribute(placements=placed)
    return x * 1 if dtype_of(x) != "bool" else x.copy()


def _refused(xs):
    """A call that fails everywhere; the program goes on."""
    try:
        mint.reshape(xs[0], (math.prod(xs[0].shape) + 1, 2))
    except CommError:
        raise
    except Exception:
        return xs[0] * 1 if dtype_of(xs[0]) != "bool" else mint.logical_not(xs[0])
    raise AssertionError("an impossible reshape was accepted")


EXTRA = (Op("redistribute", "*", _redistribute, lambda rng, xs: (int(rng.integers(1 << 30)),)), Op("refused", "*", _refused))
TABLE = {op.name: op for op in (*OPS, *EXTRA)}
MOST = 2048  # elements of a variable


@dataclass(frozen=True)
class Step:
    op: str
    takes: tuple[int, ...]
    parameters: tuple
    gives: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    seed: int
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    steps: tuple[Step, ...] = ()

    def __str__(self):
        lines = [f"seed {self.seed}", *(f"  v{i} = {dtype}{list(shape)}" for i, (shape, dtype) in enumerate(self.inputs))]
        for s in self.steps:
            gives = ", ".join(f"v{i}" for i in s.gives)
            lines.append(f"  {gives} = {s.op}({', '.join(f'v{i}' for i in s.takes)}; {', '.join(map(repr, s.parameters))})")
        return "\n".join(lines)


def input_arrays(program: Program) -> list[np.ndarray]:
    """The inputs' values; every rank's are the same."""
    rng = np.random.default_rng([program.seed, 1])
    made = []
    for shape, dtype in program.inputs:
        x = rng.normal(size=shape)
        made.append(x > 0 if dtype == "bool" else (x * 3 if dtype in ("int32", "int64") else x).astype(dtype))
    return made


def generate(seed: int) -> Program:
    """A program of 10 to 30 steps that plain MindSpore runs."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(("float64", "float64", "float32")))
    inputs = []
    for i in range(int(rng.integers(2, 4))):
        shape = tuple(int(n) for n in rng.choice((1, 2, 3, 4, 5, 6, 8), int(rng.integers(1, 4))))
        if rng.integers(25) == 0:
            shape = (*shape[:-1], 0)
        inputs.append((shape, dtype if i == 0 or rng.integers(3) else str(rng.choice(("int64", "int32", "bool")))))
    if rng.integers(2):  # two that match
        inputs.append(inputs[0])
    program = Program(seed, tuple(inputs))
    values = [Tensor(a) for a in input_arrays(program)]
    steps, ops = [], list(TABLE.values())
    weights = np.array([0.4 if op.writes else 1.0 for op in ops])
    wanted = int(rng.integers(10, 31))
    for _ in range(wanted * 12):
        if len(steps) == wanted:
            break
        op = ops[int(rng.choice(len(ops), p=weights / weights.sum()))]
        recent = rng.integers(0, len(values), len(op.kinds)) if rng.integers(2) else \
            len(values) - 1 - np.minimum(rng.geometric(0.4, len(op.kinds)) - 1, len(values) - 1)
        takes = tuple(int(i) for i in recent)
        xs = [values[i] for i in takes]
        if not op.takes(xs):
            continue
        parameters = op.draw(rng, xs)
        if parameters is None:
            continue
        try:
            results = op.run(xs, *parameters)
        except Exception:
            continue
        results = results if isinstance(results, tuple | list) else (results,)
        arrays = [r.asnumpy() for r in results]
        if any(a.size > MOST for a in arrays) or not all(_steady(a) for a in arrays):
            if op.writes:
                return replace(program, steps=tuple(steps))  # what was written stays
            continue
        first = len(values)
        values.extend(results)
        steps.append(Step(op.name, takes, parameters, tuple(range(first, len(values)))))
    return replace(program, steps=tuple(steps))


def _steady(a: np.ndarray) -> bool:
    """Finite, moderate, and no number so near another that a comparison or a cast could go either way."""
    if a.dtype.kind != "f" or not a.size:
        return True
    return bool(np.isfinite(a).all() and np.abs(a).max() < 1e4)


def run(program: Program, values: list, skip=frozenset()) -> list:
    """All variables after the program; `values` are the inputs."""
    values = [*values, *[None] * (max((i for s in program.steps for i in s.gives), default=-1) + 1 - len(values))]
    for step in program.steps:
        if step.op in skip or any(values[i] is None for i in step.takes):
            continue
        results = TABLE[step.op].run([values[i] for i in step.takes], *step.parameters)
        several = isinstance(results, tuple | list)
        if len(results if several else (results,)) != len(step.gives):
            raise AssertionError(f"{step}: {type(results).__name__} came")
        for i, r in zip(step.gives, results if several else (results,)):
            values[i] = r
    return values


# -- layouts ----------------------------------------------------------------------------------------------------------


def grids(size: int) -> list[tuple[int, ...]]:
    """Meshes of one to three axes over so many ranks."""
    return {4: [(4,), (2, 2), (1, 4), (2, 1, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}[size]


def placements(rng, mesh, shape, partial: bool = False) -> list:
    """One for each axis; a dim may be cut by several, uneven and empty shards included."""
    options = [Replicate(), *(Shard(d) for d in range(len(shape))), *(Shard(d) for d in range(len(shape)))]
    placed = [options[int(rng.integers(len(options)))] for _ in range(mesh.ndim)]
    if partial:
        placed[int(rng.integers(mesh.ndim))] = Partial()
    return placed


def lay_out(program: Program, mesh) -> list[DTensor]:
    """The inputs as DTensors of random layouts, some of them as sums of summands."""
    rng = np.random.default_rng([program.seed, 2])
    done = []
    for array in input_arrays(program):
        placed = placements(rng, mesh, array.shape, array.dtype.kind in "fi" and rng.integers(5) == 0)
        axis = next((a for a, p in enumerate(placed) if p.is_partial()), None)
        if axis is None:
            done.append(distribute_tensor(Tensor(array), mesh, placed, src_data_rank=None))
            continue
        others = [(rng.normal(size=array.shape) * 3).astype(array.dtype) for _ in range(mesh.shape[axis] - 1)]
        summands = [*others, array - sum(others, np.zeros_like(array))]
        whole = [Replicate() if p.is_partial() else p for p in placed]
        mine = distribute_tensor(Tensor(summands[mesh.get_local_rank(axis)]), mesh, whole, src_data_rank=None).to_local()
        done.append(DTensor.from_local(mine, mesh, placed, shape=array.shape))
    return done


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one program showed on this rank."""

    wrong: list[str] = field(default_factory=list)
    refused: str = ""
    plain_wrong: int = 0
    gradients: int = 0
    seconds: int = 0  # second derivatives


def tolerance(program: Program, values) -> float:
    return 1e-8 if all(dtype_of(v) != "float32" for v in values if v is not None) else 3e-4


def close(got: np.ndarray, want: np.ndarray, rtol: float) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype.kind != "f":
        return bool((got == want).all())
    return bool(np.abs(got - want).max(initial=0) <= rtol * max(1.0, np.abs(want).max(initial=0)))


def check(program: Program, mesh) -> Result:
    """Runs a program on plain tensors and on DTensors, forward, backward and once more."""
    out = Result()
    plain = run(program, [Tensor(a) for a in input_arrays(program)])
    rtol = tolerance(program, plain)
    try:
        ours = run(program, lay_out(program, mesh))
        for i, (x, y) in enumerate(zip(ours, plain)):
            if y is None:
                continue
            if not isinstance(x, DTensor):
                out.wrong.append(f"v{i} is a {type(x).__name__}")
            elif not close(x.full_tensor().asnumpy(), y.asnumpy(), rtol):
                out.wrong.append(f"v{i}: {x} differs from {y.dtype}{list(y.shape)}")
        check_gradients(program, mesh, out, rtol)
    except CommError:
        raise
    except DTensorError as e:
        out.refused = f"{type(e).__name__}: {e.attempt}"
    except Exception as e:
        out.wrong.append(f"{type(e).__name__}: {e}"[:500])
    return out


def check_gradients(program: Program, mesh, out: Result, rtol: float) -> None:
    """First derivatives without writes, second ones where plain MindSpore has them for all that remains."""
    wrt = tuple(i for i, (_, dtype) in enumerate(program.inputs) if dtype in FLOATS)
    arrays = input_arrays(program)
    writes = frozenset(op.name for op in TABLE.values() if op.writes)
    once = frozenset(op.name for op in TABLE.values() if op.orders < 1) | {"detach"}  # differences see through it
    first = _loss(program, wrt, writes)
    out.gradients += _compare(first, lambda take, f: take(f, wrt), wrt, arrays, program, mesh, out, rtol, "gradient")
    if program.seed % 2 and max((math.prod(s) for s, _ in program.inputs), default=0) <= 256:
        second = _loss(program, wrt, writes | once)

        def twice(take, f):
            inner = take(f, wrt)
            return take(lambda *xs: sum((g * g).sum() for g in inner(*xs)), wrt)
        try:
            out.seconds += _compare(second, twice, wrt, arrays, program, mesh, out, rtol * 10, "second derivative")
        except OpRuleError as e:
            if "derivative of its gradient" not in e.attempt:
                raise


def _loss(program: Program, wrt, skip):
    def loss(*inputs):
        values = run(program, list(inputs), skip)
        ran = [s for s in program.steps if s.op not in skip and all(values[t] is not None for t in s.takes)]
        used = {i for s in ran for i in s.takes}
        ends = [(i, v) for i, v in enumerate(values)
                if v is not None and is_float(v) and (i not in used or i in wrt)]
        return sum((v.astype(ms.float64) * math.sin(i + 1)).sum() for i, v in ends if 0 not in v.shape)
    return loss


def _compare(loss, derive, wrt, arrays, program, mesh, out: Result, rtol, what) -> int:
    plain_inputs = [Tensor(a) for a in arrays]
    if all(0 in a.shape for a in arrays):
        return 0
    try:
        want = derive(ms.grad, loss)(*plain_inputs)
    except Exception:  # plain MindSpore has no such derivative
        ms.common.api._pynative_executor.clear_res()
        return 0
    got = derive(grad, loss)(*lay_out(program, mesh))
    want, got = (x if isinstance(x, tuple | list) else (x,) for x in (want, got))
    for i, w, g in zip(wrt, want, got):
        if not isinstance(g, DTensor):
            out.wrong.append(f"{what} of v{i} is a {type(g).__name__}")
            continue
        have = g.full_tensor().asnumpy()
        if close(have, w.asnumpy(), rtol):
            continue
        measured, scale = _slope(loss, derive, i, wrt, arrays, what)
        along = _direction(arrays[i])
        told = [float((a.astype(np.float64) * along).sum()) for a in (have, w.asnumpy())]
        if abs(told[0] - measured) <= 1e-3 * max(1e-3, abs(scale)):
            out.plain_wrong += 1
        else:
            out.wrong.append(f"{what} of v{i}: slope {told[0]:.6g}, plain {told[1]:.6g}, measured {measured:.6g}")
    return 1


def _direction(a: np.ndarray) -> np.ndarray:
    x = np.random.default_rng(5).normal(size=a.shape)
    return x / max(np.linalg.norm(x), 1e-9)


def _slope(loss, derive, i, wrt, arrays, what) -> tuple[float, float]:
    """The slope of what is differentiated along a direction of input i, by central differences in float64."""
    def at(eps):
        moved = [a.astype(np.float64) + (eps * _direction(a) if k == i else 0) if a.dtype.kind == "f" else a
                 for k, a in enumerate(arrays)]
        xs = [Tensor(a) for a in moved]
        if what == "gradient":
            return float(loss(*xs).asnumpy())
        grads = ms.grad(loss, wrt)(*xs)
        return sum(float((g.asnumpy() ** 2).sum()) for g in (grads if isinstance(grads, tuple) else (grads,)))
    eps = 1e-5
    slope = (at(eps) - at(-eps)) / (2 * eps)
    return slope, slope


def minimised(program: Program, fails) -> Program:
    """A program with as few steps as `fails(program)` leaves; all ranks ask it alike."""
    steps = list(program.steps)
    for k in reversed(range(len(steps))):
        if k >= len(steps):
            continue
        gone = set(steps[k].gives)
        rest = []
        for s in (*steps[:k], *steps[k + 1:]):
            if gone & set(s.takes):
                gone |= set(s.gives)
            else:
                rest.append(s)
        if rest and fails(replace(program, steps=tuple(rest))):
            steps = rest
    return replace(program, steps=tuple(steps))


def agreed(world, text: str) -> list[str]:
    """Every rank's text."""
    return list(comm.group(tuple(range(world.size))).all_gather_object(text))
