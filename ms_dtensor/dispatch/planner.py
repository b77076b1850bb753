# SPDX-License-Identifier: Apache-2.0
"""From a call's layouts and static arguments to its plan: names are looked up, the rule asked, a case chosen per axis.

Runs once per key. Everything that can be refused is refused here, before anything is communicated.
"""
from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from mindspore import Parameter, Tensor

from ..comm.pretended import executing
from ..core.layout import Layout, short_dtype
from ..core.tree import leaves
from ..errors import MixedOperandError, OpRuleError
from ..internals.target import cpu_kernels
from ..ops.local import LOCAL_OPS, WRITES, decomposition, wrapper_in_float32
from ..ops.local.extremes import winners_of_shard
from ..ops.local.orders import to_any_order
from ..ops.local.random import DRAWS
from ..ops.rules import (
    CONSTANTS,
    RULES,
    Call,
    Local,
    Operand,
    Unfit,
    has_empty_shard,
    has_thin_shard,
    local_part,
    result_dtype,
)
from ..ops.rules.names import NATIVE, PRIMITIVES
from ..ops.rules.results import result_dtypes
from ..ops.rules.select import choose
from ..ops.rules.view import order_of_view, view_kind
from ..ops.rules.write import INPLACE
from . import inplace, modes, policy
from .composite import COMPOSED
from .op_call import OpCall, attributes, bind_arguments
from .op_plan import Abstract, LocalRun, OpPlan, Results, Step
from .operands import DIFFERENTIABLE, SHARDED_BY, differentiated, dtype_name, is_number

CONSTANTS_ALIKE = ('parallelize_module(net, device_mesh, constants="replicate"), if net makes the tensor in its construct, '
                   "alike on all ranks")
_ARITHMETIC = frozenset("add sub mul div pow maximum minimum".split())


class Composition:
    """The plan of a call that is made of other DTensor calls; each of those has its own."""

    __slots__ = ("name", "op", "params")
    short = False

    def __init__(self, name, op, params):
        self.name, self.op, self.params = name, op, params

    def run(self, call: OpCall):
        """The results of one call, as DTensors."""
        bound = bind_arguments(self.name, self.params, call.args, call.kwargs or {}, call.primitive)
        mode, tensors = modes.mode.get(), call.tensors
        if mode.policy != "auto":  # what the user can do about it is to make the dim whole, as the op's own rule would
            targets = [step.target for step in plan_for(self.op, bound, tensors, mode).steps]
            policy.check_op(self.op, tensors, targets, (), mode._replace(no_gather=False))
        return COMPOSED[self.op].run(self.name, **bound)


def _must_compose(op, bound, tensors, mode) -> bool:
    mesh = _common_mesh(op, tensors)
    found = (getattr(x, "_layout", None) or _promote(op, x, mesh, tensors, mode) for x in tensors)
    layouts = tuple(layout.without_small_axes() for layout in found)
    operands = tuple(Operand(i, layout.shape, layout.dtype) for i, layout in enumerate(layouts))
    it = iter(operands)
    call = Call(op, {k: as_operands(v, it) for k, v in bound.items()}, operands)
    differentiable = mode.higher_order and any(o.dtype.startswith(DIFFERENTIABLE) for o in operands)
    return differentiable or COMPOSED[op].when(call, layouts)


def build_plan(name: str, call: OpCall, mode) -> OpPlan | Composition:
    """The plan of a call of MindSpore's, which calls the op `name`.

    Raises:
        OpRuleError: an op without a rule, arguments that its rule does not know, or operands that fit no case of it.
        MixedOperandError: a plain tensor among them.
    """
    writes = name in INPLACE
    entry = INPLACE[name] if writes else PRIMITIVES.get(name)
    if any(isinstance(a, np.ndarray) for a in (*call.args, *(call.kwargs or {}).values())):
        raise MixedOperandError(
            f"For '{name.removeprefix('Deprecated').lower()}', a numpy.ndarray meets a DTensor.",
            describe_operands(call.tensors),
            "An array does not say how it is laid out, so one rank's data could pass for the whole.",
            ("distribute_tensor(Tensor(array), device_mesh, placements)", "x.full_tensor().asnumpy(), to work in NumPy"))
    if entry is None or entry[0] not in RULES:
        if "Adam" in name:
            raise OpRuleError(f"For '{name}', a DTensor was given to an optimizer's fused kernel.",
                              describe_operands(call.tensors), "The kernel would see a shard for the whole.",
                              ("ms_dtensor.optim.AdamW", "nn.AdamWeightDecay or nn.Adam, which work on the shards"))
        near = difflib.get_close_matches(name, PRIMITIVES, 1)
        raise OpRuleError(f"For '{name}', there is no rule for DTensors.", describe_operands(call.tensors),
                          "An op without a rule is refused; it never runs on local data by itself."
                          + (f" (Nearest op with a rule: {near[0]}.)" if near else ""),
                          ("redistribute the operands to Replicate and take to_local()",
                           "run it on shards explicitly with local_map(fn, out_placements)",
                           f"teach the op with register_rule({name!r}, cases)"))
    op, params = entry
    bound = bind_arguments(name, params, call.args, call.kwargs or {}, call.primitive)
    if writes:
        return plan_write(op, {k: v for k, v in bound.items() if k != "attrs"}, call.tensors, mode, params)
    if op in COMPOSED and _must_compose(op, bound, call.tensors, mode):
        return Composition(name, op, params)
    return plan_for(op, bound, call.tensors, mode,
                    LocalRun(None, _substitute(name, call), native=name in NATIVE, places=_places_in_call(call)),
                    dtype_place=params.index("dtype") if "dtype" in params else None)


