# SPDX-License-Identifier: Apache-2.0
"""`register_rule`: teach an op, in the notation that rules are made of.

A line is one legal case on ONE mesh axis; the mesh of any rank is the product of lines, chosen by cost. A registered
rule goes into the same tables as a built-in one, so a call costs the same. Text alone does not tell the results' global
shapes: without `shapes` a case is used only where it splits evenly (the local results then tell), and with it uneven
and empty shards stay sharded too. Not here: the notation's meaning (`rules/spec.py`) and its proof (`verify/`).
"""
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..core.placements import Partial, Placement, Shard
from ..core.tree import argument_names, first_dtensor
from ..dispatch import modes
from ..dispatch.dispatcher import call_by_rule, clear_cache
from ..dispatch.operands import local_alias, recording
from ..errors import ConfigError, OpRuleError
from ..ops.rules import RULES, Call, Case, OpSpec
from ..ops.rules.names import PRIMITIVES
from ..ops.rules.spec import REPLICATE
from . import checks

_TOKEN = re.compile(r"R|P|S\((-?\d+)\)|P\((\w+)\)")
_registered: dict[str, Registration] = {}


def register_rule(op: str, cases, *, shapes=None, params: str = "*inputs", verify: Sequence | None = None,
                  override: bool = False) -> Registration:
    """Teaches how an op may be split; takes effect at once, in the whole process.

    Args:
        op: MindSpore's primitive name (the error of an op without a rule quotes it), or a new name: the `_op_name` of a
            `DFunction`, or of a local function decorated with the result.
        cases: text, one case per line, operands' placements -> results' (`S(dim)`, `R`, `P`, `P(max)`; "#" comments); a
            sequence of `Case`; or a function `Call -> OpSpec`, as built-in rules are. All replicated is always legal.
            A line that does not fit a call (another number of tensors, a dim that is not there) is passed over.
        shapes: the results' global shapes: a function `Call -> shapes`, or text such as "m k, k n -> m n".
        params: names of the primitive's arguments, "*rest" for those that follow; what a rule function sees as `call.args`.
        verify: `(function, *sample arguments)`: every case is checked on them, forward and backward, against the whole
            op, and a wrong rule is refused. See `ms_dtensor.verify`. Inside `debug.checks()` the rule of a primitive needs
            it; another is checked by itself, at the latest before its first call.
        override: replace a rule that exists.

    Returns:
        The registration: `unregister()` or a `with` block ends it; as a decorator it makes a local function an op.

    Raises:
        ConfigError: text that is no case notation, a name that has a rule, or nothing to verify the rule of a
            primitive with inside `debug.checks()`.
        OpRuleError: `verify` found the rule wrong.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> rule = md.register_rule("scaled_rows", '''
        ...     S(0), S(0) -> S(0)
        ...     S(1), R    -> S(1)
        ... ''', shapes="m n, m -> m n")
        >>> @rule
        ... def scaled_rows(x, factors):
        ...     return x * factors.reshape((-1, 1))
        >>> x = md.ones((4, 6), device_mesh=mesh, placements=[md.Shard(0)])
        >>> scaled_rows(x, md.ones((4,), device_mesh=mesh))
        DTensor(f32[4@tp, 6], mesh=(tp=1), rank 0 holds [4, 6])
        >>> rule.unregister()
    """
    if not isinstance(op, str) or not op:
        given = repr(op) if isinstance(op, str) else f"a {type(op).__name__}"
        raise ConfigError(f"For 'register_rule', 'op' must be a name, but got {given}.", "", "",
                          "pass the primitive's name, or a new one")
    if (op in RULES or op in PRIMITIVES) and not override:
        raise ConfigError(f"For 'register_rule', {op!r} has a rule already.", "", "Two rules for one op would be a guess.",
                          ("pass override=True to replace it", "choose another name"))
    if verify is None and op in PRIMITIVES and modes.mode.get().check_rules:
        raise ConfigError(f"For 'register_rule', nothing was given to verify the rule of {op!r} with.", "",
                          "debug.checks() is on: rules of primitives are verified when they are registered.",
                          "pass verify=(the public function, *sample arguments)")
    rule = _as_rule(op, cases, shapes)
    registration = Registration(op, rule, tuple(params.split()))
    registration.shapes = shapes if isinstance(shapes, str) else None
    registration._install()
    if verify is not None:
        try:
            registration.check(*verify)
        except BaseException:
            registration.unregister()
            raise
    return registration


def registered(op: str) -> Registration | None:
    """The user's rule in force for `op`."""
    return _registered.get(op)


