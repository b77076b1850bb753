# SPDX-License-Identifier: Apache-2.0
"""Random programs: made by running them on plain tensors, made smaller, and laid out as DTensors.

A program is inputs and steps; a step names an `Op`, the variables it takes and its static arguments. What plain MindSpore
refuses is never part of one. `reference.py` says what one device gets, `check.py` compares.
"""
import math
from dataclasses import dataclass, replace

import numpy as np
from mindspore import Tensor, mint

from ms_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from ms_dtensor.errors import CommError
from ms_dtensor.redistribute.plan import relabels
from tests.fuzz.ops import OPS, Op, dtype_of


def _redistribute(xs, seed):
    x = xs[0]
    if isinstance(x, DTensor):
        moved = x.redistribute(placements=placements(np.random.default_rng(seed), x.device_mesh, x.shape))
        if not relabels(x.layout, moved.layout):  # to what is there already: the same tensor, or one on its storage
            return moved
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
        if any(a.size > MOST for a in arrays) or not all(_steady(a) for a in arrays) or \
                (op.jumps and not _clear(*op.jumps(*(x.asnumpy() for x in xs), *parameters))):
            if op.writes:
                return replace(program, steps=tuple(steps))  # what was written stays
            continue
        first = len(values)
        values.extend(results)
        steps.append(Step(op.name, takes, parameters, tuple(range(first, len(values)))))
    return replace(program, steps=tuple(steps))


def _steady(a: np.ndarray) -> bool:
    """Finite and moderate."""
    if a.dtype.kind != "f" or not a.size:
        return True
    return bool(np.isfinite(a).all() and np.abs(a).max() < 1e4)


def _clear(a: np.ndarray, b: np.ndarray) -> bool:
    """Floats that no rounding and no step of a difference quotient brings together; zeros may be equal: they stay so."""
    return a.dtype.kind != "f" or not ((np.abs(a - b) < 0.02) & ~((a == 0) & (b == 0))).any()


def run(program: Program, values: list, skip=frozenset(), table=TABLE, at: list | None = None) -> list:
    """All variables after the program; `values` are the inputs. `at` gets the step that runs."""
    values = [*values, *[None] * (max((i for s in program.steps for i in s.gives), default=-1) + 1 - len(values))]
    for k, step in enumerate(program.steps):
        if at is not None:
            at[:] = [k]
        if step.op in skip or any(values[i] is None for i in step.takes):
            continue
        results = table[step.op].run([values[i] for i in step.takes], *step.parameters)
        several = isinstance(results, tuple | list)
        if len(results if several else (results,)) != len(step.gives):
            raise AssertionError(f"{step}: {type(results).__name__} came")
        for i, r in zip(step.gives, results if several else (results,)):
            values[i] = r
    if at is not None:
        at.clear()
    return values


# -- smaller ones -------------------------------------------------------------------------------------------------------
def without(program: Program, k: int) -> Program:
    """Less step k and what needs its results."""
    gone, rest = set(program.steps[k].gives), list(program.steps[:k])
    for s in program.steps[k + 1:]:
        if gone & set(s.takes):
            gone |= set(s.gives)
        else:
            rest.append(s)
    return replace(program, steps=tuple(rest))


def in_float64(program: Program) -> Program:
    """The same program without float32."""
    def wider(x):
        return "float64" if x == "float32" else x
    return replace(program, inputs=tuple((shape, wider(dtype)) for shape, dtype in program.inputs),
                   steps=tuple(replace(s, parameters=tuple(map(wider, s.parameters))) for s in program.steps))


def minimised(program: Program, fails) -> Program:
    """A program with as few steps as `fails(program)` leaves; all ranks ask it alike."""
    for k in reversed(range(len(program.steps))):
        if k < len(program.steps) and (smaller := without(program, k)).steps and fails(smaller):
            program = smaller
    return program


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