def plan_by_rule(op: str, names: tuple[str, ...], call: OpCall, mode) -> OpPlan:
    """The plan of a function of local tensors, with a registered rule that knows its arguments by `names`."""
    bound = bind_arguments(op, names, call.args, call.kwargs or {})
    return plan_for(op, bound, call.tensors, mode, LocalRun(places=_places_in_call(call)), as_it_is=True)


def plan_own(op: str, arguments: dict, tensors, mode) -> OpPlan:
    """The plan of an op of our own."""
    return plan_for(op, arguments, tensors, mode, form=LOCAL_OPS.get(op))


def plan_write(op: str, arguments: dict, tensors, mode, params: tuple[str, ...] = ()) -> OpPlan:
    """The plan of an op whose result is put into its first operand; `params`: in which order its form takes arguments."""
    inplace.check_writable(tensors[0], op, False, True)
    return plan_for(op, arguments, tensors, mode, form=WRITES.get(op), writes=True, params=params)


def _substitute(name: str, call: OpCall):
    """On CPU Python code in the place of a primitive that has no kernel there; else None."""
    if not cpu_kernels():
        return None
    substitute = decomposition(name, {} if call.primitive is None else attributes(call.primitive))
    unneeded = getattr(substitute, "unneeded", None)  # a function of the operands' shapes
    return None if unneeded is not None and unneeded(*(x.shape for x in call.tensors)) else substitute


