# SPDX-License-Identifier: Apache-2.0
"""The executable definition of a correct rule: every case, on shards, forward and backward, against the full op.

In one process and without a process group: the operands are cut by definition (`oracle.py`), the op runs once per
rank with exactly the local form that dispatch would use, the results and gradients are put together by the gradient
table (a varying operand: their sum; an invariant one: equal on every rank) and compared with the one-device answer.
Cotangents of shards are strided, as after a transpose. `alike.py` asks besides what kind of thing each rank returns.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, mint

from ...core.layout import Layout, short_dtype
from ...core.mesh import DeviceMesh, coordinates
from ...core.placements import REPLICATE, Shard
from ...core.tree import leaves, map_leaves
from ...dispatch.composite import COMPOSED
from ...dispatch.op_call import attributes, bind_arguments, refill
from ...dispatch.operands import dtype_name, recording
from ...dispatch.planner import as_operands
from ...internals.names import Function, NoFallbackGuard
from ...ops.local import CPU, LOCAL_OPS, run_local
from ...ops.local.extremes import winners_of_shard
from ...ops.rng import frozen
from ...ops.rules import RULES, Call, Case, Local, Operand, OpSpec, Winners, local_part, results_of_nothing
from ...ops.rules.names import PRIMITIVES
from ...tensor.autograd import grad
from .alike import check_alike
from .capture import Captured, capture, copied
from .missed import find_missed
from .oracle import assemble, box_slices, same, split


@dataclass
class Report:
    """What was compared, and what was wrong; a call that was checked before is not run again, only counted.

    `compared` counts comparisons made, `samples` those that stand behind the calls, `seen` remembers them by call;
    `ops` lists the ops met, with the cases of their rules and how one device computes them.

    Example:
        >>> from ms_dtensor.verify import Report
        >>> bool(Report()), bool(Report(wrong=["matmul: value of result 0"]))
        (True, False)
    """

    compared: int = 0
    samples: int = 0
    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    missed: set[str] = field(default_factory=set)
    seen: dict = field(default_factory=dict)
    ops: dict[str, OpSeen] = field(default_factory=dict)

    def __bool__(self):
        return not self.wrong

    def met(self, op: str, cases: set[str], how: set[str]) -> None:
        """Notes calls of `op`."""
        seen = self.ops.setdefault(op, OpSeen())
        seen.cases |= cases
        seen.how |= how


@dataclass
class OpSeen:
    """What the calls of one op showed: cases in their notation; "kernel", "reference" (decomposition) or "own" form."""

    cases: set[str] = field(default_factory=set)
    how: set[str] = field(default_factory=set)


def check_rule(op, *args, axes: Sequence[Sequence[int]] = ((2,), (3,), (2, 2)), seed: int = 0,
               report: Report | None = None, missed: bool = False, alike: bool = True, **kwargs) -> Report:
    """Checks the rules behind one public call with sample arguments.

    Args:
        op: a public op, method, or any function of tensors.
        *args: sample arguments; tensors may be NumPy arrays.
        axes: mesh shapes to try; on meshes of two axes all products of cases run.
        seed: of the splits and cotangents.
        report: to add to.
        alike: also ask whether all ranks get the same kind of thing, see `alike.py`.
        missed: also collect, in `report.missed`, legal single-axis cases that the rule does not list (see `missed.py`).

    Returns:
        The report; truthy if nothing is wrong.

    Example:
        >>> import numpy as np
        >>> from mindspore import mint
        >>> from ms_dtensor.verify import check_rule
        >>> report = check_rule(mint.matmul, np.random.rand(4, 6).astype("f"), np.random.rand(6, 2).astype("f"))
        >>> bool(report), report.compared > 10
        (True, True)
    """
    report = Report() if report is None else report
    report.calls += 1
    args = map_leaves(Tensor, args, np.ndarray)
    with frozen(seed):
        for captured in capture(op, *args, **kwargs):
            _once(captured, axes, seed, report, missed)
    if alike:
        report.wrong += check_alike(op, args, kwargs)
    return report


def _once(captured: Captured, axes, seed: int, report: Report, missed: bool = False) -> None:
    """Checks a call that was not checked before; counts it in any case."""
    key = _identity(captured, axes, missed)
    if key not in report.seen:
        before, outer = report.compared, report.ops
        report.ops = {}
        check_captured(captured, axes, np.random.default_rng(seed), report, missed)
        report.seen[key] = report.compared - before, report.ops
        report.ops = outer
    samples, ops = report.seen[key]
    report.samples += samples
    for op, seen in ops.items():
        report.met(op, seen.cases, seen.how)


def _identity(c: Captured, axes, missed: bool) -> tuple:
    """What makes two calls one and the same to check: primitive, static arguments, shapes, and values of integers."""
    def of(v):
        if isinstance(v, Tensor):
            a = v.asnumpy()
            return (a.shape, str(a.dtype), None if _floating(a) or str(a.dtype) == "float16" else a.tobytes())
        if isinstance(v, tuple | list):
            return tuple(of(x) for x in v)
        return repr(v)
    made = repr(sorted(attributes(c.primitive).items(), key=str)) if c.primitive is not None else ""
    return (c.name, made, of(c.args), tuple((k, of(v)) for k, v in c.kwargs.items()), tuple(map(tuple, axes)), missed)


def check_captured(c: Captured, axes, rng, report: Report, missed: bool = False) -> None:
    """Checks every case of the rule of one primitive call, and what it may be composed of."""
    entry = c.own or PRIMITIVES.get(c.name)
    if entry is None or entry[0] not in RULES:
        shown = [f"{short_dtype(dtype_name(a.dtype))}{list(a.shape)}" if isinstance(a, Tensor) else repr(a) for a in c.args]
        report.wrong.append(f"no rule for {c.name}({', '.join(shown)})")
        return
    op, params = entry
    tensors = leaves((c.args, c.kwargs), Tensor)
    operands = tuple(Operand(i, tuple(t.shape), dtype_name(t.dtype)) for i, t in enumerate(tensors))
    it = iter(operands)
    bound = bind_arguments(c.name, params, c.args, c.kwargs, c.primitive)
    call = Call(op, {k: as_operands(v, it) for k, v in bound.items()}, operands)
    spec = RULES[op](call)
    report.met(op, set(map(str, spec.cases)), {"own" if c.own else "reference" if c.name in CPU else "kernel"})
    trial = Trial(c, call, spec, tensors, rng, report)
    whole = Case((REPLICATE,) * len(operands), (REPLICATE,) * len(spec.shapes))
    cases = (*spec.cases, *(() if whole in spec.cases else (whole,)))
    for shape in axes:
        mesh = DeviceMesh("cpu", np.arange(int(np.prod(shape))).reshape(shape))
        # axes of one size: a combination in another order is the same one with the axes renamed
        combos = (itertools.combinations_with_replacement(cases, len(shape)) if len(set(shape)) == 1 else
                  itertools.product(cases, repeat=len(shape)))
        for combo in combos:
            if trial.fits(combo, mesh):
                trial.run(combo, mesh)
    if missed:
        report.missed |= find_missed(trial)
    if op in COMPOSED and c.own is None and all(a.size for a in trial.arrays) and _may_be_composed(call):
        _check_composition(c, op, params, trial, axes, report)


def _may_be_composed(call: Call) -> bool:
    """Whether sharding any one dim of any one operand has the op composed."""
    mesh = DeviceMesh("cpu", np.arange(2))
    whole = [Layout(mesh, None, o.shape, o.dtype) for o in call.operands]
    return any(COMPOSED[call.op].when(call, (*whole[:i], Layout(mesh, [Shard(d)], o.shape, o.dtype), *whole[i + 1:]))
               for i, o in enumerate(call.operands) for d in range(o.ndim))


def _check_composition(c: Captured, op, params, trial, axes, report: Report) -> None:
    """A composed op equals the primitive on plain tensors, gradients too, and each of its parts has a right rule."""
    def composed(args, kwargs):
        return COMPOSED[op].run(c.name, **bind_arguments(c.name, params, args, kwargs, c.primitive))

    def of_tensors(tensors):
        it = iter(tensors)
        args = refill(tuple(c.args), it)
        with NoFallbackGuard():
            result = composed(args, refill(c.kwargs, it))
        return list(result) if isinstance(result, tuple | list) else [result]
    label = f"composed {c.name} {[list(a.shape) for a in trial.arrays]}"
    values = of_tensors([Tensor(a.copy()) for a in trial.arrays])
    report.compared += 1
    if len(values) != len(trial.results) or not all(same(a, b.asnumpy()) for a, b in zip(trial.results, values)):
        report.wrong.append(f"{label}: value")
    if trial.grads is not None:
        report.compared += 1
        grads = trial.gradients([a.copy() for a in trial.arrays], trial.cotangents, of_tensors)
        if not all(same(a, b) for a, b in zip(trial.grads, grads)):
            report.wrong.append(f"{label}: gradient")
    for part in capture(lambda *args, **kwargs: composed(args, kwargs), *copied(c.args), **copied(c.kwargs)):
        _once(part, axes[:2], 0, report)


class Trial:
    """One captured call, its full answer, and the comparison of any combination of cases with it."""

    def __init__(self, c: Captured, call: Call, spec: OpSpec, tensors, rng, report: Report):
        self.c, self.call, self.spec, self.rng, self.report = c, call, spec, rng, report
        self.arrays = [t.asnumpy() for t in tensors]
        self.half = any(a.dtype == np.float16 for a in self.arrays)
        one = DeviceMesh("cpu", [0])
        ins, outs = (tuple(Layout(one, None, shape, "float32") for shape in shapes) for shapes in (
            [a.shape for a in self.arrays], [s or () for s in spec.shapes]))
        whole = Local(ins, outs, (0,))
        if None not in spec.shapes and results_of_nothing(call, whole) is not None:  # MindSpore's are uninitialised memory
            results = self.forward([Tensor(a.copy()) for a in self.arrays], whole)
        else:
            results = c.result if isinstance(c.result, tuple | list) else (c.result,)
        self.results = [r.asnumpy() for r in results]
        self.written = []
        if spec.writes:
            changed = [Tensor(a.copy()) for a in self.arrays]
            self.original(changed)
            self.written = [changed[i].asnumpy() for i in spec.writes]
        promised = [r.shape if s is None else tuple(s) for r, s in zip(self.results, spec.shapes)]  # None: not told
        if len(self.results) != len(spec.shapes) or [r.shape for r in self.results] != promised:
            report.wrong.append(f"{call.op}: the rule promises shapes {spec.shapes}, MindSpore gives "
                                f"{[r.shape for r in self.results]}")
        self.cotangents = [rng.normal(size=r.shape).astype(r.dtype) if _floating(r) else None for r in self.results]
        self.wrt = tuple(i for i, a in enumerate(self.arrays) if _floating(a) and i not in spec.writes)
        self.grads = None
        # The gradients of results without elements are empty sums: uninitialised memory in MindSpore 2.10 on CPU.
        if self.wrt and any(g is not None and g.size for g in self.cotangents):
            try:
                self.grads = self.gradients(self.arrays, self.cotangents, self.original)
            except (RuntimeError, TypeError):  # an op without a backward, kernel or rule, is checked forward only
                self.grads = None

    def fits(self, combo, mesh) -> bool:
        split: dict[tuple[int, int], int] = {}
        for axis, case in enumerate(combo):
            n = mesh.shape[axis]
            if any(extent % (split.get((o, d), 1) * n) for o, d, extent in case.even):
                return False
            for o, p in enumerate(case.ins):
                if p.is_partial("prod") and not _floating(self.arrays[o]):
                    return False
                if self.arrays[o].dtype == bool and p.is_partial() and p.reduce_op not in ("max", "min"):
                    return False  # there are no sums of truth values
                if p.is_partial("avg") and not np.issubdtype(self.arrays[o].dtype, np.inexact):
                    return False
                if p.is_shard():
                    split[o, p.dim] = split.get((o, p.dim), 1) * n
        # unlike reductions on different axes do not commute: no layout arises with both
        kinds = [{c.ins[o].reduce_op for c in combo if c.ins[o].is_partial()} for o in range(len(self.arrays))]
        return all(len(k - {"avg"} if "sum" in k else k) <= 1 for k in kinds)

    def run(self, combo, mesh) -> None:
        ins = tuple(Layout(mesh, [c.ins[o] for c in combo], a.shape, str(a.dtype)) for o, a in enumerate(self.arrays))
        outs = tuple(Layout(mesh, [c.outs[j] for c in combo], r.shape, str(r.dtype)) for j, r in enumerate(self.results))
        parts = [split(a, layout, self.rng) for a, layout in zip(self.arrays, ins)]
        label = f"{self.call.op} {[list(a.shape) for a in self.arrays]} {ins} -> {outs} on {mesh.shape}"
        for j, (r, layout) in enumerate(zip(self.results, outs)):
            if r.dtype == bool and any(p.is_partial("sum") for p in layout.placements):
                self.report.wrong.append(f"{label}: result {j} is a sum of truth values, which no backend adds up")
                return
        wanted, layouts = [*self.results, *self.written], (*outs, *(ins[i] for i in self.spec.writes))
        got: list[dict] = [{} for _ in wanted]
        found: list[dict] = [{} for _ in self.wrt]
        graded = self.grads is not None and not any(map(_is_odd, ins)) and (
            self.spec.winners is not None or not any(map(_is_odd, outs)))
        won = None
        for at in coordinates(mesh):
            tensors = [Tensor.from_numpy(p[at]) for p in parts]
            local = Local(ins, outs, at)
            try:
                if graded and self.spec.winners is not None and _is_odd(outs[0]) and won is None:
                    won = self._winners(self.spec.winners, parts, ins, outs, mesh)
                if graded and recording():  # inside a user's gradient, which a forward that raises would spoil
                    self.forward([Tensor.from_numpy(p[at].copy()) for p in parts], local)
                if graded:  # the results are those of the forward that the gradients belong to
                    results, grads = self.differentiate(tensors, self._cotangents(mesh, outs, at, won),
                                                        lambda xs, m=local: self.forward(xs, m))
                    for k, g in enumerate(grads):
                        found[k][at] = g
                else:
                    results = self.forward(tensors, local)
                for j, r in enumerate((*results, *(tensors[i] for i in self.spec.writes))):
                    got[j][at] = r.asnumpy()
            except Exception as e:  # noqa: BLE001  whatever MindSpore raises is a finding
                self.report.wrong.append(f"{label}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
                return
        self.report.compared += 1
        for j, layout in enumerate(layouts):
            odd = {at: (v.shape, str(v.dtype)) for at, v in got[j].items()
                   if v.shape != layout.local_shape(at) or v.dtype != wanted[j].dtype}
            if odd:
                self.report.wrong.append(f"{label}: result {j} has local shapes and dtypes {odd}")
                return
            value, unequal = assemble(got[j], layout)
            if unequal or not same(wanted[j], value, half=self.half):
                differ = f", replicas differ at {unequal}" if unequal else ""
                self.report.wrong.append(f"{label}: value of result {j}{differ}")
                return
        if graded:
            self._compare_gradients(combo, mesh, ins, found, label)

    def _cotangents(self, mesh, outs, at, won) -> list[np.ndarray | None]:
        """This coordinate's share of the cotangents."""
        shares = []
        for g, layout in zip(self.cotangents, outs):
            scale = np.prod([1 / mesh.shape[a] for a in layout.partial_axes if layout.placements[a].is_partial("avg")])
            if won is not None:
                scale = won[at]
            shares.append(None if g is None else (g[box_slices(layout, at)] * scale).astype(g.dtype))
        return shares

    def _winners(self, what: Winners, parts, ins, outs, mesh) -> dict:
        """Coordinate -> its share of the cotangent of an extreme over shards: all of it to the first, or by their number."""
        whole, counts, begins = self.results[0], {}, {}
        for at in coordinates(mesh):
            tensors = [Tensor.from_numpy(p[at].copy()) for p in parts]
            begins[at] = ins[0].local_offset(at)[what.dims[0]]
            result = self.forward(tensors, Local(ins, outs, at))[0]
            attain = winners_of_shard(what, begins[at], tensors[0], result)
            counts[at] = (result.asnumpy() == whole[box_slices(outs[0], at)]) * (1 if what.first else attain.asnumpy())
        axes = outs[0].partial_axes
        shares = {}
        for at in counts:
            line = [b for b in counts if all(a in axes or i == j for a, (i, j) in enumerate(zip(at, b)))]
            if what.first:
                least = np.min([np.where(counts[b] > 0, begins[b], np.inf) for b in line], axis=0)
                shares[at] = counts[at] * (begins[at] == least)
            else:
                shares[at] = counts[at] / sum(counts[b] for b in line)
        return shares

    def _compare_gradients(self, combo, mesh, ins, found, label) -> None:
        self.report.compared += 1
        for o, whole, parts in zip(self.wrt, self.grads or (), found):
            varying = [a for a, case in enumerate(combo)
                       if o not in case.invariant and any(not p.is_replicate() for p in case.ins)]
            expected = whole / prod(mesh.shape[a] for a, case in enumerate(combo) if case.ins[o].is_partial("avg"))
            value, unequal = assemble(parts, ins[o].gradient(varying))
            if unequal or not same(expected, value, half=self.half):
                self.report.wrong.append(f"{label}: gradient of operand {o}"
                                         + (f", replicas differ at {unequal}" if unequal else ""))
                return

    def forward(self, tensors, local: Local):
        named, empty = local_part(self.call, self.spec, local)
        form = None if named is None else (LOCAL_OPS[named.name], named.args, named.kwargs)
        with NoFallbackGuard():
            result = run_local(self.original, form, empty, tensors)
        return list(result) if isinstance(result, tuple | list) else [result]

    def original(self, tensors):
        with NoFallbackGuard():
            it = iter(tensors)
            return self.c.compute(*refill(self.c.args, it), **refill(self.c.kwargs, it))

    def gradients(self, arrays, cotangents, forward) -> list[np.ndarray]:
        """Gradients of the floating operands, as arrays, for given cotangents of the results of `forward`."""
        return self.differentiate([Tensor.from_numpy(np.array(a, order="C")) for a in arrays], cotangents, forward, True)[1]

    def differentiate(self, tensors, cotangents, forward, flat=False) -> tuple[list[Tensor], list[np.ndarray]]:
        """The results of `forward(tensors)` and the gradients of the floating operands; cotangents `flat` or strided."""
        results: list[Tensor] = []

        def weighted(*active):
            xs = list(tensors)
            for i, x in zip(self.wrt, active):
                xs[i] = x
            made = forward(xs)
            results[:] = made if isinstance(made, tuple | list) else [made]
            terms = [Weigh.apply(r, Cotangent(g)) if flat else Weigh.apply(turned(r), Cotangent(g.T))
                     for r, g in zip(results, cotangents) if g is not None]
            return sum(terms[1:], terms[0])
        with NoFallbackGuard():
            out = grad(weighted, tuple(range(len(self.wrt))))(*(tensors[i] for i in self.wrt))
        return results, [g.asnumpy() for g in (out if isinstance(out, tuple | list) else (out,))]


class Cotangent(NamedTuple):
    """An array that `Function.apply` does not take for an operand."""

    value: np.ndarray


class Weigh(Function):
    """A result's product with its cotangent, as far as gradients go: one node instead of a product and a sum."""

    @staticmethod
    def forward(ctx, result, cotangent):
        ctx.cotangent = cotangent.value
        return Tensor(0.0)

    @staticmethod
    def backward(ctx, _):
        return Tensor.from_numpy(np.array(ctx.cotangent, order="C")), None


def turned(result: Tensor) -> Tensor:
    """The result with its dims reversed: the transpose's backward hands on a cotangent that is not contiguous."""
    return mint.permute(result, tuple(range(len(result._shape)))[::-1]) if len(result._shape) > 1 else result


def _is_odd(layout: Layout) -> bool:
    """Whether ranks hold something else than summands, of a sum or an average: then no gradient follows from linearity."""
    return any(layout.placements[a].reduce_op not in ("sum", "avg") for a in layout.partial_axes)


def _floating(array: np.ndarray) -> bool:
    return array.dtype in (np.float32, np.float64, np.complex64, np.complex128)
