# SPDX-License-Identifier: Apache-2.0
"""From a call's layouts and static arguments to its plan: names are looked up, the rule asked, a case chosen per axis.

Runs once per key. Everything that can be refused is refused here, before anything is communicated.
"""
from __future__ import annotations

import difflib
from functools import partial
from math import prod

from mindspore import Parameter, Tensor

from ..core.layout import Layout, short_dtype
from ..core.placements import Partial
from ..errors import MixedOperandError, OpRuleError
from ..ops.local import LOCAL_OPS, Fill, Question, decomposition, widen
from ..ops.local.extremes import winners_of_shard
from ..ops.rules import (
    RULES,
    Call,
    Local,
    LocalCall,
    Operand,
    empty_results,
    has_empty_shard,
    result_dtype,
    results_of_nothing,
)
from ..ops.rules.names import ALIASES, NATIVE, PRIMITIVES
from ..ops.rules.select import choose
from ..ops.rules.view import view_kind
from ..ops.rules.write import INPLACE
from . import inplace
from .composite import COMPOSED
from .op_plan import OpPlan, check_policy
from .operands import dtype_name

_DIFFERENTIABLE = ("float", "bfloat", "complex")
_OWN = frozenset(("name", "attrs", "init_attrs", "_update_parameter", "input_names", "output_names"))


class Composition:
    """The plan of a call that is made of other DTensor calls; each of those has its own."""

    __slots__ = ("name", "op", "params", "uses")

    def __init__(self, name, op, params):
        self.name, self.op, self.params, self.uses = name, op, params, 0

    def run(self, func, head, args, kwargs, tensors, mode):
        self.uses += 1
        bound = bind_arguments(self.name, self.params, args, kwargs or {}, head)
        if mode.policy != "auto":  # what the user can do about it is to make the dim whole, as the op's own rule would
            check_policy(plan_for(self.op, bound, tensors, mode), tensors, mode)
        return COMPOSED[self.op].run(self.name, **bound)


def _must_compose(op, bound, tensors, mode) -> bool:
    if not mode.implicit_replication and any(getattr(x, "_layout", None) is None for x in tensors):
        return False  # `_promote` decides whether a plain operand is a constant or a mistake
    mesh = _common_mesh(op, tensors)
    layouts = tuple(getattr(x, "_layout", None) or Layout(mesh, None, tuple(x._shape), dtype_name(x.dtype)) for x in tensors)
    layouts = tuple(layout.without_small_axes() for layout in layouts)
    operands = tuple(Operand(i, layout.shape, layout.dtype) for i, layout in enumerate(layouts))
    it = iter(operands)
    return COMPOSED[op].when(Call(op, {k: as_operands(v, it) for k, v in bound.items()}, operands), layouts)


def build_plan(name, args, kwargs, tensors, mode, head=None) -> OpPlan | Composition:
    if name in INPLACE:
        op, params = INPLACE[name]
        return widened(plan_in_place(op, bind_arguments(name, params, args, kwargs, head), tensors, mode), op, tensors)
    entry = PRIMITIVES.get(name)
    if entry is None or entry[0] not in RULES:
        near = difflib.get_close_matches(name, PRIMITIVES, 1)
        raise OpRuleError(f"For '{name}', there is no rule for DTensors.", describe_operands(tensors),
                          "An op without a rule is refused; it never runs on local data by itself."
                          + (f" (Nearest op with a rule: {near[0]}.)" if near else ""),
                          ("redistribute the operands to Replicate and take to_local()",
                           "run it on shards explicitly with local_map(fn, out_placements)",
                           f"teach the op with register_rule({name!r}, cases)"))
    op, params = entry
    bound = bind_arguments(name, params, args, kwargs, head)
    if op in COMPOSED and _must_compose(op, bound, tensors, mode):
        return Composition(name, op, params)
    plan = plan_for(op, bound, tensors, mode)
    plan.native = name in NATIVE
    if plan.outs[0][0].device_type == "cpu":
        substitute = decomposition(name, {} if head is None else attributes(head[0]))
        unneeded = getattr(substitute, "unneeded", None)  # a function of the operands' shapes
        plan.substitute = None if unneeded is not None and unneeded(*(x.shape for x in tensors)) else substitute
    return widened(plan, op, tensors, params.index("dtype") if "dtype" in params else None)