def plan_for(op: str, arguments: dict, tensors, mode, original: LocalRun | None = None, form: Callable | None = None,
             writes: bool = False, as_it_is: bool = False, dtype_place: int | None = None,
             params: tuple[str, ...] = ()) -> OpPlan:
    """The plan of a canonical op: a case of its rule is chosen per axis, and all else follows from that.

    Args:
        op: canonical name.
        arguments: by the names of its rule.
        tensors: those among them, in order of appearance.
        mode: modes in force.
        original: how MindSpore's own call runs on a rank, if the rule names no form of ours.
        form: of an op of our own: what runs then, with `arguments` in their order.
        writes: the result is put into the first operand, which stays where it is.
        as_it_is: a user's function: it is not computed in float32 instead of bfloat16.
        dtype_place: where the original call takes a dtype, if positionally.
        params: the order in which `form` takes `arguments`, where keywords may have brought another.
    """
    mesh = _common_mesh(op, tensors)
    alike = {id(arguments[name]) for name in CONSTANTS[op](arguments)} if op in CONSTANTS else ()
    layouts = [getattr(x, "_layout", None) or _promote(op, x, mesh, tensors, mode, id(x) in alike) for x in tensors]
    operands = tuple(Operand(i, layout.shape, layout.dtype) for i, layout in enumerate(layouts))
    it = iter(operands)
    spec_call = Call(op, {k: as_operands(v, it) for k, v in arguments.items()}, operands)
    try:
        spec = RULES[op](spec_call)
    except Unfit:
        raise OpRuleError(f"For '{op}', the operands' sizes do not fit.", ", ".join(x.describe() for x in layouts),
                          "These are the sizes of the whole tensors; what does not fit there is an error on one device too.",
                          ("a plain tensor that is one rank's shard: DTensor.from_local(x, mesh, placements)",
                           "in a style: input_layouts=Replicate(), if every rank passes the whole",
                           "distribute_tensor(x, mesh), of a mask that a replicated cell took for rows")) from None
    choice = choose(spec_call, spec, tuple(layouts), writes, mode.no_gather)
    steps = tuple(_step(x, layout, target, varying, id(x) in alike)
                  for x, layout, target, varying in zip(tensors, layouts, choice.targets, choice.own))
    promised = (layouts[0].dtype,) if writes else spec.dtypes or (result_dtype(spec_call),) * len(spec.shapes)
    in_float32 = None
    if cpu_kernels() and not as_it_is:
        in_float32 = wrapper_in_float32(op, tensors, promised, dtype_place)
    again = _again(op, tensors, layouts) if mode.higher_order and not as_it_is else None
    constants = tuple(i for i, x in enumerate(layouts) if x.dtype == "bool") if op in _ARITHMETIC else ()
    if op == "cast" and not promised[0].startswith(DIFFERENTIABLE):
        constants = (0,)
    local = replace(original or LocalRun(), in_float32=in_float32, again=again, constants=constants)
    if None in spec.shapes:  # a rule in case notation alone: the first local results tell (see custom_ops/register.py)
        if executing() is not None:
            local = replace(local, abstract=Abstract(op, spec_call.args, None))
        return OpPlan(op, steps, local, Results(op, mesh, [(o, None) for o in choice.outs], spec.by_data))
    drafts = tuple(Layout(mesh, p, shape, layouts[0].dtype, order) for p, order, shape in choice.outs)
    at = Local(choice.targets, drafts, mesh.get_coordinate())
    named, empty = local_part(spec_call, spec, at)
    if named is not None:
        form, template, keywords = LOCAL_OPS[named.name], named.args, named.kwargs
    else:
        template, keywords = tuple(spec_call.args[p] for p in params or spec_call.args if p in spec_call.args), {}
    if form is not None:
        wrapper = wrapper_in_float32(op, tensors, promised, None) if in_float32 else None  # its arguments are others
        local = replace(local, form=(wrapper(form) if wrapper else form, template, keywords), in_float32=None,
                        places=_places(template, Operand, lambda i, operand: operand.index))
    kind, view = view_kind(spec_call), None
    if kind and getattr(tensors[0], "_layout", None) is not None:
        view = (kind == "view" and steps[0].target is None, form is None and local.substitute is None,
                order_of_view(spec_call, spec.shapes[0] or (), has_thin_shard(layouts[0])))
    winners = None
    if spec.winners is not None and drafts[0].has_nonlinear_partial:
        winners = partial(winners_of_shard, spec.winners, at.in_offset(0)[spec.winners.dims[0]])
    if executing() is not None:
        dtypes = promised if writes or spec.dtypes else result_dtypes(spec_call, len(spec.shapes))
        local = replace(local, abstract=Abstract(
            op, spec_call.args, None if spec.by_data else tuple(layout.local_shape() for layout in drafts), dtypes,
            kind == "view"))
    uneven = any(map(has_empty_shard, choice.targets))
    local = replace(local, empty=empty, beside_empty=uneven and empty is None)
    return OpPlan(op, steps, local, Results(op, mesh, list(zip(choice.outs, drafts))), view, writes, uneven,
                  named is not None and named.name in DRAWS, winners)


def _again(op: str, tensors, layouts):
    """How a local op runs whose gradient may be differentiated again (see `ops/local/orders.py`)."""
    if not any(layout.dtype.startswith(DIFFERENTIABLE) and x._requires_grad for x, layout in zip(tensors, layouts)):
        return None
    run = to_any_order(op)
    if run is None:
        raise OpRuleError(f"For '{op}', a derivative of its gradient was asked for.",
                          "\n".join(layout.describe() for layout in layouts),
                          "It has not been shown to be right: MindSpore 2.10 forgets what views in a backward depend on.",
                          ("write it in element-wise ops, products, convolutions, sums and reshapes",
                           "a DFunction with second_order = True", "take the inner gradient outside the outer function"))
    return run


def _step(x, layout: Layout, target: Layout, varying, constant: bool) -> Step:
    is_dtensor = getattr(x, "_layout", None) is not None
    # a sum over one rank is the value itself, and integers have no cotangent
    varying = [a for a in varying if layout.mesh.shape[a] > 1 and layout.dtype.startswith(DIFFERENTIABLE)]
    if not is_dtensor and (constant or not layout.shape) and not (varying and differentiated(x)):
        return Step(None, None, None)
    return Step(None if is_dtensor else layout, None if target is layout else target,
                target.gradient(varying) if varying else None)


def _places_in_call(call: OpCall) -> tuple[tuple[int, int], ...]:
    places = _places(call.args, Tensor, lambda i, x: i)
    return places if len(places) == len(call.tensors) else ()


