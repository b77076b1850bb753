# SPDX-License-Identifier: Apache-2.0
"""What MindSpore's own C++ inference says of a primitive call, against what our rule and our CPU form of it promise.

A compiled function whose results are the shapes and dtypes of a call is folded to constants: no kernel is run, or need
exist. So the primitives that only Ascend has are asked on a CPU, with the whole operands, with those of one rank for each
case of the rule, and with bfloat16 in the place of float32. Where a rule's local form is ours, its branch for devices is
followed, and the primitives that it calls are asked.
"""
import importlib
import inspect
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import gen_ops_prim

from ms_dtensor.core.layout import Layout
from ms_dtensor.core.mesh import DeviceMesh
from ms_dtensor.core.placements import REPLICATE
from ms_dtensor.core.tree import leaves, map_leaves
from ms_dtensor.debug.verify.capture import Captured, capture
from ms_dtensor.debug.verify.oracle import split
from ms_dtensor.dispatch.op_call import attributes, bind_arguments
from ms_dtensor.dispatch.operands import dtype_name
from ms_dtensor.dispatch.planner import as_operands
from ms_dtensor.errors import OpRuleError
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.ops.local import LOCAL_OPS, fill_operands
from ms_dtensor.ops.local.dtypes import as_dtype
from ms_dtensor.ops.rng import frozen
from ms_dtensor.ops.rules import RULES, Call, Local, Operand, OpSpec, local_part, result_dtype
from ms_dtensor.ops.rules.attention import LAYOUTS
from ms_dtensor.ops.rules.names import PRIMITIVES
from ms_dtensor.tools import forms

Result = tuple[tuple[int, ...], str]  # shape and dtype

# Words for the numbers that MindSpore passes for them; a primitive itself takes words only.
_WORDS = {
    "reduction": ("sum", "mean", "none"), "input_layout": LAYOUTS, "layout": LAYOUTS,
    "rounding_mode": ("", "trunc", "floor"), "interpolation_mode": ("bilinear", "nearest"),
    "padding_mode": ("zeros", "border", "reflection"), "LinalgQr.mode": ("reduced", "complete", "r"),
    "indexing": ("ij", "xy"), "norm": ("backward", "forward", "ortho"),
    "reduce": ("none", "add"), "approximate": ("none", "tanh"),
}

# Their weights, or angles, may be float32 where activations are not.
_WIDE_CONSTANTS = frozenset(("AddLayerNormV2", "AddRmsNorm", "BatchNormExt", "GroupNorm", "LayerNormExt", "RmsNorm",
                             "RotaryPositionEmbedding"))

# Calls of the corpus that the inference refuses, or answers otherwise than the CPU: what it says, and why that is no fault.
KNOWN = {
    "RealView": ("not supported in Graph mode", "a view, which a compiled function does not have"),
    "ImagView": ("not supported in Graph mode", "a view, which a compiled function does not have"),
    "Vdot": ("Not implement", "MindSpore 2.10 composes it"),
    "IndexPut": ("the rank of x2 must be equal to 1", "an index of two dims, which MindSpore 2.10 takes on CPU only"),
    "Gmm": ("must be an incrementing sequence", "counts by expert; the check is that of ends"),
    "Div": ("[((), 'float32')]", "`ops.div` of a 0-d float by a number; `/` and `mint.div` (`Divs`) do not widen it"),
    "MoeFinalizeRouting": ("[bias] must be Tensor but got None", "a compiled call needs the bias that others may lack"),
    "Nansum": ("int64", "MindSpore's CPU kernel keeps int32; a result's dtype is the kernel's"),
}


@dataclass
class Gate:
    """What was asked: calls by primitive that agree, those that cannot be asked and why, and the mismatches."""

    agree: Counter = field(default_factory=Counter)
    unasked: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def answer(self, name: str, of: str, prim, args, promised) -> None:
        """Asks for one call, and compares; `promised`: a (shape, dtype) each, None where it is not told."""
        try:
            said = infer(prim, args)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as e:
            text = " ".join(str(e).split())
            if "bfloat16" not in of:  # whether that is taken is the kernel's business
                self._note(name, of, f"refused: {text[:160]}", text)
            return
        if len(said) != len(promised) or any(
                mine not in (None, its) for a, b in zip(promised, said) for mine, its in zip(a, b)):
            self._note(name, of, f"we say {list(promised)}, MindSpore {said}", str(said))
        else:
            self.agree[name] += 1

    def _note(self, name: str, of: str, what: str, text: str) -> None:
        known = KNOWN.get(name)
        if known is not None and known[0] in text:
            self.unasked[name] = known[1]
        else:
            self.wrong.append(f"{name} ({of}): {what}")


