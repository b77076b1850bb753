# SPDX-License-Identifier: Apache-2.0
"""Every form with every dtype that plain MindSpore's CPU takes, and its arguments by keyword where that may be.

A form's sample arrays are put into each dtype. What plain MindSpore then computes, DTensors must compute too: the public
call through the dispatcher gives the same numbers in the same dtype, and the rules behind it are right on shards. A
hole (plain takes it, a DTensor does not) needs a reason in `HOLES`, and a reason needs a hole somewhere in the matrix: not
in each cell it names, and not those `BY_CHANCE`.
"""
from __future__ import annotations

import re
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ...comm import fake_world
from ...core.placements import Shard
from ...core.tree import leaves, map_leaves
from ...debug.verify import Report, check_rule
from ...debug.verify.capture import Probe, copied
from ...debug.verify.oracle import same
from ...dispatch.modes import implicit_replication
from ...dispatch.operands import as_local, dtype_name
from ...errors import OpRuleError
from ...internals.names import NoFallbackGuard, TensorOverloadCall
from ...ops.rng import frozen
from ...tensor.distribute import distribute_tensor, init_device_mesh
from ...tensor.dtensor import DTensor
from .form import Form

DTYPES = ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
          "complex128").split()
# calls by keyword that are refused, or that MindSpore's own Python does not take: spellings of an older signature
OLD_NAMES = r"(DeprecatedIndexAdd|DeprecatedTake|ExpandAs|Nansum|Transpose)\(.*"
INTEGERS = [d for d in DTYPES if "int" in d]
ON_SHARDS = "bool int8 int64 uint8 float16 float64 complex64".split()  # one of each kind of rules' cases is run on two ranks
AGREES, NEITHER, OURS = "●·○"  # both take it and agree; nor does plain MindSpore take it; plain MindSpore alone does not
KILLS = r"auto_generate\.(grouped_matmul|GroupedMatmul).*"  # forms with which plain MindSpore 2.10 ends the process on CPU
# letter -> (row: dtype of the cells, why plain MindSpore takes it and DTensors do not, or differ)
HOLES = {
    "a": (r".*\b(any|any_)\b.*: .*", "of numbers MindSpore's `any` reads the bytes; DTensors ask whether any is not 0"),
    "u": (r".* of nothing.*: .*|.*(nll_loss|NLLLoss).*\(\"none\"\).*: .*",
          "where there is nothing to compute, MindSpore leaves uninitialised memory; DTensors give 0 or 1, or refuse"),
    "h": (r"ops\.i?r?hfft.*: .*|ops\.i?rfft.*: complex.*",
          "MindSpore's `hfft` and `ihfft` are right at every other call; a real transform of complex numbers means nothing"),
    "w": (r"(x\.histc.*|mint\.xlogy\(x, 2\)): b?float16|x\.bincount.*|(ops|x)\.trace.*: u?int.*",
          "the result has another dtype on MindSpore's CPU (`trace` of integers: as `mint.trace` adds them up, in int64)"),
    "m": (r"x\.addb?mm: u?int.*", "small integers wrap in MindSpore's product before they become floats; DTensors' do not"),
    "k": (r"x\.scatter\(add\).*: .*", "after a call of another shape MindSpore's kernel writes nothing"),
    "s": (r"ops\.scatter_(nd_)?div: u?int8", "MindSpore divides so in place only, and a shard is written out of place"),
    "i": (r"x\.(add|sub|mul|div|floor_divide|remainder)_\((number|y)\): (bool|u?int.*)",
          "MindSpore's CPU makes a new tensor of another dtype; in place, a DTensor keeps its own"),
}
BY_CHANCE = frozenset("uhk")  # what lay in memory, or what ran before, decides: a run may have none


def recast(args, group: str, dtype: str):
    """Arguments whose arrays of dtype `group` are of `dtype`: the same numbers, or as whole ones their ranks from 1."""
    def of(a):
        if str(a.dtype) != group or dtype == group:
            return Tensor(a)
        if dtype == "bool":
            return Tensor(a > np.median(a) if a.size else a.astype(bool))
        if "int" in dtype:
            a = 1 + np.argsort(np.argsort(a, None)).reshape(a.shape) % 120 if a.dtype.kind == "f" else abs(a)
        if "complex" in dtype:
            a = a + 1j * a.reshape(-1)[::-1].reshape(a.shape)
        return Tensor(a.astype("float32")).astype(ms.bfloat16) if dtype == "bfloat16" else Tensor(a.astype(dtype))
    return map_leaves(of, args, np.ndarray)


def rows(form: Form) -> dict[str, tuple[str, list[str]]]:
    """Row of the matrix -> (dtype of the arrays that are recast, into what); integers beside other arrays are indices."""
    groups = list(dict.fromkeys(str(a.dtype) for a in leaves(form.variants()[0], np.ndarray)))
    beside = {f"{form.name}, its {g}": (g, INTEGERS) for g in groups[1:] if "int" in g}
    return {form.name: (groups[0], DTYPES), **beside} if groups else {}


