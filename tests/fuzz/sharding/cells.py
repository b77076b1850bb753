# SPDX-License-Identifier: Apache-2.0
"""The cells that random data-parallel programs are made of: written for one device, of [n, width] to [n, width] each.

What a step changes about them (order, what is off, where to raise) is Python state in one `State` per net, so that a copy of
the net has its own. `build` makes the same net, with the same values, on every rank.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

WRITES = ("set_data", "assign", "copy_", "setitem")
CONTAINERS = ("group", "giver")


@dataclass
class Part:
    """A cell as data.

    Args:
        kind: see `KINDS`.
        parts: of a container, the cells inside.
        out: what it returns: "tensor", "tuple", "dict", "data" (a dataclass), "extra" (a tuple whose second is not used).
        frozen: its parameters are, at first.
        kept: None; "attr" keeps what it computed for the loss, "hook" lets a forward hook do so.
        how: which function writes, of a cell that writes in its forward; "tied": the cell whose weight it shares.
    """

    kind: str
    parts: list[Part] = field(default_factory=list)
    out: str = "tensor"
    frozen: bool = False
    kept: str | None = None
    how: str = "set_data"
    tied: str = ""

    def __str__(self):
        said = [str(p) for p in self.parts]
        said += [f"out={self.out!r}"] * (self.out != "tensor") + ["frozen"] * self.frozen
        said += [f"kept={self.kept!r}"] * bool(self.kept) + [f"tied to {self.tied}"] * bool(self.tied)
        said += [f"how={self.how!r}"] * (self.kind in ("stats", "momentum", "teacher"))
        return f"{self.kind}({', '.join(said)})"


@dataclass
class State:
    """What the steps of a program change about a net."""

    order: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of a container's parts; absent: once each
    off: set[str] = field(default_factory=set)  # cells that return their input as it is
    kept: list[Any] = field(default_factory=list)
    raises: str | None = None
    copies: bool = False  # parameters are read through copies, so that no later write reaches what autograd saved


@dataclass
class Out:
    """What a cell may return."""

    y: Any
    note: str = "aside"


def write(p: Parameter, new, how: str) -> None:
    """Gives a parameter other values."""
    if how == "set_data":
        p.set_data(new)
    elif how == "assign":
        ops.assign(p, new)
    elif how == "copy_":
        p.copy_(new)
    elif p.ndim == 0:
        p[...] = new
    else:
        p[:] = new


def opened(out):
    """The tensor of what a cell returned."""
    if isinstance(out, tuple):
        return out[0]
    if isinstance(out, dict):
        return out["y"]
    return out.y if isinstance(out, Out) else out


class Linear(nn.Dense):
    def __init__(self, inner: int, outer: int, state: State, bias: bool = True):
        super().__init__(inner, outer, weight_init="zeros", bias_init="zeros", has_bias=bias, dtype=ms.float64)
        self.state = state

    def construct(self, x):
        if self.state.copies:
            return ops.dense(x, self.weight * 1, self.bias * 1 if self.has_bias else None)
        return super().construct(x)


def vector(name: str, *shape: int, trained: bool = True) -> Parameter:
    return Parameter(Tensor(np.zeros(shape)), name=name, requires_grad=trained)


class Node(nn.Cell):
    """Does a part's work, and what the program asks for around it."""

    def __init__(self, part: Part, where: str, width: int, state: State):
        super().__init__()
        self.part, self.where, self.width, self.state = part, where, width, state
        self.made()

    def made(self) -> None:
        """Parameters."""

    def work(self, x, m):
        """What it computes."""
        raise NotImplementedError

    @property
    def how(self) -> str:
        return "set_data" if self.state.copies else self.part.how

    def read(self, p):
        """A parameter as the work takes it."""
        return p * 1 if self.state.copies else p

    def construct(self, x, m=None):
        state = self.state
        if state.raises == self.where:
            raise ValueError("on purpose")
        if self.where in state.off:
            return x
        y = self.work(x, m)
        if self.part.kept == "attr":
            state.kept.append(y * 1.5)
        out = self.part.out
        if out == "tuple":
            return y, {"also": y * 0.5}
        if out == "extra":
            return y, x * 2
        if out == "dict":
            return {"y": y, "x": x}
        return Out(y) if out == "data" else y


class Dense(Node):
    def made(self):
        self.lin = Linear(self.width, self.width, self.state)

    def work(self, x, m):
        y = mint.tanh(self.lin(x))
        return x + (y if m is None else y * m)


class Mlp(Node):
    def made(self):
        self.up, self.down = Linear(self.width, self.width + 2, self.state), Linear(self.width + 2, self.width, self.state)

    def work(self, x, m):
        y = self.down(mint.tanh(self.up(x)))
        return x + (y if m is None else y * m.sum())


