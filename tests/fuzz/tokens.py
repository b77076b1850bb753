# SPDX-License-Identifier: Apache-2.0
"""Random models over lists of tokens, attention and experts among their layers, and what one device makes of them.

A program is a mesh, layers, what wraps them, and steps over batches of documents; `tests/long/fuzz_tokens.py` runs it. One
device has all tokens in the order in which the ranks have them, attends with a mask, and sends each token through each
expert, in float64. Its constants live as long as their batch: MindSpore 2.10 keeps where they are for a backward, not them.
"""
import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor.core.tokens import shard_sizes
from ms_dtensor.optim import SGD, AdamW
from tests.fuzz.draws import Draws

WIDTH, HEAD = 6, 4
LONGEST = 40
AXES = {2: (("cp",), ("cp",), ("ulysses",), ("ep",), ("ep",)),
        4: (("cp",), ("ep",), ("ulysses",), ("dp", "cp"), ("dp", "ep"), ("ep", "cp"), ("cp", "ulysses"), ("ep", "ulysses"),
            ("cp", "tp"), ("ep", "tp"), ("ulysses", "tp"), ("pp", "cp"), ("pp", "ep"))}
ORDERS = {"balanced": md.balance, "head_tail": md.head_tail, "in_order": md.in_order}
DTYPES = {"float64": ms.float64, "float32": ms.float32, "bfloat16": ms.bfloat16}


def shown(of) -> str:
    """The fields that say something."""
    said = {f.name: getattr(of, f.name) for f in fields(of) if f.repr}
    return ", ".join(f"{k}={v!r}" for k, v in said.items() if v not in ([], {}, (), "", False, None))


@dataclass(repr=False)
class Layer:
    kind: str
    recomputed: Any = None  # what is kept, then
    inside: bool = False  # experts alone are
    unit: bool = False
    frozen: bool = False
    # of attention
    heads: tuple[int, int] = (4, 2)
    mask: dict = field(default_factory=dict)
    ring: bool = False
    style: bool = False  # of rows
    rotary: bool = False
    wide: int = HEAD  # of values
    lies: bool = False  # operands whole
    # of experts
    count: int = 4
    k: int = 1
    over: tuple[str, ...] = ()  # axes that cut them
    widths: bool = False  # over tp
    router: dict = field(default_factory=dict)
    biased: bool = False
    shared: bool = False
    how: dict = field(default_factory=dict)  # dedup, room
    losses: str = ""  # b: balance, z
    __repr__ = shown


@dataclass(repr=False)
class Pass:
    """One batch: documents of each part, and how tokens choose where the router does not."""

    documents: list[tuple[int, ...]]
    seed: int
    choose: str = ""
    __repr__ = shown


@dataclass(repr=False)
class Step:
    """kind: train, skip (no update), eval, freeze (layer `which`), raise (there, all ranks), nan (weights of experts)."""

    kind: str
    passes: list[list[Pass]]  # of each gradient, which are added up
    which: int = 0
    inputs: bool = False  # gradients of them, too
    backward: bool = False
    __repr__ = shown


@dataclass(repr=False)
class Program:
    seed: int
    axes: dict[str, int]
    layers: list[Layer]
    wrap: str = ""
    order: str = "balanced"
    rows: bool = False  # documents of one length
    dtype: str = "float64"
    optimizer: str = ""
    clips: bool = False
    syncs: bool = True  # every gradient, not the last alone
    steps: list[Step] = field(default_factory=list)

    def __str__(self) -> str:
        lists = (f"  {one}" for one in (*self.layers, *self.steps))
        return "\n  ".join([", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)[:2] + fields(self)[3:10]),
                            *lists])

    @property
    def cuts(self) -> list[str]:
        """Axes that cut tokens."""
        return [a for a in self.axes if a not in ("pp", "tp")]

    @property
    def shared(self) -> list[str]:
        """Those whose ranks share a list."""
        return [a for a in self.cuts if a in ("cp", "ulysses")] or self.cuts[-1:]

    @property
    def parts(self) -> int:
        return math.prod(self.axes[a] for a in self.cuts if a not in self.shared)

    @property
    def ranks(self) -> int:
        """As an order counts them."""
        return math.prod(self.axes[a] for a in self.shared if a != "ulysses")


