# SPDX-License-Identifier: Apache-2.0
"""The one hot path: op call -> cached plan -> local op -> DTensor.

A call's key is its op name, the interned layouts of its DTensors and its static arguments. The plan behind the key
says which operands move where, which gradient face each shows, and how results are wrapped. Building a plan consults
the rules; running one does not. Invariant: no op ever reaches local data without a rule having said so, and nothing is
communicated before every check has passed.
"""
from __future__ import annotations

import difflib
import warnings

from mindspore import Parameter, Tensor, ops
from mindspore._c_expression import NoFallbackGuard
from mindspore.common.api import _pynative_executor

from . import comm, inplace, modes
from .errors import ImplicitCommError, MixedOperandError, OpRuleError
from .layout import Layout, short_dtype
from .local_ops import TABLE, decomposition, run_local, widen, widening
from .placements import REPLICATE, Partial
from .redistribute.execute import moved, run
from .redistribute.plan import plan as plan_moves
from .rules import RULES, Call, Invoke, Local, Operand, empty_results, result_dtype
from .rules.names import ALIASES, PRIMITIVES
from .rules.select import choose
from .rules.view import VIEWS
from .rules.write import INPLACE

recording = _pynative_executor.grad_flag
make = Tensor._make_subclass
_ATOMS = frozenset((int, float, bool, str, type(None), complex))
DEFERRED = "deferred_axes"  # attribute of a Parameter: axes on which its gradient stays partial (parallel/buckets.py)
_cache: dict = {}
_CACHE_LIMIT = 16384


def dispatch(func, args, kwargs):
    """Entry from `DTensor.__fallback__`: MindSpore's op `func` called with at least one DTensor somewhere."""
    mode = modes.mode.get()
    if len(args) == 3 and args[1].__class__ is str and isinstance(args[0], ops.Primitive):
        head, args = args[:2], args[2]
    else:
        head = None
    if mode is not modes.DEFAULT and mode.skip and not _kept(func.name, mode.no_skip):
        with NoFallbackGuard():
            args, kwargs = _plain_tree(args), _plain_tree(kwargs or {})
            return func(*args, **kwargs) if head is None else func(*head, args)
    tensors: list = []
    key = (func.name, _walk(args, tensors), _walk(tuple(kwargs.items()), tensors) if kwargs else None,
           _walk(attributes(head[0]).values(), []) if head is not None else None, comm.fake_token())
    plan = _cache.get(key)
    if plan is None:
        plan = _remember(key, _build(func.name, args, kwargs or {}, tensors, mode, head))
    return plan.run(func, head, args, kwargs, tensors, mode)


def call(op: str, **arguments):
    """Runs a canonical op of our own (a rule and an entry in `local_ops`) on DTensors."""
    tensors: list = []
    key = ("@" + op, _walk(tuple(arguments.items()), tensors), None, comm.fake_token())
    mode = modes.mode.get()
    plan = _cache.get(key)
    if plan is None:
        build = _plan_in_place if op[0] == "=" else _plan_for
        plan = _remember(key, build(op.lstrip("="), arguments, tensors, mode, own=""))
    return plan.run(None, None, (), None, tensors, mode)


def _remember(key, plan):
    if len(_cache) >= _CACHE_LIMIT:
        _cache.clear()
    _cache[key] = plan
    return plan


def clear_cache() -> None:
    """Forgets all plans (they are rebuilt on demand)."""
    _cache.clear()


def _walk(values, tensors) -> tuple:
    """The hashable part of a call's arguments; tensors are appended to `tensors` in order of appearance."""
    parts: list = []
    for v in values:
        c = v.__class__
        if c in _ATOMS:
            parts.append((c, v))
        elif c is tuple or c is list:
            parts.append(_walk(v, tensors))
        elif isinstance(v, Tensor):
            tensors.append(v)
            layout = getattr(v, "_layout", None)
            parts.append(layout if layout is not None else (tuple(v._shape), str(v.dtype), c is Tensor))
        else:
            parts.append(str(v))
    return tuple(parts)


_OWN = frozenset(("name", "attrs", "init_attrs", "_update_parameter", "input_names", "output_names"))


