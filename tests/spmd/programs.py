# SPDX-License-Identifier: Apache-2.0
"""Random local programs: built op by op of what a check lets pass, and what each means on one device.

The meaning is worked out on whole tensors by another reading than the table's: a value that varies is one tensor for each
rank, and beside it what a global program would have there, the same ops on the whole. A result that is called partial must
be that; one that is called a shard the ranks' tensors joined; anything else the one value.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from ms_dtensor import DTensor, Partial, Replicate, Shard, local_map, value_and_grad
from ms_dtensor.core.layout import Layout
from ms_dtensor.core.mesh import DeviceMesh, coordinates
from ms_dtensor.debug import all_gather, all_reduce, convert, reduce_scatter
from ms_dtensor.errors import OpRuleError

UNARY = {
    "neg": lambda x: -x, "scale": lambda x: x * 1.5, "number": lambda x: x + 0.5, "tanh": mint.tanh, "square": mint.square,
    "sigmoid": mint.sigmoid, "sum0": lambda x: mint.sum(x, 0, keepdim=True), "sum1": lambda x: mint.sum(x, 1, keepdim=True),
    "mean": lambda x: mint.mean(x, 1, keepdim=True), "turn": lambda x: mint.permute(x, (1, 0)),
    "softmax": lambda x: mint.nn.functional.softmax(x, 1), "log": lambda x: mint.log(mint.square(x) + 1.0),
    "flat": lambda x: x.reshape(1, -1), "row": lambda x: x[:1],
}
BINARY = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "over": lambda x, y: x / (y * y + 1.0),
    "matmul": lambda x, y: mint.matmul(x, y), "larger": mint.maximum, "join": lambda x, y: mint.cat((x, y), 1),
    "either": lambda x, y: mint.where(x > y, x, y),
}
MOVES = ("all_reduce I", "all_reduce R", "all_gather I", "all_gather R", "reduce_scatter", "to R", "to I", "to V", "to P")
SIDE, LENGTH = 4, 8


@dataclass
class Meaning:
    """A value: by the coordinates on the axes over which it varies; and for each of these what it is as a whole there."""

    of: dict[tuple, Any]
    axes: tuple[int, ...] = ()
    whole: dict[int, Meaning | None] = field(default_factory=dict)

    def at(self, where: dict[int, int]):
        return self.of[tuple(where[a] for a in self.axes)]


class Program:
    """The program of a seed on a mesh: its inputs, the ops that a check let pass, and the placements of its result."""

    def __init__(self, seed: int, mesh: DeviceMesh):
        self.seed, self.mesh = seed, mesh
        rng = np.random.default_rng(seed)
        kinds = (Shard(0), Shard(1), Replicate(), Partial())
        self.placements = [[kinds[rng.integers(4)] for _ in mesh.shape] for _ in range(3)]
        self.arrays = [rng.normal(size=(*mesh.shape, SIDE, SIDE)) for _ in range(3)]  # summands, where it is partial
        self.inputs = [self._input(a, p) for a, p in zip(self.arrays, self.placements)]
        outs = list(itertools.product(kinds, repeat=mesh.ndim))
        rng.shuffle(outs)
        self.accepted: list[tuple] = []
        self.out = None
        names = mesh.mesh_dim_names  # no placement is of a value whose cotangent is a summand: it becomes one that is alike
        ends = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(mesh.ndim + 1))
        for self.ends, out in itertools.product(ends, outs):
            try:
                local_map(self._built, list(out), check=True, out_shapes=lambda *_, out=out: self._shape(out))(*self.inputs)
            except OpRuleError:
                continue
            self.out = list(out)
            return

    def _input(self, array, placements) -> DTensor:
        here = self.mesh.get_coordinate()
        local = array[tuple(c if p.is_partial() else 0 for c, p in zip(here, placements))]
        cuts = Layout(self.mesh, [p if p.is_shard() else Replicate() for p in placements], local.shape)
        mine = np.array(local[tuple(slice(*b) for b in cuts.local_box(here))])
        return DTensor.from_local(Tensor(mine), self.mesh, placements)

    def _shape(self, out):
        shape = list(self.local_shape)
        for n, p in zip(self.mesh.shape, out):
            if p.is_shard():
                shape[p.dim] *= n
        return (tuple(shape),)

    # -- on ranks -------------------------------------------------------------------------------------------------------
    def _built(self, *values):
        """Tries ops one after another; those that are refused are left out."""
        rng, pool, self.accepted = np.random.default_rng(self.seed + 1), list(values), []
        for _ in range(4 * LENGTH):
            if len(self.accepted) == LENGTH:
                break
            step = self._drawn(rng, len(pool))
            try:
                pool.append(apply(step, pool, self.mesh))
            except OpRuleError:
                continue
            except (ValueError, RuntimeError, TypeError):  # shapes that do not fit each other, on all ranks alike
                continue
            self.accepted.append(step)
        for axis in self.ends:
            self.accepted.append(("move", "to I", len(pool) - 1, axis, 0))
            pool.append(apply(self.accepted[-1], pool, self.mesh))
        self.local_shape = tuple(pool[-1].shape)
        return pool[-1]

    def _drawn(self, rng, count: int) -> tuple:
        kind = rng.integers(5)
        last = count - 1 - int(min(rng.geometric(0.6) - 1, count - 1))
        if kind < 2:
            return "unary", list(UNARY)[rng.integers(len(UNARY))], last
        if kind < 4:
            return "binary", list(BINARY)[rng.integers(len(BINARY))], last, int(rng.integers(count))
        axis = self.mesh.mesh_dim_names[rng.integers(self.mesh.ndim)]
        return "move", MOVES[rng.integers(len(MOVES))], last, axis, int(rng.integers(2))

    def run(self, *values):
        """The program itself, unchecked."""
        pool = list(values)
        for step in self.accepted:
            pool.append(apply(step, pool, self.mesh))
        return pool[-1]

    # -- on one device --------------------------------------------------------------------------------------------------
    def meant(self, wholes) -> Tensor:
        """The result on one device, of whole inputs."""
        pool = [self._cut(x, p) for x, p in zip(wholes, self.placements)]
        for step in self.accepted:
            pool.append(meaning_of(step, pool, self.mesh))
        result = pool[-1]
        for a, p in enumerate(self.out):
            assert p.is_shard() or a not in result.axes or p.is_partial(), (self.seed, "varies, and is called a value")
            assert not p.is_shard() or a in result.axes, (self.seed, "is one value, and is called a shard")
            if a in result.axes and p.is_partial():
                result = result.whole[a]
                assert result is not None, (self.seed, "no global op has this result")
        for a, p in reversed(list(enumerate(self.out))):
            if p.is_shard():
                result = joined(result, a, p.dim, self.mesh)
        return result.of[()]

    def _cut(self, x, placements) -> Meaning:
        axes = tuple(a for a, p in enumerate(placements) if p.is_shard())
        cuts = Layout(self.mesh, [p if p.is_shard() else Replicate() for p in placements], tuple(x.shape))
        of = {}
        for at in coordinates(self.mesh):
            of[tuple(at[a] for a in axes)] = x[tuple(slice(*b) for b in cuts.local_box(at))]
        return self._with_wholes(of, axes, {a: placements[a].dim for a in axes})

    def _with_wholes(self, of, axes, dims) -> Meaning:
        """What a global program has in place of an axis's pieces: these joined, wherever the other axes are."""
        whole = {}
        for a in axes:
            joint = joined(Meaning(of, axes, dict.fromkeys(axes)), a, dims[a], self.mesh)
            whole[a] = self._with_wholes(joint.of, joint.axes, dims)
        return Meaning(of, axes, whole)

    def compare(self) -> int:
        """Value and gradients of the ranks against one device; how many ops the program has, 0 if no placements fit it.

        Raises:
            AssertionError: a check has let a wrong program pass.
        """
        if self.out is None or not self.accepted:
            return 0
        run = local_map(self.run, self.out, out_shapes=lambda *_: self._shape(self.out))
        rng = np.random.default_rng(self.seed + 2)
        shape, = self._shape(self.out)
        weight = rng.normal(size=shape)
        lies = [Replicate() if p.is_partial() else p for p in self.out]
        w = DTensor.from_local(Tensor(np.ascontiguousarray(weight[tuple(
            slice(*b) for b in Layout(self.mesh, lies, shape).local_box(self.mesh.get_coordinate()))])), self.mesh, lies)
        got, grads = value_and_grad(lambda *xs: (run(*xs) * w).sum(), (0, 1, 2))(*self.inputs)
        wholes = []
        for array, placements in zip(self.arrays, self.placements):
            over = tuple(a for a, p in enumerate(placements) if p.is_partial())
            summed = array.sum(over, keepdims=True)
            wholes.append(Tensor(np.ascontiguousarray(summed[(0,) * self.mesh.ndim])))
        assert tuple(self.meant(wholes).shape) == shape, f"program {self.seed}: shape; {self}"
        want, wanted = ms.value_and_grad(lambda *xs: (self.meant(xs) * Tensor(weight)).sum(), (0, 1, 2))(*wholes)
        close(got, want, f"program {self.seed}: value; {self}")
        for i, (a, b) in enumerate(zip(grads, wanted)):
            close(a, b, f"program {self.seed}: gradient {i}; {self}")
        return len(self.accepted)

    def __str__(self):
        return f"{self.placements} {self.accepted} -> {self.out}"