class Batch:
    """What is known of a batch on one device, or on ranks whose tokens are a mesh's."""

    def __init__(self, program: Program, one: Pass, mesh=None, part: int = 0):
        self.program, self.one, self.mesh, self.kept, parts = program, one, mesh, list[Tensor](), []
        self.orders = [order_of(program, documents) for documents in one.documents]
        rng = np.random.default_rng([one.seed, 1])
        for number, tokens in enumerate(self.orders):
            n, places, doc = len(tokens), np.concatenate([np.arange(d) for d in tokens.documents]), np.repeat(
                np.arange(len(tokens.documents)), tokens.documents)
            angles = places[:, None, None] * np.array([.7, .2])
            made = {"x": rng.normal(size=(n, WIDTH)), "target": rng.normal(size=(n, WIDTH)), "cos": np.cos(angles),
                    "weight": rng.uniform(.1, 1, (n, 1)) / (n * program.parts), "sin": np.sin(angles),
                    "places": places.astype(np.int32), "document": doc + LONGEST * number}
            for i, layer in enumerate(program.layers):
                made[f"chosen{i}"] = chosen_by(rng, one.choose, n, layer)
            parts.append(made)
        dtype = DTYPES[program.dtype]
        for name in parts[0]:
            if mesh is None:
                whole = np.concatenate([made[name][tokens.index()] for made, tokens in zip(parts, self.orders)])
                x = Tensor(whole)
                x = x.astype(dtype).astype(ms.float64) if x.is_floating_point() else x
            else:
                x = self.orders[part].cut(parts[part][name], mesh=mesh, axes=tuple(program.cuts))
                x = x.astype(dtype) if x.is_floating_point() else x
            setattr(self, name, x)
        self.tokens = self.orders[part]

    @cached_property
    def sees(self) -> np.ndarray:
        """How far before a token another of its document is; below 0: behind it, or of another one."""
        place, doc = self.places.asnumpy(), self.document.asnumpy()
        return np.where(doc[:, None] == doc, place[:, None] - place, 1 << 20)

    def constant(self, value, dtype=ms.float64) -> Tensor:
        self.kept.append(Tensor(value, dtype))
        return self.kept[-1]

    def masked(self, causal: bool = True, window: int | None = None) -> Tensor:
        seen = (self.sees >= 0) & (self.sees < (window or 1 << 19)) if causal else self.sees < 1 << 19
        return self.constant(np.where(seen, 0, -1e30))

    def within(self, chosen: np.ndarray, room: int, layer: Layer) -> np.ndarray:
        """Without the choices of a rank for which its experts have no room."""
        out, sizes = chosen.copy(), self.program.axes
        over = [sizes[a] for a in self.program.cuts] + [sizes[a] for a in layer.over if a == "tp"]
        ends = np.cumsum([0, *shard_sizes(len(chosen), *over)])
        for a, b in zip(ends, ends[1:]):
            flat = out[a:b].reshape(-1)
            for e in range(layer.count):
                flat[np.flatnonzero(flat == e)[room:]] = -1
        return out


def order_of(program: Program, documents: tuple[int, ...]) -> md.Tokens:
    if not program.rows:
        return ORDERS[program.order](documents, program.ranks)
    runs = ORDERS[program.order](documents[:1], program.ranks).runs
    return md.Tokens(documents, tuple(tuple((d, a, b) for d in range(len(documents)) for _, a, b in of) for of in runs))


def chosen_by(rng, how: str, n: int, layer: Layer) -> np.ndarray:
    """i32[n, k]; -2: as the router does."""
    k, count, some = layer.k, layer.count, rng.random((n, layer.k))
    any_of = np.argsort(rng.random((n, count)), 1)[:, :k]
    first = (int(rng.integers(count)) + np.arange(k)) % count + np.zeros((n, 1), int)
    return {"": np.full((n, k), -2), "random": any_of, "one": first, "nobody": np.full((n, k), -1),
            "twice": first[:, :1] + 0 * first, "dropped": np.where(some < .4, -1, any_of),
            "some": np.where(some < .3, -1, -2)}[how].astype(np.int32)