class Norm(Node):
    def made(self):
        self.gain = vector("gain", self.width)

    def work(self, x, m):
        return x * mint.rsqrt((x * x).mean(-1, keep_dims=True) + 0.125) * self.read(self.gain)


class Number(Node):
    def made(self):
        self.s = vector("s")

    def work(self, x, m):
        return x * self.read(self.s)


class Empty(Node):
    def work(self, x, m):
        return mint.tanh(x)


class Const(Node):
    """Makes a plain tensor."""

    def work(self, x, m):
        return x * Tensor(np.linspace(0.5, 1.5, self.width))


class Stats(Node):
    """Running statistics, as BatchNorm's."""

    def made(self):
        self.gain, self.moving_mean = vector("gain", self.width), vector("moving_mean", self.width, trained=False)

    def work(self, x, m):
        now = x.mean(0)
        write(self.moving_mean, self.moving_mean * 0.875 + ops.stop_gradient(now) * 0.125, self.how)
        return (x - now) * self.read(self.gain) + self.moving_mean.astype(x.dtype)


class Momentum(Node):
    """A target that follows what is trained, written before it is used (MoCo's encoder)."""

    def made(self):
        self.a, self.b = Linear(self.width, self.width, self.state), Linear(self.width, self.width, self.state)
        for p in self.b.get_parameters():
            p.requires_grad = False

    def work(self, x, m):
        y = mint.tanh(self.a(x))
        write(self.b.weight, self.b.weight * 0.625 + ops.stop_gradient(self.a.weight) * 0.375, self.how)
        return y + self.b(x) * 0.75


class Teacher(Node):
    """Writes what is trained, and used right after."""

    def made(self):
        self.a, self.s = Linear(self.width, self.width, self.state), vector("s", self.width)

    def work(self, x, m):
        write(self.s, ops.stop_gradient(self.s) * 0.5 + 0.25, self.how)
        return mint.tanh(self.a(x)) * self.read(self.s)


class Group(Node):
    def made(self):
        self.parts = nn.CellList([make(p, f"{self.where}.parts.{i}", self.width, self.state)
                                  for i, p in enumerate(self.part.parts)])

    def work(self, x, m):
        for i in self.state.order.get(self.where, range(len(self.parts))):
            x = opened(self.parts[i](x))
        return x


class Giver(Group):
    """Hands its parts a plain tensor that it makes, as a mask."""

    def work(self, x, m):
        m = Tensor(np.linspace(0.5, 1.0, self.width))
        for i in self.state.order.get(self.where, range(len(self.parts))):
            x = opened(self.parts[i](x, m))
        return x


KINDS = {c.__name__.lower(): c for c in (Dense, Mlp, Norm, Number, Empty, Const, Stats, Momentum, Teacher, Group, Giver)}
PLAIN = ("const", "giver")  # make plain tensors


def _keep(cell, args, out):
    """Forward hook: what the cell returned, for the loss."""
    cell.state.kept.append(opened(out) * 1.5)


def make(part: Part, where: str, width: int, state: State) -> Node:
    cell = KINDS[part.kind](part, where, width, state)
    if part.kept == "hook":
        cell.register_forward_hook(_keep)
    return cell


class Embed(nn.Cell):
    def __init__(self, width: int, state: State):
        super().__init__()
        self.state, self.table = state, vector("table", 5, width)

    def construct(self, ids):
        return ops.gather(self.table * 1 if self.state.copies else self.table, ids, 0)


class Net(nn.Cell):
    """The whole model: rows and their ids to scores, and the mean of what came before."""

    def __init__(self, part: Part, width: int, embeds: bool, tied: bool):
        super().__init__()
        self.state = State()
        self.body = make(part, "body", width, self.state)
        self.embed = Embed(width, self.state) if embeds else None
        self.head = Linear(width, 5, self.state, bias=False)
        if embeds and tied:
            self.head.weight = self.embed.table

    def construct(self, x, ids):
        if self.embed is not None:
            x = x + self.embed(ids)
        x = opened(self.body(x))
        return self.head(x), x * 2


def build(part: Part, width: int, embeds: bool, tied: bool) -> Net:
    """The net, with asymmetric values."""
    net = Net(part, width, embeds, tied)
    nodes = {c.where: c for _, c in net.cells_and_names() if isinstance(c, Node)}
    for node in nodes.values():
        if node.part.tied:
            node.lin.weight = nodes[node.part.tied].lin.weight
    for node in nodes.values():
        if node.part.frozen:
            for p in node.get_parameters():
                p.requires_grad = False
    for i, p in enumerate(net.get_parameters()):
        rng = np.random.default_rng([i, 5])
        p.set_data(Tensor(rng.normal(0.6, 0.3, p.shape) if p.ndim < 2 else rng.normal(0, 0.6, p.shape)))
    return net