def unregister_rule(op: str) -> None:
    """Takes back `register_rule(op, ...)`; a built-in rule it replaced is in force again.

    Example:
        >>> import ms_dtensor as md
        >>> rule = md.register_rule("my_op", "S(0) -> S(0)")
        >>> md.unregister_rule("my_op")
        >>> rule
        Registration('my_op', ended)
    """
    if op not in _registered:
        raise ConfigError(f"For 'unregister_rule', no rule was registered for {op!r}.", "", "",
                          f"registered are {sorted(_registered)}")
    _registered[op].unregister()


class Registration:
    """A rule in force; see `register_rule`."""

    def __init__(self, op: str, rule: Callable[[Call], OpSpec], params: tuple[str, ...]):
        self.op, self.rule, self.params = op, rule, params
        self.shapes: str | None = None
        self._before: list[tuple[dict, Any]] = []

    def _install(self) -> None:
        self._before = [(table, table.get(self.op)) for table in (RULES, PRIMITIVES, _registered)]
        RULES[self.op], PRIMITIVES[self.op], _registered[self.op] = self.rule, (self.op, self.params), self
        clear_cache()

    def unregister(self) -> None:
        """Ends it; does nothing the second time."""
        if _registered.get(self.op) is not self:
            return
        for table, value in self._before:
            if value is None:
                del table[self.op]
            else:
                table[self.op] = value
        clear_cache()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc) -> None:
        self.unregister()

    def __repr__(self):
        return f"Registration({self.op!r}{'' if _registered.get(self.op) is self else ', ended'})"

    def __call__(self, fn: Callable) -> Callable:
        """`fn`, a function of local tensors, as this op: on DTensors its arguments are moved and shown by the rule."""
        local = local_function(fn)
        names = argument_names(fn)

        @functools.wraps(fn)
        def op(*args, **kwargs):
            if first_dtensor(args, kwargs) is None:
                return fn(*args, **kwargs)
            if modes.mode.get().check_rules:
                checks.rule_once(self, op, args, kwargs)
            return call_by_rule(self.op, local, names, args, kwargs)
        vars(op)["registration"] = self
        if modes.mode.get().check_rules and self.shapes is not None:
            checks.by_names(self, op, self.shapes)
        return op

    def check(self, fn: Callable, *args, **kwargs):
        """Verifies the rule on sample arguments of `fn`, forward and backward; returns the report.

        Args:
            fn: the function decorated with this registration, a `DFunction` of this `_op_name`, or a public MindSpore
                function that reaches the primitive.
            *args: sample arguments; tensors may be NumPy arrays.
            **kwargs: keyword arguments.

        Raises:
            OpRuleError: a case is wrong, or none was checked.
        """
        from ..debug.verify.registered import check_registered
        report = check_registered(self, fn, args, kwargs)
        if report.wrong or not report.compared:
            raise OpRuleError(f"For 'register_rule', the rule of {self.op!r} is wrong." if report.wrong else
                              f"For 'register_rule', no case of {self.op!r} could be checked on these arguments.",
                              "\n".join(report.wrong[:5]),
                              f"{len(report.wrong)} of {report.compared} comparisons with the whole op failed.",
                              "correct the cases")
        return report


def local_function(fn: Callable) -> Callable:
    """`fn` for operands that may be DTensors showing their local storage: it sees plain tensors, still connected."""

    def plain(v):
        if v.__class__ is tuple or v.__class__ is list:
            return type(v)(map(plain, v))
        if getattr(v, "_layout", None) is None:
            return v
        return v.view(v._shape) if v._is_leaf and recording() else local_alias(v)

    def local(*args, **kwargs):
        return fn(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()}) if kwargs else fn(*map(plain, args))
    return local


# -- text to rule ------------------------------------------------------------------------------------------------------
def _as_rule(op: str, cases, shapes) -> Callable[[Call], OpSpec]:
    if callable(cases):
        return cases
    parsed = parse_cases(cases) if isinstance(cases, str) else tuple(cases)
    if not parsed or not all(isinstance(c, Case) for c in parsed):
        raise ConfigError(f"For 'register_rule', 'cases' of {op!r} holds no case: {cases!r}.", "", "",
                          'write lines such as "S(0), R -> S(0)"')
    results = {len(c.outs) for c in parsed}
    if len(results) > 1:
        raise ConfigError(f"For 'register_rule', the cases of {op!r} disagree about the number of "
                          f"results: {sorted(results)}.")
    shapes = signature(shapes) if isinstance(shapes, str) else shapes
    return functools.partial(_rule_of_cases, parsed, shapes, results.pop())


