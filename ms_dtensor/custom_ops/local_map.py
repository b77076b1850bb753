# SPDX-License-Identifier: Apache-2.0
"""`local_map`: a function of local tensors as a function of DTensors; the way out where no rule fits.

The caller says how inputs must lie and what the results are; everything else follows. Where a replicated input
is varying is read off these placements as off a rule's case: on an axis where any input or result is `Shard` or `Partial`
ranks do different work with it, so its cotangents are summands. Invariant: a result's global shape is either given, or
implied by inputs whose shards are all alike, or compared across ranks; it is never guessed from one uneven shard.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from mindspore import Parameter, Tensor, ops

from .. import comm
from ..comm.pretended import executing
from ..core.layout import Layout, known_layout, said_of
from ..core.mesh import DeviceMesh, coordinates
from ..core.placements import FusedShard, Placement
from ..core.tree import leaves, map_leaves
from ..debug.types.check import checked_run
from ..debug.types.moves import mesh_inside
from ..dispatch import modes, patches, policy
from ..dispatch.dispatcher import plain_tree
from ..dispatch.operands import (
    DIFFERENTIABLE,
    as_local,
    dtype_name,
    recording,
    redistribute_operand,
    reduce_nonlinear,
    wrap,
)
from ..dispatch.planner import describe_operands
from ..dispatch.replicas import compare_replicas, compare_shards
from ..errors import LayoutError, MeshError, MixedOperandError
from ..ops.local import Nothing, StandIn
from ..ops.rules.nothing import has_empty_shard


def local_map(fn: Callable | None = None, out_placements=None, in_placements=None, *, in_grad_placements=None,
              device_mesh: DeviceMesh | None = None, redistribute_inputs: bool = False, out_shapes=None,
              check: bool = False) -> Callable:
    """`fn`, written for local tensors, as a function of DTensors; meaning as PyTorch's, gradients included.

    Args:
        fn: takes and returns plain tensors (and anything else); it may communicate by itself.
            Shards may be empty; MindSpore's CPU sums over no elements are uninitialised memory, so it has to look.
        out_placements: of the results: one placements (a sequence with one `Placement` per mesh axis, or a dict by
            axis name) for one result, else a tuple with one such entry per result; None leaves a result plain.
        in_placements: one entry per positional argument: placements for a DTensor, or for all DTensors in a list (or a
            tuple of placements, one for each), None for anything else. Without it every DTensor is taken as it lies.
        in_grad_placements: one entry per positional argument: how the cotangent that `fn` produces for it is laid out.
            Default: as the input, and a sum where the input is replicated on an axis that shards something else.
        device_mesh: of the results; default the inputs' mesh.
        redistribute_inputs: move inputs that lie otherwise than `in_placements` says; else they are refused.
        out_shapes: global shape of each result (a tuple of shapes, or a function of the inputs' global shapes). Only
            needed where shards are uneven: without it ranks compare their results' shapes, which communicates.
        check: the first call with inputs of given layouts follows what its tensors mean on each axis (replicated, invariant,
            varying, partial), and refuses, with the line of the op, what would be another value or gradient than the one of
            the whole. `debug.checks(types=True)` checks all functions so. See the how-to "Check local code by types".

    Returns:
        The function. If no argument is a DTensor it calls `fn` and returns what it returned.

    Raises:
        LayoutError: inputs that do not lie as `in_placements` says, results that are not shards of one tensor (where
            `out_shapes` is wrong of one rank's, on that rank; inside `debug.checks()` on all); inside `debug.checks()` also
            results that claim to be replicated and differ from rank to rank.
        ImplicitCommError: the redistribution policy is "explicit", and an input would be moved, shapes compared, or a
            result that is no sum reduced under autograd. `fn` is not called.
        OpRuleError: a check refuses an op of `fn`, or what `out_placements` says of a result.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor import Shard, Replicate, Partial
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> row = md.local_map(lambda x, w: x @ w, [Partial()], ([Shard(1)], [Shard(0)]))
        >>> x = md.ones((2, 4), device_mesh=mesh, placements=[Shard(1)])
        >>> w = md.ones((4, 3), device_mesh=mesh, placements=[Shard(0)])
        >>> row(x, w)
        DTensor(f32[2, 3]{sum: tp}, mesh=(tp=1), rank 0 holds [2, 3])
    """
    if fn is None:
        return functools.partial(local_map, out_placements=out_placements, in_placements=in_placements,
                                 in_grad_placements=in_grad_placements, device_mesh=device_mesh,
                                 redistribute_inputs=redistribute_inputs, out_shapes=out_shapes, check=check)
    name = getattr(fn, "__name__", type(fn).__name__)

    mapping = Mapping(f"local_map({name})", out_placements, in_placements, in_grad_placements, device_mesh,
                      redistribute_inputs, out_shapes, checked=set() if check else None)

    @functools.wraps(fn, updated=())
    def mapped(*args, **kwargs):
        return mapping.run(fn, args, kwargs)
    return mapped


class Mapping:
    """One declaration of how a local function's inputs and results lie; `run` applies it to a call.

    What it means for inputs of given layouts is worked out once. Arguments after `who`, which names the function in
    messages, are those of `local_map`; `additive`: summands of a result are those of one op, so empty shards make zeros;
    `checked`: the layouts for which types were checked, of a function that is always checked.
    """

    def __init__(self, who, out_placements, in_placements=None, in_grad_placements=None, device_mesh=None,
                 redistribute_inputs=False, out_shapes=None, additive=False, checked=None):
        self.who, self.outs, self.ins, self.grads = who, out_placements, in_placements, in_grad_placements
        self.mesh, self.redistribute, self.shapes = device_mesh, redistribute_inputs, out_shapes
        self.additive, self.always = additive, checked is not None
        self.checked = set() if checked is None else checked
        self._known: dict[tuple, tuple] = {}

    def run(self, fn, args: tuple, kwargs: dict):
        """One call: inputs are moved and shown as local tensors, `fn` runs, its results become DTensors.

        Everything that inputs alone can tell is refused before any of them is moved. Without a DTensor among the
        arguments, and inside `SkipDTensorDispatch`, this is a plain call of `fn`.

        Args:
            fn: the local function.
            args: positional arguments; `in_placements` counts these.
            kwargs: keyword arguments; DTensors in them are taken as they lie.
        """
        tensors, others = leaves(args, Tensor), leaves(kwargs, Tensor) if kwargs else []
        found = [a for a in (*tensors, *others) if _layout(a) is not None]
        if not found:
            return fn(*args, **kwargs)
        mode = modes.mode.get()
        if mode.skip:
            return fn(*plain_tree(args), **plain_tree(kwargs))
        named = [_layout(x) for x in others]
        key = _form(args), *map(_layout, tensors), *named
        if key not in self._known:
            if len(self._known) >= 256:
                self._known.clear()
            self._known[key] = self._work_out(found, args, named)
        mesh, targets, outs, own, cotangents, layouts, uneven = self._known[key]
        if mode.policy != "auto" or mode.no_gather:
            self._ask(args, targets, outs[0], layouts, self.mesh or mesh)
        local = [x if t is None else as_local(self._moved(x, t), c) for x, t, c in zip(tensors, targets, cotangents)]
        local += [x if t is None else as_local(x, t.gradient(own)) for x, t in zip(others, named)]

        def on(tensors):
            it = iter(tensors)
            refilled = (map_leaves(lambda _: next(it), v, Tensor) for v in (args, kwargs))
            return fn(*next(refilled), **next(refilled))
        check = mode.check_types or self.always
        if check:
            back = *cotangents, *(t and t.gradient(own) for t in named)
            on = self._checked_once(on, key, (*targets, *named), back, outs, mesh)
        if (dry := executing()) is not None:
            on = dry.seen(on)
        token = mesh_inside.set(mesh)
        try:
            result = self._with_nodes_of_all(on, local, layouts, outs, mesh) if uneven else on(local)
        finally:
            mesh_inside.reset(token)
        return self._wrap(result, outs, self.mesh or mesh, layouts)

    def _checked_once(self, on, key, layouts, cotangents, outs, mesh):
        """`on`, which follows types if these layouts come for the first time; what was refused is checked again."""
        if key in self.checked:
            return on

        def check(tensors):
            result = checked_run(self.who, on, tensors, layouts, cotangents, outs, self.mesh or mesh, mesh)
            self.checked.add(key)
            return result
        return check

    def _with_nodes_of_all(self, on, local, layouts, outs, mesh):
        """The results where some rank's shard of an input is empty: every rank has each input's gradient, be it zeros.

        MindSpore forgets the gradient of a product whose result is empty, and its sums of no products are uninitialised
        memory: where an `additive` function has nothing to sum up, summands and gradients are zeros.
        """
        summands = self._summands_of_nothing(layouts, outs, mesh)
        active = [x for x in local if _is_differentiable(x)]
        if summands is not None:
            local = [ops.stop_gradient(x) + StandIn.apply(x, tuple(x._shape), 0) if _is_differentiable(x) else x
                     for x in local]
        result = on(local)
        results = list(result) if isinstance(result, tuple | list) else [result]
        for i, r in enumerate(results):
            if not isinstance(r, Tensor) or _layout(r) is not None:
                continue
            if summands is not None and i in summands:
                r = StandIn.apply(r, tuple(r._shape), 0)
            if recording() and active and _is_differentiable(r):
                r = r + Nothing.apply(tuple(r._shape), r.dtype, *active)
            results[i] = r
        return type(result)(results) if isinstance(result, tuple | list) else results[0]

    def _summands_of_nothing(self, layouts, outs, mesh):
        """The results of which this rank has a summand, if all it has to do is on an empty shard, else None."""
        if not self.additive or mesh.get_coordinate() is None:
            return None
        empty = {a for t in layouts if has_empty_shard(t) for n, axes in zip(t.local_shape(), t.dim_axes) if not n
                 for a in axes}
        placed = [None if o is None else _expanded(o, mesh) for o in outs[0]]
        if not empty or any(p is None or not any(p[a].is_partial("sum") or p[a].is_shard() for a in empty) for p in placed):
            return None
        return [i for i, p in enumerate(placed) if p is not None and any(p[a].is_partial("sum") for a in empty)]

    def _work_out(self, found, args, named):
        """(mesh, layouts that the arguments' tensors must have, results, axes with work of their own, their cotangents,
        all layouts, whether some rank's shard of one is empty)
        """
        mesh = self._common_mesh(found)
        targets = self._targets(args, mesh)
        outs = self._out_placements(mesh)
        own = self._varying_axes((*targets, *named), outs, mesh)
        layouts = [t for t in (*targets, *named) if t is not None]
        return (mesh, targets, outs, own, self._cotangents(args, targets, own, mesh), layouts,
                any(map(has_empty_shard, layouts)))

    # -- what was declared ------------------------------------------------------------------------------------------
    def _common_mesh(self, found) -> DeviceMesh:
        meshes = list(dict.fromkeys(_layout(x).mesh for x in found))
        if len(meshes) > 1:
            raise LayoutError(f"For '{self.who}', the inputs live on different meshes.",
                              describe_operands(found), "One call works on one mesh.",
                              f"x.redistribute({meshes[0]}, placements)")
        return meshes[0]

    def _targets(self, args, mesh) -> list[Layout | None]:
        """The layout each tensor among the positional arguments must have, None for plain ones."""
        if self.ins is None:
            return [_layout(x) for x in leaves(args, Tensor)]
        targets: list[Layout | None] = []
        for i, x, entry in self._with_entries("in_placements", self.ins, args, mesh):
            layout = _layout(x)
            if layout is None and entry is not None:
                raise MixedOperandError(f"For '{self.who}', argument {i} is a plain tensor, but 'in_placements' lays it "
                                        "out.", f"in_placements[{i}] = {entry}",
                                        "A plain tensor does not say how it is laid out.",
                                        ("distribute_tensor(t, device_mesh, placements)", "None at that place"))
            if layout is not None and entry is None:
                raise LayoutError(f"For '{self.who}', argument {i} is a DTensor, but 'in_placements' has None there.",
                                  layout.describe(), "", f"write {list(layout.placements)}")
            target = None if layout is None else self._target(i, layout, entry)
            if target is not None and target is not layout and not self.redistribute:
                raise LayoutError(f"For '{self.who}', argument {i} does not lie as 'in_placements' says.",
                                  f"{layout.describe()}, wanted {target}", "'redistribute_inputs' is off.",
                                  (f".redistribute(placements={list(target.placements)})", "redistribute_inputs=True"))
            targets.append(target)
        return targets

    def _with_entries(self, name, entries, args, mesh) -> list[tuple]:
        """(place, tensor, its entry of the declaration `name`) of each tensor among the positional arguments."""
        entries = _per_item(entries, mesh)
        if len(entries) != len(args):
            raise LayoutError(f"For '{self.who}', '{name}' has {len(entries)} entries for {len(args)} arguments.",
                              "", "There is one entry per positional argument.", "write None for plain arguments")
        return [one for i, (value, entry) in enumerate(zip(args, entries))
                for one in self._tensors_of(name, i, value, entry, mesh)]

    def _tensors_of(self, name, place, value, entry, mesh) -> list[tuple]:
        if isinstance(value, Tensor):
            return [(place, value, entry)]
        if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):  # as `leaves` has their tensors
            value = [getattr(value, name, None) for name in value.__dataclass_fields__]
        if not isinstance(value, tuple | list | dict):
            return []
        members = list(value.values()) if isinstance(value, dict) else value
        alike = entry is None or _is_placements(entry, mesh)
        if not alike and len(entry) != len(members):
            raise LayoutError(f"For '{self.who}', '{name}' has {len(entry)} entries for the {len(members)} members of "
                              f"argument {place}.", f"{name}[{place}] = {entry}",
                              "Tensors in a list are laid out alike, by one placements, or each by its own.",
                              "write one placements, or one per member")
        return [one for j, member in enumerate(members)
                for one in self._tensors_of(name, f"{place}[{j}]", member, entry if alike else entry[j], mesh)]

    def _target(self, i, layout: Layout, entry) -> Layout:
        try:
            draft = layout.with_placements(entry)
        except (LayoutError, MeshError) as error:
            raise said_of(error, self.who) from None
        if draft.placements == layout.placements:  # no order was asked for, so the present one will do
            return layout
        for a, (have, want) in enumerate(zip(layout.placements, draft.placements)):
            if want.is_partial() and have != want:
                raise LayoutError(f"For '{self.who}', argument {i} cannot become {want!r} on axis "
                                  f"{layout.mesh.mesh_dim_names[a]!r}.", layout.describe(),
                                  "Summands cannot be made from their sum.", f"write {have!r}")
        return draft

    def _out_placements(self, mesh):
        """(entries, whether there is one result)."""
        mesh = self.mesh or mesh
        single = self.outs is not None and _is_placements(self.outs, mesh)
        return [self.outs] if single or self.outs is None else list(self.outs), single or self.outs is None

    def _cotangents(self, args, targets, own, mesh):
        given: list[Any] = [None] * len(targets)
        if self.grads is not None:
            given = [entry for *_, entry in self._with_entries("in_grad_placements", self.grads, args, mesh)]
        return [None if t is None else t.gradient(own) if g is None else t.with_placements(g)
                for t, g in zip(targets, given)]

    def _varying_axes(self, targets, outs, mesh) -> tuple[int, ...]:
        """Axes on which ranks do different work with what is replicated there."""
        placed = [t.placements for t in targets if t is not None]
        if self.mesh is None or self.mesh == mesh:
            placed += [_expanded(o, mesh) for o in outs[0] if o is not None]
        return tuple(a for a in range(mesh.ndim) if any(not p[a].is_replicate() for p in placed))

    def _ask(self, args, targets, entries, layouts, mesh) -> None:
        """The redistribution policy about all that a call is going to communicate by itself."""
        for (place, x, _), t in zip(self._with_entries("", (None,) * len(args), args, mesh), targets):
            if t is not None:
                policy.check_move(self.who, _layout(x), t, f"argument {place}")
        on = "\n".join(x.describe() for x in layouts)
        placed = [_expanded(e, mesh) for e in entries if e is not None]
        if placed and not self._shapes_are_told(layouts):
            policy.check(self.who, "ranks have to compare the shapes of their results", on,
                         ("pass out_shapes=, the results' global shapes", "pad the inputs to a multiple of the axis size"),
                         "Shards of the inputs are uneven, so no rank knows the others' results.")
        odd = {mesh.mesh_dim_names[a] for p in placed for a, q in enumerate(p)
               if q.is_partial() and not q.is_partial("sum") and mesh.shape[a] > 1}
        if odd and recording():
            policy.check(self.who, f"a result has to be reduced over {', '.join(sorted(odd))}", on,
                         ("reduce it in the function, and say Replicate() of it", "return a Partial() sum"),
                         "Under autograd only sums may stay partial.")

    def _moved(self, x, target: Layout):
        return x if x._layout is target else redistribute_operand(x, target, recording(), self.who)

    # -- results ------------------------------------------------------------------------------------------------------
    def _wrap(self, result, outs, mesh, layouts):
        entries, single = outs
        results = [result] if single else list(result) if isinstance(result, tuple | list) else None
        if results is None or len(results) != len(entries):
            got = "one result" if results is None else f"{len(results)} results"
            raise LayoutError(f"For '{self.who}', 'out_placements' has {len(entries)} entries for {got}.", "",
                              "There is one entry per result.", "write None for results that are no tensors")
        for i, (r, entry) in enumerate(zip(results, entries)):
            if entry is not None and not isinstance(r, Tensor):
                raise LayoutError(f"For '{self.who}', result {i} is a {type(r).__name__}, but 'out_placements' lays it out.",
                                  f"out_placements[{i}] = {entry}", "", "write None there")
            if entry is not None and _layout(r) is not None:
                raise LayoutError(f"For '{self.who}', result {i} is a DTensor already.", _layout(r).describe(),
                                  "The function works on local tensors.", "return .to_local(), or write None there")
        placed = [(i, r) for i, r in enumerate(results) if entries[i] is not None]
        shapes = self._global_shapes([(entries[i], r) for i, r in placed], mesh, layouts)
        drafts = [known_layout(mesh, entries[i], tuple(shape), dtype_name(r.dtype)) for (i, r), shape in zip(placed, shapes)]
        if drafts and modes.mode.get().check_rules:
            names, local = [f"result {i}" for i, _ in placed], [r for _, r in placed]
            compare_replicas(self.who, names, local, drafts)
            if not all(draft.is_replicated() for draft in drafts):
                from_inputs = self.shapes is None and self._shapes_are_told(layouts)
                compare_shards(self.who, names, local, mesh, None if from_inputs else drafts)
        for (i, r), draft in zip(placed, drafts):
            if mesh.get_coordinate() is not None and draft.local_shape() != tuple(r._shape):
                raise LayoutError(f"For '{self.who}', result {i} has local shape {list(r._shape)}, not its shard's.",
                                  draft.describe(), f"Its shard there is {list(draft.local_shape())}.",
                                  "correct 'out_shapes'")
        for (i, r), draft in zip(placed, drafts):
            if isinstance(r, Parameter):
                r = r.view(r._shape)
            results[i] = reduce_nonlinear(wrap(r, draft), recording(), self.who)
        patches.install()
        return results[0] if single else type(result)(results)

    def _global_shapes(self, placed, mesh, layouts):
        if self.shapes is not None:
            shapes = self.shapes(*(x.shape for x in layouts)) if callable(self.shapes) else self.shapes
            shapes = list(shapes)
            return [shapes] if shapes and isinstance(shapes[0], int) or (placed and not shapes) else shapes
        drafts = [Layout(mesh, entry, tuple(r._shape), dtype_name(r.dtype)) for entry, r in placed]
        if not drafts or self._shapes_are_told(layouts):
            return [[n * d.divisor(i) for i, n in enumerate(d.shape)] for d in drafts]
        return _compared(self.who, drafts, mesh)

    def _shapes_are_told(self, layouts) -> bool:
        """Whether the results' global shapes need no comparison: they are given, or all shards of each input alike."""
        return self.shapes is not None or all(n % x.divisor(d) == 0 for x in layouts for d, n in enumerate(x.shape))


def _compared(who: str, drafts, mesh: DeviceMesh):
    """Global shapes of results whose local shapes differ: all ranks tell theirs, and must make one tensor each."""
    if mesh.get_coordinate() is None:
        raise LayoutError(f"For '{who}', a rank outside the mesh cannot know the results' shapes.",
                          f"mesh({mesh.describe()})",
                          "Input shards are uneven.", "pass out_shapes=")
    with comm.annotate(implicit=True, src=f"{who} local shapes", dst="global shapes"):
        everyone = mesh.get_group().all_gather_object([d.shape for d in drafts])
    of = dict(zip(coordinates(mesh), everyone))
    out = []
    for j, draft in enumerate(drafts):
        shape = []
        for d, axes in enumerate(draft.dim_axes):
            line = {tuple(c if a in axes else 0 for a, c in enumerate(at)) for at in of}
            shape.append(sum(of[at][j][d] for at in line))
        whole = Layout(mesh, draft.placements, shape, draft.dtype, draft.order)
        if any(whole.local_shape(at) != tuple(shapes[j]) for at, shapes in of.items()):
            held = "\n".join(f"coordinate {at} holds {list(s[j])}, its shard is {list(whole.local_shape(at))}"
                             for at, s in sorted(of.items()))
            raise LayoutError(f"For '{who}', the local results {j} are not the shards of one tensor.",
                              f"{whole.describe()}\n{held}", "Shards are chunks of ceil(n / axis size) rows.",
                              ("pad the inputs to a multiple of the axis size", "redistribute them to Replicate"))
        out.append(shape)
    return out


def _layout(x) -> Any:
    return getattr(x, "_layout", None)


def _is_differentiable(x) -> bool:
    return dtype_name(x.dtype).startswith(DIFFERENTIABLE)


def _form(value):
    """Where tensors are in nested arguments."""
    if isinstance(value, tuple | list | dict):
        return tuple(map(_form, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _is_placements(entry, mesh) -> bool:
    """One set of placements, as opposed to a tuple of them."""
    if isinstance(entry, Placement | dict):
        return True
    if not isinstance(entry, tuple | list) or not entry:
        return False
    return all(isinstance(p, str) for p in entry) or (
        len(entry) == mesh.ndim and all(isinstance(p, Placement) for p in entry))


def _per_item(entries, mesh) -> tuple:
    return (entries,) if _is_placements(entries, mesh) else tuple(entries)


def _expanded(entry, mesh) -> tuple[Placement, ...]:
    """The placement per axis of any accepted form; shapes do not matter here."""
    ndim = len(entry) if isinstance(entry, tuple | list) and not all(isinstance(p, Placement) for p in entry) else \
        1 + max((abs(p.dim) for p in _placements_of(entry) if p.is_shard()), default=0)
    rows = {p.dim % ndim: sum(p.parts) for p in _placements_of(entry) if isinstance(p, FusedShard)}
    return Layout(mesh, entry, tuple(rows.get(d, prod(mesh.shape)) for d in range(ndim))).placements


def _placements_of(entry):
    return (entry,) if isinstance(entry, Placement) else tuple(entry.values()) if isinstance(entry, dict) else tuple(entry)