def infer(prim, args) -> list[Result]:
    """Shape and dtype of each result, without running anything."""
    def shapes_and_dtypes(*args):
        results = prim(*args)
        out = ()
        if isinstance(results, (tuple, list)):  # noqa: UP038  compiled
            for r in results:
                out = out + ((r.shape, r.dtype),)
        else:
            out = ((results.shape, results.dtype),)
        return out
    return [(tuple(shape), dtype_name(dtype).rstrip("_")) for shape, dtype in ms.jit(shapes_and_dtypes)(*args)]


def as_primitive(c: Captured) -> tuple[Any, tuple] | None:
    """The primitive of a call and its own arguments; None: it is a name that only Python code on CPU has."""
    cls = getattr(gen_ops_prim, c.name, None) or getattr(ops, c.name, None)
    if cls is None:
        return None if c.primitive is None else (c.primitive, c.args)
    called, made = (inspect.signature(f).parameters for f in (cls.__call__, cls.__init__))
    takes, gets = list(called)[1:], list(made)[1:]

    def taken(name, value):
        words = _WORDS.get(name) or _WORDS.get(f"{c.name}.{name}")
        if value.__class__ is int and (name == "dtype" or words):
            return words[value] if words else as_dtype(value)
        return value
    if c.primitive is not None:
        if takes == ["args"]:
            return c.primitive, c.args[:len(getattr(cls, "__mindspore_signature__", c.args))]
        return c.primitive, tuple(map(taken, takes, c.args))
    names, values = takes + gets, list(c.args)
    if len(values) > len(names) or (takes[-1] in ("shape", "repeats") and isinstance(values[-1], int)):  # x.repeat(2, 3)
        values = [*values[:len(takes) - 1], tuple(values[len(takes) - 1:])]
    bound = {name: taken(name, value) for name, value in {**dict(zip(names, values)), **c.kwargs}.items()}
    args = [bound.get(name, called[name].default) for name in takes]
    return cls(**{name: bound[name] for name in gets if name in bound}), tuple(args)


def check_call(c: Captured, gate: Gate, cases: int = 0) -> None:
    """Asks about one call of the corpus, of its rule's first `cases` ones on shards, and about bfloat16."""
    made = as_primitive(c)
    entry = PRIMITIVES.get(c.name)
    if made is None or entry is None:
        if not c.name.startswith("Deprecated"):
            gate.unasked[c.name] = "no primitive of this name" if made is None else "no rule"
        return
    op, params = entry
    tensors = leaves((c.args, c.kwargs), Tensor)
    call, spec = _spec(c, op, params, [dtype_name(t.dtype) for t in tensors])
    results = c.result if isinstance(c.result, tuple | list) else (c.result,)
    if spec.by_data:
        gate.unasked[c.name] = "its shapes depend on data"
        return
    if len(spec.shapes) != len(results):
        gate.wrong.append(f"{c.name} (whole): the rule promises {len(spec.shapes)} results, there are {len(results)}")
        return
    shapes = [tuple(r._shape) if s is None else tuple(s) for s, r in zip(spec.shapes, results)]
    gate.answer(c.name, "whole", *made, [(s, dtype_name(r.dtype).rstrip("_")) for s, r in zip(shapes, results)])
    if any(t.dtype == ms.float32 for t in tensors):
        for which in ("bfloat16", "bfloat16 beside float32")[:1 + (c.name in _WIDE_CONSTANTS)]:
            _check_bfloat16(c, which, op, params, shapes, results, gate)
    if None not in spec.shapes:
        for case in [x for x in spec.cases if any(p.is_shard() for p in x.ins)][:cases]:
            _check_shard(c, call, spec, case, tensors, gate)


def _check_bfloat16(c: Captured, which: str, op: str, params, shapes, results, gate: Gate) -> None:
    """The same call of bfloat16 in the place of float32: of all operands, or of the first one only."""
    narrow: list = []

    def narrowed(t):
        narrow.append(t if t.dtype != ms.float32 or which != "bfloat16" and len(narrow) else t.astype(ms.bfloat16))
        return narrow[-1]
    args, kwargs = map_leaves(narrowed, (c.args, c.kwargs), Tensor)
    call, spec = _spec(c, op, params, [dtype_name(t.dtype) for t in narrow])
    dtypes = spec.dtypes or (result_dtype(call),) * len(shapes)
    dtypes = [d if d == "bfloat16" and r.dtype == ms.float32 else dtype_name(r.dtype).rstrip("_")
              for d, r in zip(dtypes, results)]  # as `in_float32` rounds them
    gate.answer(c.name, which, *as_primitive(replace(c, args=args, kwargs=kwargs)), [*zip(shapes, dtypes)])


def _spec(c: Captured, op: str, params, dtypes) -> tuple[Call, OpSpec]:
    tensors = leaves((c.args, c.kwargs), Tensor)
    operands = tuple(Operand(i, tuple(t.shape), d) for i, (t, d) in enumerate(zip(tensors, dtypes)))
    it = iter(operands)
    bound = bind_arguments(c.name, params, c.args, c.kwargs, c.primitive)
    call = Call(op, {k: as_operands(v, it) for k, v in bound.items()}, operands)
    return call, RULES[op](call)