def _places(arguments, kind: type, number) -> tuple[tuple[int, int], ...]:
    """((place, operand), ...) of the operands among arguments; nothing if one is nested in another argument."""
    found = [(k, v) for k, v in enumerate(arguments) if isinstance(v, kind)]
    if len(found) != len(leaves(arguments, kind)):
        return ()
    return tuple((k, number(i, v)) for i, (k, v) in enumerate(found))


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
                          "One op works on one mesh.", _to_one_mesh(meshes, tensors))
    return meshes[0]


def _to_one_mesh(meshes, tensors) -> tuple[str, ...]:
    """What brings operands together: a move, or where each rank sees another mesh, what each rank holds on the root."""
    root = meshes[0].root
    if not any(mesh.varies for mesh in meshes) or any(mesh.root != root for mesh in meshes):
        return (f"x.redistribute({meshes[0]}, placements) brings one to the other",)
    layout = next(x._layout for x in tensors if getattr(x, "_layout", None) is not None and x._layout.mesh.varies)
    placed = {a: p for a, p in zip(layout.mesh.mesh_dim_names, layout.placements) if not p.is_replicate()}
    others = ", ".join(repr(a) for a in root.mesh_dim_names if a not in layout.mesh.mesh_dim_names)
    whole = [f"replicate(net, mesh=mesh[{others}]), of the model that was cut on mesh({layout.mesh.describe()})"] if any(
        isinstance(x, Parameter) and x._layout is layout for x in tensors) else []
    return (*whole, f"distribute_tensor(t, mesh, {placed}) lays it out on mesh({root.describe()}) in the first place",
            f"DTensor.from_local(x.to_local(), mesh, {placed}, shape=x.shape), if x is the same along the other axes")


def _promote(op, x, mesh, tensors, mode, constant: bool = False) -> Layout:
    """Layout of a plain operand: a number, a constant, or anything under implicit_replication, counts as Replicate."""
    made_inside = mode.constants and x.__class__ is Tensor and not differentiated(x)
    if constant or mode.implicit_replication or made_inside or is_number(x):
        return Layout(mesh, None, tuple(x._shape), dtype_name(x.dtype))
    which = f"parameter '{x.name}'" if isinstance(x, Parameter) else "a plain Tensor"
    if isinstance(x, Parameter) and x.__dict__.get(SHARDED_BY) == "":
        raise MixedOperandError(
            f"For '{op}', {which} of shape {list(x._shape)}, which data parallelism leaves as it is, meets a DTensor.",
            describe_operands(tensors), "A plain parameter is each rank's own: it works on local tensors, and nobody sums "
            "its gradient.",
            ("replicate(cell, mesh=...), of its cell and before the model, for the gradient of one device",
             "fully_shard(shard_placement_fn=lambda p: Replicate()) in place of 'ignored_params', likewise",
             "x.to_local(), to work on this rank's rows, with a gradient of these alone"))
    raise MixedOperandError(
        f"For '{op}', {which} of shape {list(x._shape)} meets a DTensor.", describe_operands(tensors),
        "A plain tensor does not say how it is laid out, so one rank's data could pass for the whole.",
        (*((CONSTANTS_ALIKE, "distribute_tensor(t, device_mesh, placements), of the whole",
            "DTensor.from_local(t, device_mesh, placements), of this rank's rows, as its labels are",
            "replicate(loss_fn, mesh=...), which takes plain labels so",
            "self.register_buffer(name, t) for a constant of a cell, before it is distributed")
           if not isinstance(x, Parameter) else ("distribute_module(cell, device_mesh) makes every parameter a DTensor",)),
         "x.to_local(), to work on plain tensors", "with implicit_replication(): ..., if all ranks hold the same values"))


def describe_operands(tensors) -> str:
    """Operands as messages print them: layouts by axis name, plain tensors as such; ranks where only they tell meshes."""
    lines = []
    meshes = {x._layout.mesh for x in tensors if getattr(x, "_layout", None) is not None}
    alike = len({mesh.describe() for mesh in meshes}) < len(meshes) and not any(mesh.varies for mesh in meshes)
    for x in tensors:
        layout = getattr(x, "_layout", None)
        if layout is None:
            lines.append(f"{short_dtype(dtype_name(x.dtype))}{list(x._shape)} plain {type(x).__name__}")
            continue
        ranks = f" of ranks {np.array2string(layout.mesh.mesh.ravel(), separator=', ')}" if alike else ""
        lines.append(layout.describe() + ranks)
    return "\n".join(lines)