def ask(form: Form, group: str, dtype: str, exact: bool, report: Report) -> str:
    """The mark of one cell, or what is wrong with it."""
    args = form.variants()[0]
    ms.set_seed(1)  # for layers that the form makes
    try:
        if re.fullmatch(KILLS, form.name):
            raise RuntimeError
        plain = leaves(form.fn(*recast(args, group, dtype)), Tensor)
        wanted = [(dtype_name(x.dtype), _array(x)) for x in plain]
    except Exception:  # noqa: BLE001  a kernel that is not there says so in many ways
        wanted = None
    # a layer made by the form has parameters that nobody distributed
    made = implicit_replication() if form.name.startswith(("nn.", "mint.nn.")) else nullcontext()

    def ours(way):
        ms.set_seed(1)
        with fake_world(1), frozen(), made:
            mesh = init_device_mesh("cpu", (1,))
            out = leaves(form.fn(*map_leaves(lambda x: distribute_tensor(x, mesh, way if x.ndim else None),
                                             recast(args, group, dtype), Tensor)), Tensor)
            return [(dtype_name(x.dtype), _array(as_local(x) if isinstance(x, DTensor) else x)) for x in out]
    try:
        try:
            got = ours([Shard(0)])
        except OpRuleError as e:
            if not re.search("not whole on every rank|the target would have to change its placement", str(e)):
                raise
            got = ours(None)
    except Exception as e:  # noqa: BLE001
        text = str(e).strip().splitlines()
        return NEITHER if wanted is None else f"{type(e).__name__}: {text[0] if text else ''}"
    if wanted is None:
        return OURS
    half = dtype in ("float16", "bfloat16")
    for i, ((kind, value), (our_kind, our_value)) in enumerate(zip(wanted, got, strict=True)):
        if kind != our_kind or value.shape != our_value.shape:
            return f"result {i} is {our_kind}{list(our_value.shape)}, of plain MindSpore {kind}{list(value.shape)}"
        if exact and not same(value, our_value, half=half):
            return f"value of result {i}: {our_value.ravel()[:4]}, of plain MindSpore {value.ravel()[:4]}"
    if dtype in ON_SHARDS and dtype != group and not form.travels:
        before = len(report.wrong)
        check_rule(form.fn, *recast(args, group, dtype), axes=((2,),), report=report, alike=False)
        if report.wrong[before:]:
            return "; ".join(report.wrong[before:][:2])
    return AGREES


def _array(x) -> np.ndarray:
    return (x.astype(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy()


class _Noting(Probe):
    """A probe that also notes what was called, not only what it came to."""

    calls: list

    def __fallback__(self, func, args=(), kwargs=None):
        if not (len(args) == 3 and isinstance(args[1], str)) and func.name != "typeof":
            self.calls.append((func, args, kwargs or {}))
        return super().__fallback__(func, args, kwargs)


def by_keyword(form: Form, known: set) -> list[str]:
    """What is wrong when the C++ calls that a form makes get their arguments by the names that their signatures give."""
    calls: list[tuple] = []
    _Noting.calls = calls
    try:
        form.fn(*map_leaves(lambda a: _Noting(Tensor(a), []), form.variants()[0], np.ndarray))
    except Exception:  # noqa: BLE001  the verifier tells
        pass
    wrong = []
    for func, args, kwargs in calls:
        key = func.__class__, func.name, tuple(type(a).__name__ for a in args), tuple(kwargs)
        if key in known:
            continue
        known.add(key)
        args, kwargs = (map_leaves(lambda x: Tensor(_array(x).copy()).astype(x.dtype), v, Tensor) for v in (args, kwargs))
        for names in signatures(func, args):
            named = dict(zip(names, args if func.__class__ is not TensorOverloadCall else args[1:]))
            if named and len(named) + (func.__class__ is TensorOverloadCall) == len(args):
                first = args[:1] if func.__class__ is TensorOverloadCall else ()
                told = _by_keyword(func, first, {**kwargs, **named}, args, kwargs)
                if told is not None:
                    known.add((*key, tuple(named)))
                    call = f"{func.name}({', '.join((*('x' for _ in first), *named))})"
                    wrong += [f"{call}: {told}"] if told and not re.fullmatch(OLD_NAMES, call) else []
    return wrong


def signatures(func, args) -> list[list[str]]:
    """The names in each signature of an overloaded function or method, which MindSpore lists where a call fits none."""
    try:
        with NoFallbackGuard():
            func(*args[:1], no_such_name=1)
    except Exception as e:  # noqa: BLE001
        return [re.findall(r"(\w+)=<", line) for line in str(e).splitlines() if line.startswith('"')]
    return []


def _by_keyword(func, first, named, args, kwargs) -> str | None:
    """None: there is no such call; "": it is right; else what is wrong."""
    try:
        with NoFallbackGuard(), frozen():
            wanted = leaves(func(*copied(first), **copied(named)), Tensor)  # which some write into
    except TypeError as e:
        if "Failed calling" in str(e):  # it fits no signature
            return None
        wanted = None
    except Exception:  # noqa: BLE001  there is no kernel
        wanted = None

    def ours(args, kwargs):
        with fake_world(1), frozen():
            mesh = init_device_mesh("cpu", (1,))
            args, kwargs = map_leaves(lambda x: distribute_tensor(x, mesh, None), (tuple(args), kwargs), Tensor)
            return [as_local(x) for x in leaves(func(*args, **kwargs), Tensor)]
    try:
        positional = ours(args, kwargs)
    except Exception:  # noqa: BLE001  then the matrix tells
        return None
    try:
        got = ours(first, named)
    except Exception as e:  # noqa: BLE001
        # as it came here, a function cannot be called by keyword alone; the public one can
        return None if "no __fallback__" in str(e) else f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
    alike = all(a.dtype == b.dtype and same(_array(a), _array(b)) for a, b in zip(wanted or positional, got, strict=True))
    return "" if alike else "another result than by position"


def reason(row: str, dtype: str) -> str | None:
    """The letter of the reason why a form lacks a dtype; None: there is none."""
    return next((letter for letter, (forms, _) in HOLES.items() if re.fullmatch(forms, f"{row}: {dtype}")), None)


def unused(matrix: dict[str, str]) -> set[str]:
    """The reasons that explain no cell of a whole matrix."""
    return HOLES.keys() - BY_CHANCE - set("".join(matrix.values()))