def _check_shard(c: Captured, call: Call, spec: OpSpec, case, tensors, gate: Gate) -> None:
    """One rank's call, of two ranks, where that cuts evenly."""
    mesh = DeviceMesh("cpu", np.arange(2))
    ins = tuple(Layout(mesh, [p], o.shape, o.dtype) for p, o in zip(case.ins, call.operands))
    outs = tuple(Layout(mesh, [p], s) for p, s in zip(case.outs, spec.shapes))
    uneven = [n % 2 for x in ins for n, axes in zip(x.shape, x.dim_axes) if axes]
    if any(uneven) or any(extent % 2 for _, _, extent in case.even):
        return
    at, rng = Local(ins, outs, (1,)), np.random.default_rng(0)
    whole = [Layout(mesh, [REPLICATE if p.is_partial() else p], o.shape, o.dtype) for p, o in zip(case.ins, call.operands)]
    shards = [Tensor(split(t.asnumpy(), x, rng)[(1,)]) for t, x in zip(tensors, whole)]
    promised = [(x.local_shape((1,)), None) for x in outs]
    named, empty = local_part(call, spec, at)
    if empty is not None:
        return
    if named is None:
        it = iter(shards)
        args, kwargs = (map_leaves(lambda _: next(it), x, Tensor) for x in (c.args, c.kwargs))
        gate.answer(c.name, f"one of two shards, {case}", *as_primitive(replace(c, args=args, kwargs=kwargs)), promised)
        return

    def form(*xs):
        made.append(LOCAL_OPS[named.name](*fill_operands(named.args, xs), **named.kwargs))
    made: list = []
    with rehearsal("Ascend"), frozen(0):
        calls = capture(form, *shards)
    results = made[0] if isinstance(made[0], tuple | list) else made
    if [tuple(r._shape) for r in results] != [s for s, _ in promised]:
        gate.wrong.append(f"{c.name} (one of two shards, {case}): the form gives {[tuple(r._shape) for r in results]}")
    for part in calls:
        if part.own is None:
            try:
                check_call(part, gate)
            except OpRuleError:  # arguments that we give a kernel, and take from nobody
                results = part.result if isinstance(part.result, tuple | list) else (part.result,)
                promised = [(tuple(r._shape), dtype_name(r.dtype).rstrip("_")) for r in results]
                gate.answer(part.name, "called by a form", *as_primitive(part), promised)


def calls_of_corpus(families=(), limit: int | None = None) -> dict[str, list[Captured]]:
    """Primitive -> its different calls, `limit` at most, in the public forms of the corpus."""
    found: dict[str, dict] = {}
    for path in sorted(Path(forms.__file__).parent.glob("forms_*.py")):
        if not families or path.stem.removeprefix("forms_") in families:
            for form in importlib.import_module(f"{forms.__name__}.{path.stem}").FORMS:
                for args in form.variants() if form.raises is None else ():
                    with frozen(0):
                        _note(capture(form.fn, *map_leaves(Tensor, args, np.ndarray)), found, limit)
    return {name: list(calls.values()) for name, calls in found.items() if calls}


def calls_of_llama() -> dict[str, list[Captured]]:
    """Primitive -> its different calls in a forward of the recipe's model, and its loss."""
    from model_zoo.llama.config import ModelConfig
    from model_zoo.llama.model import Llama, cross_entropy
    cfg = ModelConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=64, ffn_dim=48)
    found: dict[str, dict] = {}
    ids = Tensor(np.arange(16, dtype=np.int32).reshape(2, 8))
    _note(capture(lambda x: cross_entropy(Llama(cfg)(x), x), ids), found, None)
    return {name: list(calls.values()) for name, calls in found.items()}


def _note(calls, found: dict[str, dict], limit: int | None) -> None:
    for c in calls:
        known = found.setdefault(c.name, {})
        if c.own is None and (limit is None or len(known) < limit):
            made = repr(sorted(attributes(c.primitive).items(), key=str)) if c.primitive is not None else ""
            known.setdefault((made, _kind(c.args), _kind(tuple(c.kwargs.items()))), c)


def _kind(v):
    if isinstance(v, Tensor):
        return tuple(v._shape), str(v.dtype)
    return tuple(map(_kind, v)) if isinstance(v, tuple | list) else repr(v)


def ask(calls: dict[str, list[Captured]], gate: Gate, cases: int, folder) -> None:
    """Asks about all these calls; what MindSpore's compiler writes down of a refused one goes to `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        for each in calls.values():
            for c in each:
                check_call(c, gate, cases)
    finally:
        os.chdir(before)