def attributes(primitive) -> dict:
    """What a classic primitive was made with (a stride, a probability): in its attributes or merely on the object."""
    out = {k: v for k, v in primitive.__dict__.items() if k not in _OWN}
    out.update((k, v) for k, v in primitive.attrs.items() if k not in _OWN)
    return out


def _plain_tree(value):
    if isinstance(value, Tensor):
        return local_alias(value)
    if isinstance(value, tuple | list):
        return type(value)(_plain_tree(v) for v in value)
    if isinstance(value, dict):
        return {k: _plain_tree(v) for k, v in value.items()}
    return value


def _kept(name: str, no_skip) -> bool:
    return bool(no_skip) and (name in no_skip or PRIMITIVES.get(name, ("",))[0] in no_skip)


# -- running ------------------------------------------------------------------------------------------------------


class Plan:
    """What to do for one key."""

    __slots__ = ("op", "steps", "invoke", "empty", "outs", "implicit", "substitute", "widened",
                 "view", "target")

    def __init__(self, op, steps, invoke, empty, outs):
        self.op, self.steps, self.invoke, self.empty, self.outs = op, steps, invoke, empty, outs
        self.substitute, self.widened = None, None
        self.view, self.target = False, None  # whether one device gives a view; layout of the operand that is written
        self.implicit = any(target is not None for _, target, _ in steps)

    def run(self, func, head, args, kwargs, tensors, mode):
        grad = recording()
        first = tensors[0]
        if self.target is not None:
            inplace.check_writable(first, self.op, grad)
            if grad:
                tensors[0] = inplace.fresh(first)
        if self.implicit:
            _check_policy(self, tensors, mode)
        if self.substitute is not None:
            func, head = self.substitute, None
        if self.widened is not None:
            func, head = widening(func, head, *self.widened), None
        changed = False
        for i, (promoted, target, cotangent) in enumerate(self.steps):
            x = tensors[i]
            if promoted is not None:
                x = _as_replicated(x, promoted, grad)
            if target is not None:
                x = _moved_implicitly(x, target, grad)
            if grad:
                if cotangent is not None:
                    x = face(x, cotangent)
                elif DEFERRED in getattr(x, "__dict__", ()):
                    x = face(x, x._layout.gradient())
            if x is not tensors[i]:
                tensors[i] = x
                changed = True
        with NoFallbackGuard():
            if self.invoke is not None or self.empty is not None:
                result = run_local(lambda xs: _original(func, head, args, kwargs, xs), self.invoke, self.empty, tensors)
            elif changed:
                result = _original(func, head, args, kwargs, tensors)
            elif head is not None:
                result = func(*head, args)
            elif kwargs:
                result = func(*args, **kwargs)
            else:
                result = func(*args)
        out = self.wrap(result, grad)
        if self.view:
            inplace.link(first, out, self.steps[0][1] is not None, self.invoke is None and self.substitute is None)
        elif self.target is not None:
            inplace.store(first, out, grad)
            return first
        return out

    def wrap(self, result, grad):
        outs = self.outs
        if isinstance(result, Tensor):
            out = outs[0]
            if out.__class__ is not Layout:
                out = self._settle(0, result)
            return _finish(wrap(result, out), grad)
        if isinstance(result, tuple | list):
            if len(result) != len(outs):
                raise OpRuleError(f"For '{self.op}', the rule promises {len(outs)} results, MindSpore gave {len(result)}.",
                                  "", "A rule must name every result.", "report this op")
            return type(result)(
                _finish(wrap(r, o if o.__class__ is Layout else self._settle(i, r)), grad)
                for i, (r, o) in enumerate(zip(result, outs)))
        raise OpRuleError(f"For '{self.op}', MindSpore returned {type(result).__name__}, not a tensor.")

    def _settle(self, i, result) -> Layout:
        """The first result of a plan tells the dtype; its shape must be what the rule promised."""
        mesh, (placements, order, shape) = self.outs[i]
        layout = Layout(mesh, placements, shape, dtype_name(result.dtype), order)
        if layout.mesh.get_coordinate() is not None and layout.local_shape() != tuple(result._shape):
            raise OpRuleError(f"For '{self.op}', the local result has shape {tuple(result._shape)}, but the rule says "
                              f"{layout.local_shape()} of {layout}.", "", "Rule and op disagree; nothing was returned.",
                              "report this call: it is a bug in the rule")
        self.outs[i] = layout
        return layout