def _rule_of_cases(parsed, shapes, results: int, call: Call) -> OpSpec:
    shapes = (None,) * results if shapes is None else tuple(tuple(int(n) for n in s) for s in shapes(call))
    if len(shapes) != results:
        raise OpRuleError(f"For '{call.op}', 'shapes' gives {len(shapes)} shapes, the cases have {results} results.")
    fitting = tuple(c for c in (_fitted(c, call, shapes) for c in parsed) if c is not None)
    counts = {len(c.ins) for c in parsed}
    if len(call.operands) not in counts:
        raise OpRuleError(f"For '{call.op}', {len(call.operands)} tensors came, its rule has cases for {sorted(counts)}.")
    return OpSpec(shapes, fitting)


def _fitted(case: Case, call: Call, shapes) -> Case | None:
    """The case with dims counted from the front and what it demands of extents; None where it does not fit the call."""
    if len(case.ins) != len(call.operands):
        return None
    ins, outs, extents = [], [], []
    for o, p in zip(call.operands, case.ins):
        if p.is_shard():
            if not -o.ndim <= p.dim < o.ndim:
                return None
            p = p.with_dim(p.dim % o.ndim)
            extents.append((o.index, p.dim, o.shape[p.dim]))
        ins.append(p)
    for p, shape in zip(case.outs, shapes):
        if p.is_shard() and shape is not None:
            if not -len(shape) <= p.dim < len(shape):
                return None
            p = p.with_dim(p.dim % len(shape))
        outs.append(p)
    if any(extent == 1 for _, _, extent in extents):  # a dim that broadcasts has nothing to split
        return None
    split = [n for _, _, n in extents] + [s[p.dim] for p, s in zip(outs, shapes) if p.is_shard() and s is not None]
    alike = None not in shapes and len(set(split)) <= 1
    return Case(tuple(ins), tuple(outs), case.even if alike else (*case.even, *extents))


def parse_cases(text: str) -> tuple[Case, ...]:
    """Lines `S(0), R -> S(0)` as cases.

    Example:
        >>> from ms_dtensor.registry import parse_cases
        >>> parse_cases("S(0), R -> S(0)  # rows\\n P, P -> P")
        (S(0), R -> S(0), P(sum), P(sum) -> P(sum))
    """
    cases = []
    for line in text.splitlines():
        bare = line.split("#")[0].strip()
        if bare:
            sides = bare.split("->")
            if len(sides) != 2:
                raise _unreadable(line, "There is one '->' per line.")
            ins, outs = (tuple(_placement(t, line) for t in side.split(",")) for side in sides)
            cases.append(Case(ins, outs))
    return tuple(cases)


def _placement(token: str, line: str) -> Placement:
    token = token.strip()
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise _unreadable(line, f"{token!r} is none of S(dim), R, P, P(max).")
    if token[0] == "S":
        return Shard(int(found[1]))
    return REPLICATE if token == "R" else Partial(found[2] or "sum")


def _unreadable(line: str, why: str) -> ConfigError:
    return ConfigError(f"For 'register_rule', this is no case: {line.strip()!r}.", "", why, 'write "S(0), R -> S(0)"')


def signature(text: str) -> Callable[[Call], tuple]:
    """"m k, k n -> m n" as a function from a call to its result shapes; a name means one extent everywhere."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ConfigError(f"For 'register_rule', 'shapes' must read like \"m k, k n -> m n\", but got {text!r}.")
    ins, outs = ([entry.split() for entry in side.split(",")] for side in sides)
    free = sorted({n for names in outs for n in names if not n.isdigit()} - {n for names in ins for n in names})
    if free:
        raise ConfigError(f"For 'register_rule', 'shapes' {text!r} does not say how large {free[0]!r} is.")

    def shapes(call: Call):
        size: dict[str, int] = {}
        if [len(n) for n in ins] != [o.ndim for o in call.operands]:
            raise OpRuleError(f"For '{call.op}', the operands do not have the shapes {text!r}.",
                              ", ".join(str(list(o.shape)) for o in call.operands))
        for names, operand in zip(ins, call.operands):
            for name, n in zip(names, operand.shape):
                if size.setdefault(name, n) != n:
                    raise OpRuleError(f"For '{call.op}', {name!r} is {size[name]} in one operand and {n} in another.",
                                      ", ".join(str(list(o.shape)) for o in call.operands), f"Its shapes are {text!r}.")
        return tuple(tuple(int(n) if n.isdigit() else size[n] for n in names) for names in outs)
    return shapes
