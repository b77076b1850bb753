# SPDX-License-Identifier: Apache-2.0
"""Random pipelines as data, the model that they are of, and what one device makes of them; `tests/long/fuzz_pipeline.py`.

A program is a chain of cells, where it is cut, a schedule, what lies beside the pipeline on the mesh, and steps; all in
float64. A link of the chain computes on a tensor [rows, WIDTH], whatever is handed on beside it.
"""
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_dtensor import DTensor
from ms_dtensor.optim import SGD, AdamW
from tests.fuzz.draws import Draws
from tests.pipeline.cases_run import KINDS, style_of

WIDTH = 4
WEIGHTS = {"scale": (WIDTH,), "norm": (WIDTH,), "stats": (WIDTH,), "batch": (WIDTH,), "late": (WIDTH,), "number": (),
           "matmul": (WIDTH, WIDTH), "turned": (WIDTH, WIDTH), "square": (WIDTH, WIDTH), "bmm": (WIDTH, WIDTH),
           "unused": (3,)}
DENSE = ("dense", "twice", "carry", "hooked")
STATS = ("stats", "batch")
OF_ROWS = (*STATS, "late")  # what a row gives depends on the other rows
LINKS = (*DENSE, *WEIGHTS, "mlp", "masked", "view", "stop", "fork", "same", "places", "join", "swap", "empty")


class Planted(Exception):
    """What a step is told to raise."""


def dense(rng, outputs: int = WIDTH, inputs: int = WIDTH) -> nn.Dense:
    cell = nn.Dense(inputs, outputs, has_bias=bool(rng.random() < .6), dtype=ms.float64)
    for p in cell.get_parameters():
        p.set_data(Tensor(rng.normal(.2, .5, p.shape)))
    return cell


class Link(nn.Cell):
    """One cell of the chain. `fails`: where it raises, "forward" or "backward"."""

    def __init__(self, kind: str, rng: np.random.Generator):
        super().__init__()
        self.kind, self.fails = kind, ""
        if kind in DENSE:
            self.up = dense(rng)
        if kind == "mlp":
            self.up, self.down = dense(rng, 6), dense(rng, WIDTH, 6)
        if kind in WEIGHTS:
            self.w = Parameter(Tensor(rng.normal(.3, .5, WEIGHTS[kind])), name="w")
        if kind in STATS:
            self.mean = Parameter(Tensor(rng.normal(size=WIDTH)), name="mean", requires_grad=False)
        if kind == "hooked":
            self.up.weight.register_hook(self.hook)

    def hook(self, grad):
        if self.fails == "backward":
            raise Planted(self.kind)
        return grad * 2

    def construct(self, x, mask=None):
        if self.fails == "forward":
            raise Planted(self.kind)
        rest, form = [], type(x)
        if form is dict:
            rest, x = [x["beside"]], x["h"]
        elif form is list:
            x, *rest = x
        x, *rest = self.made(x, mask, *rest)
        return {"h": x, "beside": rest[0]} if form is dict and rest else [x, *rest] if rest else x

    def made(self, x, mask, *rest):
        """The tensor, and what is handed on beside it."""
        kind = self.kind
        if kind == "mlp":
            return x + self.down(mint.tanh(self.up(x))), *rest
        if kind == "carry":
            return self.up(x), *(r * 2 if r.is_floating_point() else r for r in rest)
        if kind in DENSE:
            return mint.tanh(self.up(self.up(x) if kind == "twice" else x)), *rest
        if kind in WEIGHTS:
            return self.weighed(x), *rest
        if kind == "masked":
            return x if mask is None else x * mask, *rest
        if kind == "view":
            return x.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(-1, WIDTH), *rest
        if kind == "stop":
            return x + ops.stop_gradient(x) * .5, *rest
        if kind in ("fork", "same"):
            return x, x if kind == "same" else mint.cos(x)
        if kind == "places":
            return x, (x > 0).astype(ms.int32)
        if kind == "join":
            return (sum((r.astype(x.dtype) * .3 for r in rest), x),)
        if kind == "swap" and rest and rest[0].is_floating_point():
            return rest[0], x
        return x, *rest

    def weighed(self, x):
        kind, w = self.kind, self.w
        if kind == "matmul":
            return mint.tanh(x @ w)
        if kind == "turned":
            return mint.tanh(mint.matmul(w.T, x.T).T)
        if kind == "bmm":
            return mint.tanh(mint.bmm(x.reshape(1, -1, WIDTH), w.reshape(1, WIDTH, WIDTH))[0])
        if kind == "square":
            return mint.tanh(x @ (w @ w.T))
        if kind == "norm":
            return x * mint.rsqrt((x * x).mean(-1, True) + 1e-3) * w
        if kind == "number":
            return mint.sin(x * w)
        if kind == "stats":
            mean = x.mean(0)
            ops.assign(self.mean, .9 * self.mean + .1 * ops.stop_gradient(mean))
            return x - .5 * mean + w
        if kind == "batch":
            self.mean.copy_(.8 * self.mean + .2 * ops.stop_gradient(x.mean(0)))
            return x * w + self.mean * .1
        if kind == "late" and x.mean() <= 0 or kind == "unused":
            return x
        return x * w


