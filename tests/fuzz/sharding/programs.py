# SPDX-License-Identifier: Apache-2.0
"""Random data-parallel programs as data: a net, how it is wrapped, on which mesh, and steps; drawn, printed, made smaller.

Nothing here runs one: `play.py` does, on one device and on ranks.
"""
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from tests.fuzz.draws import Draws
from tests.fuzz.sharding.cells import CONTAINERS, PLAIN, WRITES, Part

WRITERS = ("stats", "momentum", "teacher")
DATA = ("fsdp", "replicate", "zero1")


@dataclass
class Wrap:
    """One call that changes a cell: "fsdp", "replicate", "zero1", "checkpoint" or "tp"."""

    kind: str
    where: str  # path of the cell
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        name = {"fsdp": "fully_shard", "checkpoint": "checkpoint_wrapper"}.get(self.kind, self.kind)
        said = ''.join(f', {k}={v}' for k, v in self.options.items())
        return f"{name}({'.'.join(filter(None, ('net', self.where)))}{said})"


@dataclass
class Pass:
    """One forward, of a batch of its own."""

    rows: int
    seed: int
    order: dict[str, tuple[int, ...]] = field(default_factory=dict)
    off: tuple[str, ...] = ()
    uses: str = "both"  # of the two outputs: "first", "second", "both"

    def __str__(self):
        return f"{self.rows} rows" + "".join(f", {f.name}={v}" for f in fields(self)[2:] if (v := getattr(self, f.name))
                                             not in ({}, (), "both"))


@dataclass
class Step:
    """What is done at once; `passes` are micro-batches of forwards in one gradient."""

    kind: str  # train, eval, raise, write, freeze, unshard, reshard, keep, copy, broken
    passes: list[list[Pass]] = field(default_factory=list)
    wrt: str = "params"  # "params", "some", "inputs", "both"
    how: str = "md"  # whose value_and_grad; of a write, which function; of a raise, where from
    then: str = ""  # an optimizer's step, or an evaluation between the micro-batches
    # how a parameter is written between two forwards in one gradient; "freeze": a cell is from then on; "turn": from the
    # second micro-batch on a cell is frozen that was trained, or the other way round
    between: str = ""
    which: int = 0  # number of a parameter, cell or wrap
    odd: int | None = None  # the rank whose last pass is `other`
    other: Pass | None = None

    def __str__(self):
        said = ["; ".join(" and ".join(f"[{p}]" for p in micro) for micro in self.passes)] if self.passes else []
        said += [f"{f.name}={v!r}" for f in fields(self)[2:-2] if (v := getattr(self, f.name)) != f.default]
        if self.odd is not None:
            said.append(f"but rank {self.odd}: [{self.other}]")
        return f"{self.kind}({', '.join(said)})"


@dataclass
class Program:
    seed: int
    axes: dict[str, int]  # the mesh
    width: int
    body: Part
    embeds: bool
    tied: bool  # the head shares the embedding's table
    laid: bool  # inputs are DTensors, else each rank's rows
    wraps: list[Wrap]
    steps: list[Step]

    def __str__(self):
        data = ' flattened to "dp"' if "a" in self.axes else ""
        return "\n".join([
            f"seed {self.seed}: mesh({', '.join(f'{k}={v}' for k, v in self.axes.items())}){data}",
            f"  net = Net(body={self.body}, width={self.width}{', embed' * self.embeds}{', tied head' * self.tied})"
            + "; plain constants: implicit_replication()" * self.plain,
            *(f"  {w}" for w in self.wraps), f"  inputs: {'DTensors' if self.laid else 'rows of each rank'}",
            *(f"  step {i}: {s}" for i, s in enumerate(self.steps))])

    def parts(self) -> dict[str, Part]:
        """Every node by its path."""
        return dict(_walk(self.body, "body"))

    @property
    def plain(self) -> bool:
        return any(p.kind in PLAIN for p in self.parts().values())

    @property
    def short(self) -> bool:
        """Whether a policy computes in float32."""
        return any("mp" in w.options for w in self.wraps)

    @property
    def writes(self) -> bool:
        return any(p.kind in WRITERS for p in self.parts().values())


def _walk(part: Part, where: str) -> Iterator[tuple[str, Part]]:
    yield where, part
    for i, p in enumerate(part.parts):
        yield from _walk(p, f"{where}.parts.{i}")