def linear(rng, outputs: int, inputs: int, dtype) -> nn.Cell:
    cell = nn.Dense(inputs, outputs, has_bias=bool(rng.random() < .5), dtype=dtype)
    for p in cell.get_parameters():
        p.set_data(Tensor(rng.normal(0, .5, p.shape), dtype))
    return cell


class Mlp(nn.Cell):
    def __init__(self, rng, dtype):
        super().__init__()
        self.up, self.down = linear(rng, 8, WIDTH, dtype), linear(rng, WIDTH, 8, dtype)

    def construct(self, x):
        return self.down(mint.tanh(self.up(x)))


class Experts(nn.Cell):
    def __init__(self, layer: Layer, rng, dtype):
        super().__init__()
        self.layer = layer
        for name, shape in (("w1", (5, WIDTH)), ("w2", (WIDTH, 5)), ("w3", (5, WIDTH))):
            self.insert_param_to_cell(name, Parameter(Tensor(rng.normal(0, .5, (layer.count, *shape)), dtype), name=name))

    def construct(self, x, weights, chosen, shared):
        return md.moe(x, weights, chosen, self.w1, self.w2, self.w3, shared=shared, **self.layer.how)


class Planted(Exception):
    """What a step is told to raise."""


class Block(nn.Cell):
    """A layer. What it takes is a list of tokens, or this and what layers before have added to the loss."""

    def __init__(self, layer: Layer, number: int, rng, dtype):
        super().__init__()
        self.layer, self.number, self.raises, self.spoils, self.loads = layer, number, False, False, None
        h, g = layer.heads
        if layer.kind == "attention":
            self.q, self.k = linear(rng, h * HEAD, WIDTH, dtype), linear(rng, g * HEAD, WIDTH, dtype)
            self.v, self.o = linear(rng, g * layer.wide, WIDTH, dtype), linear(rng, WIDTH, h * layer.wide, dtype)
            self.core = None
        elif layer.kind == "experts":
            self.gate, self.router = linear(rng, layer.count, WIDTH, dtype), md.Router(layer.k, **layer.router)
            self.experts = Experts(layer, rng, dtype)
            self.shared = Mlp(rng, dtype) if layer.shared else None
            if layer.biased:
                self.bias = Parameter(Tensor(rng.normal(0, .5, layer.count), dtype), name="bias", requires_grad=False)
        elif layer.kind == "mlp":
            self.mlp = Mlp(rng, dtype)
        else:
            shape = (WIDTH,) if layer.kind == "norm" else (LONGEST, WIDTH)
            self.w = Parameter(Tensor(rng.normal(1, .5, shape), dtype), name="w")
        for p in self.get_parameters() if layer.frozen else ():
            p.requires_grad = False

    def construct(self, state, batch: Batch):
        x, *more = state if isinstance(state, list) else [state]
        if self.raises:
            raise Planted(str(self.number))
        if self.layer.kind == "attention":
            x = x + self.attended(even(x), batch)
        elif self.layer.kind == "experts":
            y, extra = self.mixed(even(x), batch)
            x, more = x + y, [extra + sum(more)] if extra is not None else more
        elif self.layer.kind == "mlp":
            x = x + self.mlp(x)
        elif self.layer.kind == "norm":
            x = even(x) * self.w
        else:
            x = x + ops.gather(self.w, batch.places, 0)
        return [x, *more] if more else x

    def freeze(self) -> None:
        for name, p in self.parameters_and_names():
            p.requires_grad = name != "bias" and not p.requires_grad

    def attended(self, x, batch: Batch):
        (h, g), wide = self.layer.heads, self.layer.wide
        q, k, v = (f(x).reshape(len(x), *s) for f, s in ((self.q, (h, HEAD)), (self.k, (g, HEAD)), (self.v, (g, wide))))
        if self.layer.rotary:
            q, k = turned(q, batch), turned(k, batch)
        y = one_device(q, k, v, batch, **self.layer.mask) if self.core is None else self.core(q, k, v, batch)
        return self.o(y.reshape(len(x), h * wide))

    def mixed(self, x, batch: Batch):
        layer, lies = self.layer, None
        if batch.mesh is not None and "tp" in layer.over:  # sequence parallelism
            lies, x = [md.Shard(0), md.Replicate()], x.redistribute(placements=[md.Shard(0)] * 2)
        logits = self.gate(x)
        weights, chosen = self.router(logits, self.bias if layer.biased else None)
        given = getattr(batch, f"chosen{self.number}")
        chosen = mint.where(given > -2, given, chosen)
        if batch.program.dtype == "bfloat16":  # what is rounded chooses others than the router of one device does
            weights = mint.gather(self.router.scores(logits), 1, mint.where(chosen < 0, 0, chosen).astype(ms.int64))
        if self.spoils:
            weights = weights / (weights - weights)
        extra = None
        if "b" in layer.losses:
            extra = md.expert_balance_loss(self.router.scores(logits), chosen, len(batch.tokens))
        if "z" in layer.losses:
            extra = md.router_z_loss(logits) * batch.constant(.1, x.dtype) + (0 if extra is None else extra)
        self.loads = md.expert_counts(chosen, layer.count)
        if batch.mesh is not None:
            y = self.experts(x, weights.astype(x.dtype), chosen, self.shared)
            return (y if lies is None else y.redistribute(placements=lies)), extra
        host = chosen.asnumpy()
        if room := layer.how.get("room"):
            host = batch.within(host, room, layer)
        y, (w1, w2, w3) = 0 if self.shared is None else self.shared(x), self.experts.get_parameters()
        for e in range(layer.count):
            h = mint.matmul(x, w1[e].T)
            h = mint.matmul(h * mint.sigmoid(h) * mint.matmul(x, w3[e].T), w2[e].T)
            y = y + h * (weights * batch.constant(host == e)).sum(1, keepdims=True)
        return y, extra