def close(got, want, what: str) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    a, b = got.asnumpy(), want.asnumpy()
    assert a.shape == b.shape and np.allclose(a, b, rtol=1e-8, atol=1e-8 * max(np.abs(b).max(initial=0), 1)), what


def apply(step, pool, mesh):
    """One op of local tensors."""
    kind, name, i, *rest = step
    if kind == "unary":
        return UNARY[name](pool[i])
    if kind == "binary":
        return BINARY[name](pool[i], pool[rest[0]])
    axis, dim = rest
    move, _, to = name.partition(" ")
    if move == "all_reduce":
        return all_reduce(pool[i], axis, to)
    if move == "all_gather":
        return all_gather(pool[i], axis, dim, to=to)
    if pool[i].shape[dim] % mesh.size(axis) and name in ("reduce_scatter", "to V"):
        raise ValueError("uneven")
    return reduce_scatter(pool[i], axis, dim) if move == "reduce_scatter" else convert(pool[i], axis, to, dim)


def meaning_of(step, pool, mesh) -> Meaning:
    """The same op of meanings."""
    kind, name, i, *rest = step
    if kind == "unary":
        return together(UNARY[name], mesh, pool[i])
    if kind == "binary":
        return together(BINARY[name], mesh, pool[i], pool[rest[0]])
    x, a, dim = pool[i], mesh.axis_index(rest[0]), rest[1]
    move, _, to = name.partition(" ")
    if move == "all_reduce":
        return added(x, a, mesh)
    if move == "all_gather":
        return joined(x, a, dim, mesh)
    if move == "reduce_scatter":
        return parts(added(x, a, mesh), a, dim, mesh)
    return parts(x, a, dim, mesh) if to == "V" else x