def widened(plan: OpPlan, op: str, tensors, place: int | None = None) -> OpPlan:
    """The plan; on CPU one with bfloat16 operands or results computes in float32 (see `ops/local/dtypes.py`)."""
    if plan.outs[0][0].device_type == "cpu" and ("bfloat16" in plan.promised or any(
            dtype_name(x.dtype) == "bfloat16" for x in tensors)):
        widen(plan, op, plan.promised, place)
    return plan


def plan_own(op, arguments, tensors, mode) -> OpPlan:
    """The plan of an op of our own; with "=" before its name it writes its result into its first operand."""
    build = plan_in_place if op[0] == "=" else plan_for
    return widened(build(op.lstrip("="), arguments, tensors, mode, own=""), op, tensors)


def bind_arguments(name, params, args, kwargs, head=None) -> dict:
    """Arguments by name; a classic primitive's attributes (a stride, ...) come as the argument "attrs"."""
    bound: dict = {}
    i = 0
    for p in params:
        if p[0] == "*":
            if i < len(args):
                bound[p[1:]] = tuple(args[i:])
            i = len(args)
        elif i < len(args):
            bound[p] = args[i]
            i += 1
    if i < len(args):
        raise OpRuleError(f"For '{name}', {len(args)} arguments were given, the rule knows {params}.")
    known = {p.lstrip("*") for p in params}
    for k, v in kwargs.items():
        k = k if k in known else ALIASES.get(k, k)
        if k not in known:
            raise OpRuleError(f"For '{name}', the rule does not know the argument {k!r}.", "", f"It knows {params}.",
                              "pass it positionally, or use local_map")
        bound[k] = v
    if head is not None:
        bound["attrs"] = attributes(head[0])
    return bound


def attributes(primitive) -> dict:
    """What a classic primitive was made with (a stride, a probability): in its attributes or merely on the object."""
    out = {k: v for k, v in primitive.__dict__.items() if k not in _OWN}
    out.update((k, v) for k, v in primitive.attrs.items() if k not in _OWN)
    return out


def plan_in_place(op, arguments, tensors, mode, own=None) -> OpPlan:
    """A plan that leaves its first operand where it is and writes the result into it."""
    inplace.check_writable(tensors[0], op, False)
    plan = plan_for(op, {k: v for k, v in arguments.items() if k != "attrs"}, tensors, mode, own="=", keep=True)
    plan.target = tensors[0]._layout
    return plan


def plan_for(op, arguments, tensors, mode, own=None, keep=False) -> OpPlan:
    mesh = _common_mesh(op, tensors)
    layouts, operands = [], []
    for i, x in enumerate(tensors):
        layout = getattr(x, "_layout", None)
        if layout is None:
            layout = _promote(op, x, mesh, tensors, mode)
        layouts.append(layout)
        operands.append(Operand(i, layout.shape, layout.dtype))
    it = iter(operands)
    spec_call = Call(op, {k: as_operands(v, it) for k, v in arguments.items()}, tuple(operands))
    spec = RULES[op](spec_call)
    choice = choose(spec_call, spec, tuple(layouts), keep)
    steps = []
    for i, (layout, target, own_axes) in enumerate(zip(layouts, choice.targets, choice.own)):
        cotangent = target.gradient()
        # a sum over one rank is the value itself, and integers have no cotangent
        own_axes = [a for a in own_axes if mesh.shape[a] > 1 and layout.dtype.startswith(_DIFFERENTIABLE)]
        if own_axes:
            placements = list(cotangent.placements)
            for a in own_axes:
                placements[a] = Partial()
            cotangent = cotangent.with_placements(placements, cotangent.order)
        is_dtensor = getattr(tensors[i], "_layout", None) is not None
        constant = not is_dtensor and not layout.shape
        steps.append((None if is_dtensor or constant else layout, None if target is layout or constant else target,
                      cotangent if own_axes and not constant else None))
    if None in spec.shapes:  # a rule in case notation alone: the first local results tell (see registry.py)
        return OpPlan(op, steps, None, None, [(mesh, o, None) for o in choice.outs])
    layouts_out = tuple(Layout(mesh, p, shape, layouts[0].dtype, order) for p, order, shape in choice.outs)
    at = Local(choice.targets, layouts_out, mesh.get_coordinate() or (0,) * mesh.ndim)
    plan = OpPlan(op, steps, local_form(at, spec, spec_call, own), results_without_kernel(at, spec, spec_call),
                  [(mesh, o, draft) for o, draft in zip(choice.outs, layouts_out)])
    plan.view = view_kind(spec_call)
    if spec.winners is not None and layouts_out[0].has_nonlinear_partial:
        plan.winners = partial(winners_of_shard, spec.winners, at.in_offset(0)[spec.winners.dims[0]])
    plan.promised = (layouts[0].dtype,) if keep else promised(spec, spec_call)
    plan.question, plan.stands_in = question_of(at, spec, spec_call, own)
    return plan