def even(x):
    return x * mint.rsqrt((x * x).mean(-1, True) + 1e-2)


def turned(x, batch: Batch):
    a, b = x[..., :2], x[..., 2:]
    return mint.cat((a * batch.cos - b * batch.sin, a * batch.sin + b * batch.cos), -1)


def one_device(q, k, v, batch: Batch, scale: float | None = None, **mask):
    share = q.shape[1] // k.shape[1]
    of = Tensor(np.repeat(np.arange(k.shape[1], dtype=np.int32), share))
    q, k, v = (x.transpose(1, 0, 2) for x in (q, ops.gather(k, of, 1), ops.gather(v, of, 1)))
    scores = mint.bmm(q, k.transpose(0, 2, 1)) * batch.constant(HEAD ** -.5 if scale is None else scale)
    scores = scores + batch.masked(**mask)  # MindSpore's softmax has wrong gradients once it began with one column
    weights = mint.exp(scores - batch.constant(scores.asnumpy().max(-1, keepdims=True)))
    return mint.bmm(weights / weights.sum(-1, keepdim=True), v).transpose(1, 0, 2)


class Net(nn.Cell):
    def __init__(self, program: Program, dtype):
        super().__init__()
        rng = np.random.default_rng([program.seed, 2])
        self.layers = nn.CellList([Block(layer, i, rng, dtype) for i, layer in enumerate(program.layers)])

    def construct(self, x, batch):
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def move_biases(self, loads: list[list]) -> None:
        """By the loads of a step: of each gradient those of each layer."""
        for layer, counts in zip((one for one in self.layers if one.loads is not None), zip(*loads)):
            if layer.layer.biased:
                layer.bias.set_data(md.update_expert_bias(layer.bias, sum(counts[1:], counts[0]), .25))


class Loss(nn.Cell):
    def construct(self, out, batch: Batch):
        x, *more = out if isinstance(out, list) else [out]
        x = x.astype(ms.float32) if x.dtype == ms.bfloat16 else x
        return sum(more, ((x - batch.target.astype(x.dtype)) ** 2 * batch.weight.astype(x.dtype)).sum())