def together(op, mesh, *xs: Meaning) -> Meaning:
    axes = tuple(sorted({a for x in xs for a in x.axes}))
    where = itertools.product(*(range(mesh.shape[a]) for a in axes))
    of = {at: op(*(x.at(dict(zip(axes, at))) for x in xs)) for at in where}
    whole: dict[int, Meaning | None] = {}
    for a in axes:
        seen = [x.whole.get(a) if a in x.axes else x for x in xs]
        try:
            whole[a] = None if None in seen else together(op, mesh, *seen)  # type: ignore[arg-type]
        except (ValueError, RuntimeError, TypeError):
            whole[a] = None
    return Meaning(of, axes, whole)


def over(x: Meaning, a: int, mesh, fn) -> Meaning:
    """One value in the place of an axis's many."""
    if a not in x.axes:
        return x
    axes = tuple(b for b in x.axes if b != a)
    of = {at: fn([x.at({**dict(zip(axes, at)), a: n}) for n in range(mesh.shape[a])])
          for at in itertools.product(*(range(mesh.shape[b]) for b in axes))}
    return Meaning(of, axes, {b: None if x.whole[b] is None else over(x.whole[b], a, mesh, fn) for b in axes})


def added(x: Meaning, a: int, mesh) -> Meaning:
    return over(x, a, mesh, lambda all_of: sum(all_of[1:], all_of[0]))


def joined(x: Meaning, a: int, dim: int, mesh) -> Meaning:
    return over(x, a, mesh, lambda all_of: mint.cat(all_of, dim))


def parts(x: Meaning, a: int, dim: int, mesh) -> Meaning:
    assert a not in x.axes
    axes, n = tuple(sorted((*x.axes, a))), mesh.shape[a]
    of = {}
    for at in itertools.product(*(range(mesh.shape[b]) for b in axes)):
        where = dict(zip(axes, at))
        whole = x.at(where)
        each = whole.shape[dim] // n
        of[at] = mint.narrow(whole, dim, where[a] * each, each)
    return Meaning(of, axes, {a: x, **{b: None if w is None else parts(w, a, dim, mesh) for b, w in x.whole.items()}})