def _original(func, head, args, kwargs, tensors):
    """MindSpore's own call, with its tensors replaced in order of appearance."""
    it = iter(tensors)
    args = refill(args, it)
    if head is not None:
        return func(*head, args)
    return func(*args, **refill(kwargs, it)) if kwargs else func(*args)


def refill(values, tensors):
    if values.__class__ is dict:
        return {k: refill((v,), tensors)[0] for k, v in values.items()}
    out = [next(tensors) if isinstance(v, Tensor) else
           refill(v, tensors) if v.__class__ in (list, tuple) else v for v in values]
    return out if values.__class__ is list else tuple(out)


def wrap(local, layout: Layout):
    """A local tensor as a DTensor of this layout; shares storage and autograd identity (never for a Parameter)."""
    from .dtensor import DTensor
    out = make(DTensor, local)
    out._layout = layout
    return out


def _finish(x, grad):
    """Under autograd only sums may stay partial: the seed of a cotangent fits no other reduction."""
    layout = x._layout
    if grad and layout.partial_axes:
        placements = [REPLICATE if p.is_partial() and not p.is_partial("sum") else p for p in layout.placements]
        return redistribute(x, layout.with_placements(placements, layout.order), implicit=True)
    return x


def local_alias(x):
    """A plain tensor on the same storage. Shares autograd identity unless `x` is a leaf Parameter."""
    return make(Tensor, x)


def wanted_gradient(x) -> Layout:
    """The layout in which `x`'s producer expects the cotangent; a bucketed parameter's stays partial on some axes."""
    gradient = x._layout.gradient()
    axes = x.__dict__.get(DEFERRED)
    if not axes:
        return gradient
    return gradient.with_placements([Partial() if a in axes and p.is_replicate() else p
                                     for a, p in enumerate(gradient.placements)], gradient.order)


def face(x, cotangent: Layout):
    """`x` as a plain local tensor whose cotangent arrives in the layout `cotangent`.

    One node per (recorded tensor, cotangent), so that q, k and v reading one activation share one reduction. Leaves
    outlive a recorded forward and are converted at each use: a stale node would cut their gradient.
    """
    layout = x._layout
    wanted = wanted_gradient(x)
    if cotangent is wanted:
        return x
    if x._is_leaf:
        return moved(x, layout, layout, cotangent, wanted, data=x)
    faces = x.__dict__.setdefault("_faces", {})
    out = faces.get(cotangent)
    if out is None:
        source = x.__dict__.get("_source")
        if source is None:
            out = moved(x, layout, layout, cotangent, wanted, data=x)
        else:
            out = moved(source[0], source[1], layout, cotangent, source[2], data=x)
        faces[cotangent] = out
    return out


def redistribute(x, dst: Layout, implicit: bool = False):
    """`x` in another layout, differentiably; the same object if it is there already."""
    src = x._layout
    if src is dst:
        return x
    moves = plan_moves(src, dst)
    with comm.annotate(implicit=implicit, src=repr(src), dst=repr(dst)):
        if not recording():
            return wrap(run(moves, local_alias(x)), dst)
        wanted = wanted_gradient(x)
        out = wrap(moved(x, src, dst, dst.gradient(), wanted), dst)
    if all(src.placements[a].is_partial("sum") for a in src.partial_axes):  # others have weights of their own
        out.__dict__["_source"] = (x if x._is_leaf else local_alias(x), src, wanted)
    return out


def _as_replicated(x, layout: Layout, grad):
    """A plain tensor under implicit_replication; a node of its own keeps a Parameter's gradient connected."""
    return wrap(moved(x, layout, layout, layout.gradient(), layout.gradient(), data=x) if grad else local_alias(x), layout)


def _moved_implicitly(x, target: Layout, grad):
    if not grad or x._is_leaf:
        return redistribute(x, target, implicit=True)
    memo = x.__dict__.setdefault("_moves", {})
    out = memo.get(target)
    if out is None:
        out = memo[target] = redistribute(x, target, implicit=True)
    return out