def optimizer_of(program: Program, params: list):
    """None: there is none, or there is nothing for it here. With its `eps` AdamW does not divide rounding by rounding."""
    return {"sgd": lambda: SGD(params, 2e-3), "adamw": lambda: AdamW(params, 5e-3, eps=1e-2)}.get(
        program.optimizer, lambda: None)() if params else None


def gradient(net: Net, loss_fn: Loss, batches: list[Batch], inputs: bool, params: list):
    """(loss, loads by layer), gradients of inputs, of parameters; all forwards come before the backward."""
    def fn(*xs):
        total, loads = 0, None
        for x, batch in zip(xs, batches):
            total = loss_fn(net(x, batch), batch) + total
            mine = [layer.loads for layer in net.layers if layer.loads is not None]
            loads = mine if loads is None else [a + b for a, b in zip(loads, mine)]
        return (total, *loads) if loads else total
    of = ms if batches[0].mesh is None or batches[0].one.seed % 3 == 0 else md
    where = tuple(range(len(batches))) if inputs or not params else None
    counts = any(layer.layer.kind == "experts" for layer in net.layers)
    out, grads = of.value_and_grad(fn, where, params or None, has_aux=counts)(*(b.x for b in batches))
    loss, *loads = out if counts else (out,)
    of_inputs, of_params = (grads, ()) if not params else grads if where else ((), grads)
    return (loss, loads), listed(of_inputs), listed(of_params)


def listed(grads) -> list:
    return list(grads) if isinstance(grads, tuple | list) else [grads]


def refer(program: Program) -> list[dict]:
    """What one device makes of it: named values of each step, and at the end of all parameters."""
    exact = ms.float64
    net, loss_fn, out = Net(program, DTYPES[program.dtype]), Loss(), list[dict]()
    for p in net.get_parameters():
        p.set_dtype(exact)
    updated = net.trainable_params()
    names, optimizer = {id(p): n for n, p in net.parameters_and_names()}, optimizer_of(program, updated)
    m = len(program.steps[0].passes) if "pp" in program.axes else 1
    for step in program.steps:
        told: dict[str, Any] = {}
        out.append(told)
        if step.kind == "freeze":
            net.layers[step.which].freeze()
        if step.kind == "eval":
            batch = Batch(program, step.passes[0][0])
            told["loss"] = loss_fn(net(batch.x, batch), batch).asnumpy()
        if step.kind not in ("train", "skip"):
            continue
        params, sums, moved = net.trainable_params(), dict[str, np.ndarray](), []
        for number, some in enumerate(step.passes):
            batches = [Batch(program, one) for one in some]
            (loss, loads), xs, grads = gradient(net, loss_fn, batches, step.inputs, params)
            moved.append(loads)
            told |= {f"loss {number}": loss.asnumpy() / m} | {f"input {number}.{i}": g.asnumpy() for i, g in enumerate(xs)}
            for p, g in zip(params, grads):
                sums[names[id(p)]] = sums.get(names[id(p)], 0) + g.asnumpy() / m
        told["norm"] = float(np.sqrt(sum((g ** 2).sum() for g in sums.values())))
        if program.clips and told["norm"]:
            sums = {n: g * min(1, .05 / (told["norm"] + 1e-6)) for n, g in sums.items()}
        told |= {f"gradient of {n}": g for n, g in sums.items()}
        if optimizer is not None and step.kind == "train":
            optimizer(tuple(Tensor(sums.get(names[id(p)], np.zeros(p.shape))) for p in updated))
        if step.kind == "train" and "pp" not in program.axes:
            net.move_biases(moved)
    return [*out, {n: p.asnumpy().copy() for n, p in net.parameters_and_names()}]