class _Draw(Draws):
    """Draws one program."""

    def __init__(self, seed: int, ranks: int, differs: bool = False):
        super().__init__([seed, differs])
        self.ranks, self.differs, self.seed = ranks, differs, seed
        self.later = np.random.default_rng([seed, differs, 1])  # what was thought of later: older seeds stay what they are

    def program(self) -> Program:
        scheme = self.one("fsdp", "replicate", "zero1", "roots", p=(.5, .2, .12, .18))
        axes = self.axes(scheme)
        body = Part("group", self.members(int(self.rng.integers(2, 5)), 0))
        if self.chance(.1):
            body.out = self.one("tuple", "dict", "data")
        program = Program(self.seed, axes, int(self.rng.integers(3, 7)), body, self.chance(.5), self.chance(.3),
                          self.chance(.5), [], [])
        alike = [w for w, p in program.parts().items() if p.kind == "dense"]
        if len(alike) > 1 and scheme != "roots" and self.chance(.15):  # a weight is copied or cut, not both
            program.parts()[alike[-1]].tied = alike[0]
        if scheme == "roots":
            program.laid = True
        self.wrap(program, scheme)
        program.steps = self.steps(program)
        return program

    def axes(self, scheme: str) -> dict[str, int]:
        n = self.ranks
        pairs = [(i, n // i) for i in range(1, n + 1) if n % i == 0]
        kind = self.one("1", "hsdp", "tp", "flat", "flat_tp", p=(.55, .15, .12, .1, .08))
        a, b = pairs[int(self.rng.integers(len(pairs)))]
        if kind == "hsdp" and scheme == "fsdp":
            return {"copies": a, "cut": b}
        if kind == "tp" and scheme != "roots":
            return {"dp": a, "tp": b}
        if kind == "flat":
            return {"a": a, "b": b}
        if kind == "flat_tp" and scheme != "roots":
            t = self.one(*(t for t in range(1, b + 1) if b % t == 0))
            return {"a": a, "b": b // t, "tp": t}
        return {"dp": n}

    def members(self, n: int, depth: int) -> list[Part]:
        return [self.part(depth) for _ in range(n)]

    def part(self, depth: int) -> Part:
        kinds = {"dense": .28, "mlp": .16, "norm": .1, "number": .07, "empty": .05, "const": .03, "stats": .06,
                 "momentum": .05, "teacher": .02, "group": .15, "giver": .03}
        if depth == 2:
            kinds = {k: v for k, v in kinds.items() if k not in CONTAINERS}
        total = sum(kinds.values())
        part = Part(self.one(*kinds, p=[v / total for v in kinds.values()]))
        if part.kind in CONTAINERS:
            part.parts = self.members(int(self.rng.integers(1, 4)), depth + 1)
            if part.kind == "giver":
                part.parts = [Part(self.one("dense", "mlp")) for _ in part.parts]
        part.out = self.one("tensor", "tuple", "dict", "data", "extra", p=(.64, .1, .1, .06, .1))
        part.frozen, part.how = self.chance(.12), self.one(*WRITES)
        part.kept = self.one("attr", "hook") if self.chance(.07) else None
        return part

    def wrap(self, program: Program, scheme: str) -> None:
        paths = list(program.parts())[::-1]  # inner ones first
        inside = [p + f".{key}" for p, part in program.parts().items() if part.kind == "momentum" for key in "ab"]
        everything = [*inside, *paths, *["embed"] * program.embeds, "head"]
        wraps, policy = [], {"mp": True} if self.chance(.08) and not program.plain else {}
        for path, part in program.parts().items():
            if part.kind == "mlp" and "tp" in program.axes and self.chance(.8):
                wraps.append(Wrap("tp", path))
        checks = [Wrap("checkpoint", p, self.one({}, {}, {"save": "tanh"}, {"save": "products"})) for p in paths[:-1]
                  if self.chance(.12) and not any(q.startswith(p) and part.kind in WRITERS or part.kept and q.startswith(p)
                                                  for q, part in program.parts().items())]
        early = [c for c in checks if self.chance(.5) and not policy]  # a policy comes before, by its documents
        wraps += early
        if scheme == "roots":
            split = [p for p in paths if p.count(".") == 2] if self.chance(.6) else ["body"]
            roots = {r: self.one(*DATA) for r in (*split, *["embed"] * program.embeds, "head")}
            program.tied &= roots.get("embed") == roots["head"]  # a weight is copied or cut, not both
            for path in everything:
                inner = [kind for r, kind in roots.items() if path.startswith(f"{r}.")]
                if path in roots:
                    wraps.append(self.data(path, roots[path], policy, True))
                elif inner and self.chance(.25) and not (policy and inner[0] == "replicate"):  # it is one policy there
                    wraps.append(self.data(path, "fsdp" if inner[0] == "zero1" else inner[0], policy, False))
        elif scheme == "fsdp":
            wraps += [self.data(p, "fsdp", policy, False) for p in everything if self.chance(.45)]
            wraps.append(self.data("", "fsdp", policy, True))
        else:
            inner = everything if not policy or scheme == "zero1" else []  # one policy for what is replicated
            wraps += [self.data(p, scheme, policy, False) for p in inner if self.chance(.12)]
            wraps.append(self.data("", scheme, policy, True))
        program.wraps = wraps + [c for c in checks if c not in early]

    def data(self, where: str, kind: str, policy: dict, outermost: bool) -> Wrap:
        options = dict(policy)
        if policy:
            options["mp"] = "answers in float64" if outermost else "computes in float32"
        if kind == "replicate":
            options["bucket_mb"] = self.one(25, 25, 0, 0.0001)
        if kind == "fsdp":
            options["reshard"] = self.one(True, True, True, False, 2 if self.ranks % 2 == 0 else 1)
            if self.chance(.25):
                options["place"] = self.one("last", "keep", "some")
            if not outermost and self.chance(.07):
                options["ignored"] = int(self.rng.integers(3))
        return Wrap(kind, where, options)

    def passed(self, program: Program, same: bool = False) -> Pass:
        one = Pass(int(self.rng.integers(2, 8)) if self.chance(.95) else 1, int(self.rng.integers(1 << 20)),
                   uses=self.one("both", "first", "second", p=(.6, .2, .2)))
        if same or self.chance(.5):
            return one
        for path, part in program.parts().items():
            if part.kind in CONTAINERS and self.chance(.4):
                drawn = self.rng.integers(0, len(part.parts), int(self.rng.integers(1, len(part.parts) + 2)))
                one.order[path] = tuple(int(i) for i in drawn)
        one.off = tuple(p for p in program.parts() if p != "body" and self.chance(.06))
        return one

    def steps(self, program: Program) -> list[Step]:
        if self.differs:
            last = self.parted(program)
            return [*([Step("train", [[self.passed(program)]])] if self.chance(.5) else []), last]
        kinds = {"train": .5, "eval": .08, "raise": .08, "write": .09, "freeze": .06, "unshard": .05, "reshard": .04,
                 "keep": .02, "copy": .03, "broken": .05}
        some = [self.one(*kinds, p=list(kinds.values())) for _ in range(int(self.rng.integers(1, 5)))]
        return [self.step(k, program) for k in (*some, "train")]

    def step(self, kind: str, program: Program) -> Step:
        step = Step(kind, which=int(self.rng.integers(1 << 10)))
        if kind == "train":
            micro = self.one(1, 2, 3, p=(.65, .2, .15))
            step.passes = [[self.passed(program) for _ in range(self.one(1, 2, p=(.85, .15)))] for _ in range(micro)]
            step.wrt = self.one("params", "some", "inputs", "both", p=(.65, .15, .07, .13))
            step.how = self.one("md", "ms", "grad", p=(.5, .35, .15))
            step.then = self.one("", "sgd", "adamw", "eval", p=(.45, .25, .15, .15))
            if step.wrt != "params" and step.then != "eval":
                step.then = ""
            if any(len(m) > 1 for m in step.passes) and self.chance(.3):
                step.between = self.one(*WRITES)
            if any(len(m) > 1 for m in step.passes) and self.later.random() < .3:
                step.between = "freeze"
            elif len(step.passes) > 1 and not step.between and self.later.random() < .2:
                step.between = "turn"
        elif kind in ("eval", "broken"):
            step.passes, step.how = [[self.passed(program)]], self.one("md", "no_grad")
        elif kind == "raise":
            step.passes = [[self.passed(program, True)] for _ in range(self.one(1, 2, p=(.7, .3)))]
            step.how = self.one("forward", "forward_hook", "backward_hook", "parameter_hook")
        elif kind == "write":
            step.how = self.one(*WRITES)
        elif kind == "keep":
            step.how = self.one("True", "False")
        return step

    def parted(self, program: Program) -> Step:
        """A step that one rank does otherwise: another order of alike cells, one left out, or once more."""
        n = int(self.rng.integers(2, 4))
        first = Part(self.one("dense", "mlp", "norm"))
        pure = [p for p in program.body.parts if p.kind in ("dense", "mlp", "norm", "number", "empty")]
        for part in pure:
            part.tied = ""
        program.body.parts = [*(copy.deepcopy(first) for _ in range(n)), *pure[:1]]
        program.wraps = [w for w in program.wraps if w.kind in DATA and not w.where.startswith("body.")]
        kind = self.one("fsdp", "replicate", "zero1") if program.wraps[-1].where == "" else program.wraps[-1].kind
        program.wraps = [self.data("", kind, {}, True)]
        if kind == "fsdp" or self.chance(.2):
            inner = [self.data(f"body.parts.{i}", kind, {}, False) for i in range(n)]
            program.wraps = [*inner, *program.wraps]
        usual = Pass(4 * self.ranks, int(self.rng.integers(1 << 20)))
        every = tuple(range(len(program.body.parts)))
        way = self.one((1, 0, *every[2:]), every[1:], (0, *every), (0, 0, *every[2:]))
        other = copy.deepcopy(usual)
        other.order = {"body": way}
        program.axes, program.tied = {"dp": self.ranks}, False
        return Step("train", [[usual]], how=self.one("md", "ms"), odd=int(self.rng.integers(self.ranks)), other=other)


def generate(seed: int, ranks: int) -> Program:
    return _Draw(seed, ranks).program()


def differing(seed: int, ranks: int) -> Program:
    """A program in whose last step one rank does something else."""
    return _Draw(seed, ranks, differs=True).program()


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are a little less, the largest cuts first."""
    def less(change, *args) -> Program:
        made = copy.deepcopy(program)
        change(made, *args)
        return made

    for i in range(len(program.steps) if len(program.steps) > 1 else 0):
        yield less(lambda p, i: p.steps.pop(i), i)
    for path, part in program.parts().items():
        if path != "body" and part.kind != "empty":
            yield less(_emptied, path)
    for i, wrap in enumerate(program.wraps):
        if wrap.kind not in DATA or any(
                w.where == "" or wrap.where.startswith(f"{w.where}.") for w in program.wraps[i + 1:]):
            yield less(lambda p, i: p.wraps.pop(i), i)  # not an outermost one: what it lays out is needed
        for key in wrap.options:
            if key != "mp":
                yield less(lambda p, i, key: p.wraps[i].options.pop(key), i, key)
    if program.short:  # all or none, else dtypes meet
        yield less(lambda p: [w.options.pop("mp", None) for w in p.wraps])
    for i, step in enumerate(program.steps):
        for f in fields(Step)[2:-2]:
            if getattr(step, f.name) != f.default and f.name not in ("which", "how" if step.kind != "train" else ""):
                yield less(lambda p, i, f: setattr(p.steps[i], f.name, f.default), i, f)
        for m, micro in enumerate(step.passes):
            if len(step.passes) > 1:
                yield less(lambda p, i, m: p.steps[i].passes.pop(m), i, m)
            for k, one in enumerate(micro):
                if len(micro) > 1:
                    yield less(lambda p, i, m, k: p.steps[i].passes[m].pop(k), i, m, k)
                for name, value in (("order", {}), ("off", ()), ("uses", "both")):
                    if getattr(one, name) != value:
                        yield less(lambda p, i, m, k, name, v: setattr(p.steps[i].passes[m][k], name, v),
                                   i, m, k, name, value)
    for path, part in program.parts().items():
        for name, value in (("out", "tensor"), ("frozen", False), ("kept", None), ("tied", "")):
            if getattr(part, name) != value:
                yield less(lambda p, path, name, v: setattr(p.parts()[path], name, v), path, name, value)
    for name in ("embeds", "tied"):
        if getattr(program, name):
            yield less(lambda p, name: setattr(p, name, False), name)
    if program.embeds:
        yield less(lambda p: setattr(p, "wraps", [w for w in p.wraps if w.where != "embed"]) or setattr(p, "embeds", False))


def _emptied(program: Program, path: str) -> None:
    """A cell without parameters in the place of another, so that the others keep their numbers."""
    part = program.parts()[path]
    part.kind, part.parts, part.out, part.kept, part.tied = "empty", [], "tensor", None, ""
    program.wraps = [w for w in program.wraps if not w.where.startswith(f"{path}.") and w.where != path]
    for step in program.steps:
        for one in (one for micro in step.passes for one in micro):
            one.order = {k: v for k, v in one.order.items() if k in program.parts()}
            one.off = tuple(p for p in one.off if p in program.parts())
    for p in program.parts().values():
        p.tied = p.tied if p.tied != path and not p.tied.startswith(f"{path}.") else ""