class Embed(nn.Cell):
    def __init__(self, rng):
        super().__init__()
        self.w = Parameter(Tensor(rng.normal(size=(7, WIDTH))), name="w")

    def construct(self, ids):
        return ops.gather(self.w, ids, 0)


class Net(nn.Cell):
    def __init__(self, program: Program):
        super().__init__()
        rng = np.random.default_rng(program.seed)
        self.embeds = program.embeds
        if self.embeds:
            self.embed = Embed(rng)
        self.layers = nn.CellList([Link(kind, rng) for kind in program.links])
        self.head = nn.Dense(WIDTH, 7 if program.tied else 3, has_bias=False, dtype=ms.float64)
        self.head.weight.set_data(Tensor(rng.normal(size=self.head.weight.shape)))
        if program.tied:
            self.head.weight = self.embed.w
        for a, b in program.ties:
            self.layers[b].up.weight = self.layers[a].up.weight
        for i in program.frozen:
            for p in self.layers[i].get_parameters():
                p.requires_grad = False

    def construct(self, x, mask=None):
        if self.embeds:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Loss(nn.Cell):
    def construct(self, y, t=None):
        return (y * (1 + y)).mean() if t is None else ((y - t.mean(-1, True)) ** 2).mean()


@dataclass
class Step:
    """kind: train, other (by another order of the same stages), eval, raise (`where`: in a "forward" or a "backward"),
    freeze or write (a link, number `which`), save, load (what was saved last, before: what there was first)."""

    kind: str
    m: int
    rows: int
    seed: int
    weights: bool = False
    which: int = 0
    where: str = "forward"


@dataclass
class Program:
    """What is drawn for a seed."""

    seed: int
    links: list[str]
    schedule: str = "1f1b"
    m: int = 2
    other: str = ""  # an order of the same stages, with as many microbatches as its steps say
    split: Any = "cost"
    beside: str = ""  # over the mesh's other axis
    grid: bool = False  # one rank has all stages; beside it two axes, also "tp"
    wide: bool = False  # gradients are cast on their way
    embeds: bool = False
    tied: bool = False  # head and embedding
    ties: list[tuple[int, int]] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)  # units of their own
    recomputed: dict[int, bool] = field(default_factory=dict)  # whether what tanh gives is kept
    optimizer: str = ""
    clips: bool = False
    target: bool = True
    mask: bool = False
    steps: list[Step] = field(default_factory=list)

    @property
    def share(self) -> int:
        """How many ranks of the other axis have rows of their own."""
        return 1 if self.beside in ("", "tp") else 2

    def __str__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return "\n  ".join(f"{name}={value}" for name, value in said.items() if value not in ([], {}, "", False))