def _check_policy(plan: Plan, tensors, mode):
    if mode.policy == "auto":
        return
    for x, (_, target, _) in zip(tensors, plan.steps):
        if target is None or getattr(x, "_layout", None) is None:
            continue
        moves = plan_moves(x._layout, target)
        if all(m.kind == "cut" for m in moves):
            continue
        error = ImplicitCommError(
            f"For '{plan.op}', an operand has to be moved first: {', '.join(m.kind for m in moves)}.",
            f"{x._layout.describe()} -> {target}", "The redistribution policy is 'explicit'.",
            f"insert .redistribute(placements={list(target.placements)})")
        if mode.policy == "explicit":
            raise error
        warnings.warn(str(error).replace("is 'explicit'", "is 'warn'"), stacklevel=5)


# -- planning -----------------------------------------------------------------------------------------------------


def _build(name, args, kwargs, tensors, mode, head=None) -> Plan:
    if name in INPLACE:
        op, params = INPLACE[name]
        return _plan_in_place(op, _bind(name, params, args, kwargs, head), tensors, mode)
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
    plan = _plan_for(op, _bind(name, params, args, kwargs, head), tensors, mode)
    if plan.outs[0][0].device_type == "cpu":
        plan.substitute = decomposition(name, {} if head is None else attributes(head[0]))
        if any(dtype_name(x.dtype) == "bfloat16" for x in tensors):
            widen(plan, op, tensors)
    return plan


def _bind(name, params, args, kwargs, head=None) -> dict:
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


def _plan_in_place(op, arguments, tensors, mode, own=None) -> Plan:
    """A plan that leaves its first operand where it is and writes the result into it."""
    inplace.check_writable(tensors[0], op, False)
    plan = _plan_for(op, {k: v for k, v in arguments.items() if k != "attrs"}, tensors, mode, own="=", keep=True)
    plan.target = tensors[0]._layout
    return plan


def _plan_for(op, arguments, tensors, mode, own=None, keep=False) -> Plan:
    mesh = _common_mesh(op, tensors)
    layouts, operands = [], []
    for i, x in enumerate(tensors):
        layout = getattr(x, "_layout", None)
        if layout is None:
            layout = _promote(op, x, mesh, tensors, mode)
        layouts.append(layout)
        operands.append(Operand(i, layout.shape, layout.dtype))
    it = iter(operands)
    spec_call = Call(op, {k: _as_operands(v, it) for k, v in arguments.items()}, tuple(operands))
    spec = RULES[op](spec_call)
    choice = choose(spec_call, spec, tuple(layouts), keep)
    steps = []
    for i, (layout, target, own_axes) in enumerate(zip(layouts, choice.targets, choice.own)):
        cotangent = target.gradient()
        if own_axes:
            placements = list(cotangent.placements)
            for a in own_axes:
                placements[a] = Partial()
            cotangent = cotangent.with_placements(placements, cotangent.order)
        is_dtensor = getattr(tensors[i], "_layout", None) is not None
        constant = not is_dtensor and not layout.shape
        steps.append((None if is_dtensor or constant else layout, None if target is layout or constant else target,
                      cotangent if own_axes and not constant else None))
    outs = [(mesh, o) for o in choice.outs]
    layouts_out = tuple(Layout(mesh, p, shape, layouts[0].dtype, order) for p, order, shape in choice.outs)
    at = Local(choice.targets, layouts_out, mesh.get_coordinate() or (0,) * mesh.ndim)
    form = spec.local(at) if spec.local is not None else None
    if form is None and own is not None:
        form = Invoke(own + op, tuple(spec_call.args.values()))
    invoke = None if form is None else (TABLE[form.name], form.args, form.kwargs)
    plan = Plan(op, steps, invoke, empty_with_dtypes(at, spec, spec_call), outs)
    plan.view = op in VIEWS
    return plan


def empty_with_dtypes(at: Local, spec, spec_call):
    """`empty_results` with the dtype of each result."""
    empty = empty_results(at)
    if empty is None:
        return None
    dtypes = spec.dtypes or (result_dtype(spec_call),) * len(empty)
    return tuple((shape, value, dtype) for (shape, value), dtype in zip(empty, dtypes))


def _as_operands(value, operands):
    if isinstance(value, Tensor):
        return next(operands)
    if isinstance(value, tuple | list):
        return tuple(_as_operands(v, operands) for v in value)
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


def dtype_name(dtype) -> str:
    """`mindspore.float32` -> "float32"."""
    name = str(dtype).lower()
    return name[name.rfind(".") + 1:]