def generate(seed: int, ranks: int) -> Program:
    """The program of a seed."""
    draws = Draws([seed, ranks])
    rng, chance, one = draws.rng, draws.chance, draws.one
    names = one(*AXES[ranks])
    out = Program(seed, {a: ranks if len(names) == 1 else 2 for a in names}, [], order=one(*ORDERS))
    staged = "pp" in names
    out.wrap = one("", "replicate", "zero1", "fsdp", "fsdp", "kept", *["hsdp"] * (len(out.cuts) == 2))
    out.wrap = out.wrap or "replicate" * bool({"tp", "pp"} & {*names})
    out.rows = out.order != "balanced" and "ulysses" not in names and chance(.4)
    out.dtype = one(*["float64"] * 8, "float32", "bfloat16")
    out.optimizer, out.clips, out.syncs = one("", "sgd", "adamw"), chance(.4), chance(.6)
    sure = ["attention"] if {"cp", "ulysses"} & {*names} else ["experts"]
    kinds = sure + [one("attention", "experts", "attention", "experts", "mlp", "norm", "places")
                    for _ in range(int(rng.integers(0, 4)) + staged)]
    rng.shuffle(kinds)
    for kind in kinds:
        out.layers.append(layer := Layer(kind, unit=chance(.3), frozen=chance(.12)))
        if chance(.25):
            layer.recomputed, layer.inside = ["send_rows"] if chance(.4) else [], kind == "experts" and chance(.4)
        heads = math.prod(out.axes[a] for a in names if a in ("tp", "ulysses"))
        g = heads * one(1, 2)
        layer.heads = g * one(1, 2, 3), g
        if kind == "attention":
            layer.mask = one({}, {}, {"window": int(rng.integers(1, 6))}, {"causal": False}) | one({}, {}, {"scale": .35})
            layer.ring, layer.rotary = chance(.5), chance(.5)
            layer.style = out.rows and chance(.6)
            layer.lies = chance(.15) and "tp" not in names and not layer.style
            layer.wide = HEAD if layer.ring else one(HEAD, HEAD, 3)
        elif kind == "experts":
            layer.count = int(rng.integers(2, 2 * ranks + 3))
            layer.k = int(rng.integers(1, min(3, layer.count) + 1))
            layer.over = tuple(a for a in out.cuts if chance(.7))
            if "tp" in names and layer.over == tuple(out.cuts) and chance(.3):
                layer.over = (*layer.over, "tp")
            layer.widths = "tp" in names and "tp" not in layer.over and chance(.5)
            if chance(.5):
                layer.router = {"score": "sigmoid", "scale": 1.5} | one({}, {"normalise": False})
            if layer.count % 2 == 0 and layer.count >= 4 and layer.k <= layer.count // 2 and chance(.3):
                layer.router |= {"groups": 2}
            layer.biased, layer.shared = chance(.4), chance(.4)
            layer.how = one({}, {"dedup": True}, {"dedup": False}, {"room": int(rng.integers(1, 5))})
            layer.losses = one("", "", "b", "z", "bz")

    def documents() -> list[tuple[int, ...]]:
        if out.rows:
            return [(2 * out.ranks * one(1, 2),) * one(1, 2)] * out.parts
        n = one(1, 2, 3, ranks - 1, *range(4, 15))
        return [tuple(int(d) for d in np.diff([0, *sorted(rng.integers(0, n + 1, int(rng.integers(0, 5)))), n]))
                for _ in range(out.parts)]
    chooses = ("random", "random", "one", "nobody", "twice", "dropped") + (
        ("", "", "", "some") if out.dtype == "float64" else ())
    micro = int(rng.integers(1, 4))
    refused = [i for i, layer in enumerate(out.layers) if layer.kind == "experts" and {*layer.over} >= {*out.cuts}
               and "tp" not in names and "room" not in layer.how]
    for number in range(int(rng.integers(2, 5))):
        kind = "train" if staged or not number else one("train", "train", "skip", "eval", "freeze", "raise", "nan")
        if kind == "nan" and not refused:
            kind = "raise"
        passes, same = [], documents()
        for _ in range(micro if staged else int(rng.integers(1, 4))):
            each = range(1 if staged else one(1, 1, 2, 3))
            passes.append([Pass(same if staged else documents(), int(rng.integers(1 << 20)), one(*chooses)) for _ in each])
        which = one(*refused) if kind == "nan" else int(rng.integers(len(out.layers)))
        out.steps.append(Step(kind, passes, which, not staged and chance(.4), chance(.5)))
    return out