def promised(spec, spec_call) -> tuple[str, ...]:
    """The dtype of each result as the rule knows it."""
    return spec.dtypes or (result_dtype(spec_call),) * len(spec.shapes)


def local_form(at: Local, spec, spec_call, own=None):
    """(function, argument template, keywords) of the local form at one coordinate; None: the original call."""
    form = spec.local(at) if spec.local is not None else None
    if form is None and own is not None:
        form = LocalCall(own + spec_call.op, tuple(spec_call.args.values()))
    return None if form is None else (LOCAL_OPS[form.name], form.args, form.kwargs)


def results_without_kernel(at: Local, spec, spec_call) -> tuple[Fill, ...] | None:
    """The results of a rank that has nothing to compute, with dtypes as far as the rule knows them; else None."""
    fills = results_of_nothing(spec_call, at)
    if fills is None and at.ins[0].mesh.get_coordinate() is None:  # outside the mesh: no kernel would know what to do
        fills = tuple(((0,) * len(layout.shape), 0) for layout in at.outs)
    fills = empty_results(at) if fills is None else fills
    if fills is None:
        return None
    return tuple(Fill(shape, value, dtype) for (shape, value), dtype in zip(fills, promised(spec, spec_call)))


def question_of(at: Local, spec, spec_call, own=None) -> tuple[Question | None, bool]:
    """What all ranks ask MindSpore, if one cannot learn it by running the call; whether that call stands in on empty shards."""
    mesh = at.ins[0].mesh
    everyone = results_of_nothing(spec_call, at) is not None
    if not everyone and mesh.get_coordinate() is not None and not any(map(has_empty_shard, at.ins)):
        return None, False
    first = Local(at.ins, at.outs, (0,) * mesh.ndim)
    form = local_form(first, spec, spec_call, own)
    if everyone and form is not None and hasattr(form[0], "skip"):  # a random op: its rule knows the dtype
        return None, False
    extended = everyone and any(prod(layout.shape) for layout in at.outs)  # a kernel can reduce one element
    likes = tuple((tuple(max(n, 1) if extended else n for n in first.in_shape(i)), layout.dtype)
                  for i, layout in enumerate(at.ins))
    return Question(likes, form), not everyone


def as_operands(value, operands):
    if isinstance(value, Tensor):
        return next(operands)
    if isinstance(value, tuple | list):
        return tuple(as_operands(v, operands) for v in value)
    return value


def _common_mesh(op, tensors):
    meshes = list(dict.fromkeys(x._layout.mesh for x in tensors if getattr(x, "_layout", None) is not None))
    if len(meshes) > 1:
        raise OpRuleError(f"For '{op}', the operands live on different meshes.", describe_operands(tensors),
                          "One op works on one mesh.", f"x.redistribute({meshes[0]}, placements) brings one to the other")
    return meshes[0]


def _promote(op, x, mesh, tensors, mode) -> Layout:
    """Layout of a plain operand: a 0-d constant, or anything under implicit_replication, counts as Replicate."""
    if mode.implicit_replication or (x.__class__ is Tensor and x._shape == ()):
        return Layout(mesh, None, tuple(x._shape), dtype_name(x.dtype))
    which = f"parameter '{x.name}'" if isinstance(x, Parameter) else "a plain Tensor"
    raise MixedOperandError(
        f"For '{op}', {which} of shape {list(x._shape)} meets a DTensor.", describe_operands(tensors),
        "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
        ("distribute_tensor(t, device_mesh, placements)" if not isinstance(x, Parameter) else
         "distribute_module(cell, device_mesh) makes every parameter a DTensor",
         "x.to_local(), to work on plain tensors", "with implicit_replication(): ..., if all ranks hold the same values"))


def describe_operands(tensors) -> str:
    """Operands as messages print them: layouts by axis name, plain tensors as such."""
    lines = []
    for x in tensors:
        layout = getattr(x, "_layout", None)
        lines.append(layout.describe() if layout is not None else
                     f"{short_dtype(dtype_name(x.dtype))}{list(x._shape)} plain {type(x).__name__}")
    return "\n".join(lines)