def generate(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    draws = Draws([seed, ranks])
    rng, chance, one = draws.rng, draws.chance, draws.one
    beside = one("", "replicate", "fully_shard", "kept", "zero1", "tp") if ranks > 2 else ""
    spread = beside not in ("", "tp")
    links = [one(*(k for k in LINKS if not beside or k not in OF_ROWS)) for _ in range(int(rng.integers(2, 9)))] + ["join"]
    out = Program(seed, links, one(*KINDS), beside=beside)
    out.grid, out.wide = spread and chance(.2), spread and chance(.3)
    pp, many = 1 if out.grid else ranks // 2 if beside else ranks, range(len(links))
    out.m = one(pp, 2 * pp, 3 * pp) if out.schedule == "interleaved" else int(rng.integers(1, 2 * pp + 2))
    if out.schedule == "dualpipev":
        out.m = max(out.m, 2 * pp)
    fit = [k for k in KINDS if KINDS[k][1] == KINDS[out.schedule][1] and style_of(k) == style_of(out.schedule)]
    out.other = one(*fit)
    out.embeds = chance(.3)
    out.tied = out.embeds and chance(.5)
    alike = [i for i in many if links[i] in DENSE]
    if len(alike) > 1 and chance(.3) and not beside:
        half = len(alike) // 2
        out.ties = list(zip(alike[:half], reversed(alike[-half:]) if chance(.5) else alike[-half:]))
    out.frozen = [i for i in many if chance(.12)]
    paths = ["embed"] * out.embeds + [f"layers.{i}" for i in many] + ["head"]
    if chance(.6):
        cuts = sorted(int(c) for c in rng.integers(0, len(paths) + 1, pp * KINDS[out.schedule][1] - 1))
        out.split = [paths[a:b] for a, b in zip([0, *cuts], [*cuts, len(paths)])]
    out.inner = [i for i in many if chance(.3)]
    out.recomputed = {i: spread and chance(.4) and links[i] in ("dense", "twice", "mlp", "matmul", "turned", "square", "bmm")
                      for i in many if chance(.15) and links[i] not in (*OF_ROWS, "hooked")}
    out.optimizer, out.clips, out.target, out.mask = one("", "sgd", "adamw"), chance(.3), chance(.7), chance(.5)
    # where a step is given up, statistics have moved for some microbatches
    kinds = ("train", "train", "train", "eval", "train" if {*STATS} & {*links} else "raise", "freeze", "write",
             "other", "other", "save", "load")
    frozen = {*out.frozen, *(i for pair in out.ties for i in pair)}  # or without its own weight: then no hook runs
    for _ in range(int(rng.integers(2, 5))):
        which = int(rng.integers(len(links)))
        where = one("forward", "backward") if links[which] == "hooked" and which not in frozen else "forward"
        kind, at = one(*kinds), int(rng.integers(1 << 20))
        m = 2 * pp * int(rng.integers(1, 3)) if kind == "other" else out.m
        out.steps.append(Step(kind, m, m * int(rng.integers(1, 4)), at, chance(.3), which, where))
        if out.steps[-1].kind == "freeze":
            frozen ^= {which}
    out.steps.append(Step("train", out.m, out.m * 2, int(rng.integers(1 << 20))))
    return out


def batch(program: Program, step: Step):
    """x, target, mask and weights of the whole batch."""
    rng, rows = np.random.default_rng(step.seed), step.rows * program.share
    x = rng.integers(0, 7, rows).astype(np.int32) if program.embeds else rng.normal(size=(rows, WIDTH))
    target, mask = rng.normal(size=(rows, 2)), rng.normal(1, .3, size=(rows, WIDTH))
    weights = rng.uniform(.1, 1, step.m).tolist() if step.weights else None
    return x, target if program.target else None, mask if program.mask else None, weights


def optimizer_of(program: Program, params: list):
    """None: there is none, or there is nothing for it here."""
    return {"sgd": lambda: SGD(params, .05), "adamw": lambda: AdamW(params, .01)}.get(program.optimizer, lambda: None)() \
        if params else None


def zeros(p):
    """MindSpore 2.10 has no kernel for `mint.zeros_like` of float64 here."""
    return p * 0 if isinstance(p, DTensor) else Tensor(np.zeros(p.shape))


def change(program: Program, net: nn.Cell, step: Step) -> None:
    """What a step without a batch does to a link that is here. Of a tied weight that is done on all of its ranks."""
    link = net.layers[step.which]
    if not isinstance(link, Link) or any(step.which in tie for tie in program.ties):
        return
    for name, p in link.parameters_and_names():
        if step.kind == "write":
            ops.assign(p, p * .9)
        elif name != "mean":
            p.requires_grad = not p.requires_grad


def values_of(net: nn.Cell) -> dict[str, np.ndarray]:
    return {n: p.asnumpy().copy() for n, p in net.parameters_and_names()}


def refer(program: Program) -> list:
    """What one device makes of it: (loss, gradients by name, their norm) of each step, and at the end all values."""
    net, loss_fn, out = Net(program), Loss(), []
    names = {id(p): n for n, p in net.parameters_and_names()}
    updated = net.trainable_params()
    optimizer, saved = optimizer_of(program, updated), values_of(net)
    for step in program.steps:
        if step.kind in ("freeze", "write"):
            change(program, net, step)
        if step.kind == "save":
            saved = values_of(net)
        if step.kind == "load":
            for n, p in net.parameters_and_names():
                ops.assign(p, Tensor(saved[n]))
        if step.kind not in ("train", "other", "eval"):
            out.append(None)
            continue
        *given, weights = batch(program, step)
        m, params, total, sums = step.m, net.trainable_params(), 0.0, dict[str, np.ndarray]()
        of_rank = np.arange(step.rows * program.share).reshape(program.share, m, -1)
        for i, weight in enumerate(weights or [1 / m] * m):
            # the i-th part of the rows of every rank that has some
            x, t, mask = (None if a is None else Tensor(a[of_rank[:, i].reshape(-1)]) for a in given)

            def forward(x=x, t=t, mask=mask, weight=weight):
                return loss_fn(net(x, mask), t) * Tensor(weight, ms.float64)
            if step.kind == "eval" or not params:
                total += float(forward())
                continue
            loss, grads = ms.value_and_grad(forward, None, params)()
            total += float(loss)
            for p, g in zip(params, grads):
                sums[names[id(p)]] = sums.get(names[id(p)], 0) + g.asnumpy()
        norm = float(np.sqrt(sum((g ** 2).sum() for g in sums.values())))
        if program.clips and step.kind != "eval" and norm:
            sums = {n: g * min(1, .5 / (norm + 1e-6)) for n, g in sums.items()}
        if optimizer is not None and step.kind != "eval":
            optimizer(tuple(Tensor(sums[n]) if (n := names[id(p)]) in sums else zeros(p) for p in updated))
        out.append((total, sums, norm))
    return [*out, values_of(net)]
