# SPDX-License-Identifier: Apache-2.0
"""Small programs of every kind of parallelism, each run in a world that is real, pretended or dry: what they communicate.

A program is a function of the world's size that builds a model, takes one step and gives the events of `comm.record()`.
"""
from collections.abc import Callable
from functools import partial

import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.common.initializer import initializer

import ms_dtensor as md
from ms_dtensor import comm
from ms_dtensor.comm.record import CommEvent
from ms_dtensor.debug import dry_run
from ms_dtensor.errors import OpRuleError
from ms_dtensor.pipeline import Schedule1F1B, ScheduleZBH1, ScheduleZBVZeroBubble, pipeline
from tests.operands import Built

EXPERTS = 4
WIDTH, HIDDEN, WORDS = 16, 32, 24


def seen(event: CommEvent) -> tuple:
    """All of an event but when it was."""
    return tuple(getattr(event, name) for name in CommEvent.__slots__ if name not in ("seconds", "start"))


def norm(width: int) -> nn.Cell:
    """A root mean square norm of elementary ops."""
    return Built(lambda c, x: x * mint.rsqrt(mint.mean(x * x, dim=-1, keepdim=True) + 1e-5) * c.weight,
                 weight=Parameter(initializer("ones", (width,))))


class Block(nn.Cell):
    """A gated feed-forward layer with a norm before and a residual around."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = norm(width)
        self.gate, self.up = (mint.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = mint.nn.Linear(hidden, width, bias=False)

    def construct(self, x):
        h = self.norm(x)
        return x + self.down(mint.nn.functional.silu(self.gate(h)) * self.up(h))


class Net(nn.Cell):
    """Such layers, and a head."""

    def __init__(self, layers: int = 2, width: int = WIDTH, hidden: int = HIDDEN):
        super().__init__()
        self.layers = nn.CellList([Block(width, hidden) for _ in range(layers)])
        self.head = mint.nn.Linear(width, WORDS, bias=False)

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(width: int = WIDTH, rows: int = 8) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    return tuple(Tensor(rng.normal(size=(rows, 6, n)).astype(np.float32)) for n in (width, WORDS))  # type: ignore[return-value]


def tensor_parallel(net: nn.Cell, mesh, sequence: bool = False) -> nn.Cell:
    whole = {"use_local_output": False}
    out = {"output_layouts": md.Shard(1) if sequence else md.Replicate(), **whole}
    plan = {"head": md.ColwiseParallel(output_layouts=md.Replicate(), **whole)}
    for i in range(len(net.layers)):
        plan |= {f"layers.{i}.{name}": md.ColwiseParallel(**whole) for name in ("gate", "up")}
        plan[f"layers.{i}.down"] = md.RowwiseParallel(**out)
    return md.distribute_module(md.parallelize_module(net, mesh, plan), mesh)


def gradients(net: nn.Cell, x: Tensor, weights: Tensor):
    def loss(x):
        out = net(x)
        return (out * weights).sum()
    return md.value_and_grad(loss, None, net.trainable_params())(x)


def tp(n: int, sequence: bool) -> list[CommEvent]:
    mesh, (x, w) = md.init_device_mesh("cpu", (n,), mesh_dim_names=("tp",)), batch()
    net = tensor_parallel(Net(), mesh, sequence)
    x, w = md.distribute_tensor(x, mesh, [md.Shard(1) if sequence else md.Replicate()]), md.distribute_tensor(w, mesh)
    with comm.record() as events:
        gradients(net, x, w)
    return events


def data(n: int, wrap: Callable, width: int = WIDTH, hidden: int = HIDDEN) -> list[CommEvent]:
    mesh = md.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))
    net = wrap(Net(width=width, hidden=hidden), mesh=mesh)
    x, w = (md.distribute_tensor(t, mesh, [md.Shard(0)]) for t in batch(width))
    with comm.record() as events:
        _, grads = gradients(net, x, w)
        params = net.trainable_params()
        md.optim.clip_grad_norm_(zip(params, grads), 1.0)
        md.optim.AdamW(params, 1e-3)(grads)
    return events


def fully_sharded(net: nn.Cell, mesh) -> nn.Cell:
    for layer in net.layers:
        md.fully_shard(layer, mesh=mesh)
    return md.fully_shard(net, mesh=mesh)


def recomputed(net: nn.Cell, mesh) -> nn.Cell:
    """FSDP whose layers keep nothing: what the backward runs again gathers and reduces again."""
    out = fully_sharded(net, mesh)
    for layer in net.layers:
        layer.recompute()
    return out


def both(n: int) -> list[CommEvent]:
    """Tensor parallel layers, recomputed, within data parallelism."""
    mesh = md.init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))
    net = md.replicate(tensor_parallel(Net(), mesh["tp"], True), mesh=mesh["dp"])
    for layer in net.layers:
        layer.recompute()
    x, w = (md.distribute_tensor(t, mesh, [md.Shard(0), md.Shard(1)]) for t in batch())
    with comm.record() as events:
        gradients(net, x, w)
    return events


def fsdp_by_parts(n: int) -> list[CommEvent]:
    """Of several weights in one each rank has a part of each; large enough for the memory that collectives write into."""
    def wrap(net: nn.Cell, mesh) -> nn.Cell:
        for layer in net.layers:
            md.fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: md.FusedShard(0, (256, 128, 128))
                           if p.shape[0] == 512 else None)
        return md.fully_shard(net, mesh=mesh)
    return data(n, wrap, 128, 512) + data(n, wrap, 16, 512)


def cp(n: int, algorithm: str) -> list[CommEvent]:
    mesh, tokens = md.init_device_mesh("cpu", (n,), mesh_dim_names=("cp",)), md.balance((32, 12, 10, 6, 4), n)
    rng, attention = np.random.default_rng(0), md.context_attention(mesh["cp"], algorithm=algorithm)
    q, k, v, dout = tokens.cut(*(rng.normal(size=(len(tokens), heads, 4)).astype(np.float32) for heads in (8, 2, 2, 8)),
                               mesh=mesh)
    with comm.record() as events:
        md.grad(lambda q, k, v: (attention(q, k, v, tokens) * dout).sum(), (0, 1, 2))(q, k, v)
    return events


def ep(n: int, once: bool) -> list[CommEvent]:
    """Every rank's tokens choose one expert after another, as a dry run takes it."""
    mesh, rng = md.init_device_mesh("cpu", (n,), mesh_dim_names=("ep",)), np.random.default_rng(0)
    rows, k, d, f, cut = 16, 2, 8, 12, [md.Shard(0)]
    x, weights = (md.distribute_tensor(Tensor(rng.random(size=(rows, m)).astype(np.float32)), mesh, cut) for m in (d, k))
    chosen = (np.arange(rows // n * k) % EXPERTS).reshape(-1, k).astype(np.int32)
    chosen = md.DTensor.from_local(Tensor(chosen), mesh, cut)
    shapes = (EXPERTS, f, d), (EXPERTS, d, f), (EXPERTS, f, d)
    w = [Parameter(md.distribute_tensor(Tensor(rng.normal(size=s).astype(np.float32)), mesh, cut), name=f"w{i}")
         for i, s in enumerate(shapes)]
    with comm.record() as events:
        md.value_and_grad(lambda x, y: md.moe(x, y, chosen, *w, dedup=once).sum(), (0, 1), w)(x, weights)
    return events


def pp(n: int, kind: type = Schedule1F1B, v: int = 1) -> list[CommEvent]:
    mesh, (x, w) = md.init_device_mesh("cpu", (n,), mesh_dim_names=("pp",)), batch()
    stages = pipeline(Net(layers=2 * n), mesh, n_stages=v * n, style="v" if v == 2 else "loop")
    schedule = kind(stages, 4, lambda out, w: (out * w).sum())
    with comm.record() as events:
        schedule.step(x, target=w)
        schedule.eval(x, target=w)
    return events


PROGRAMS: dict[str, Callable[[int], list[CommEvent]]] = {
    "tp": partial(tp, sequence=False), "sp": partial(tp, sequence=True), "replicate": partial(data, wrap=md.replicate),
    "zero1": partial(data, wrap=partial(md.replicate, zero1=True)), "fsdp": partial(data, wrap=fully_sharded),
    "recomputed": partial(data, wrap=recomputed), "both": both, "cp": partial(cp, algorithm="gather"),
    "ring": partial(cp, algorithm="ring"), "ep": partial(ep, once=False), "ep_once": partial(ep, once=True), "pp": pp,
    "pp_zbh1": partial(pp, kind=ScheduleZBH1), "pp_zbv": partial(pp, kind=ScheduleZBVZeroBubble, v=2),
    "fsdp_by_parts": fsdp_by_parts}


def same_step_dry(program: str, n: int, rank: int, device: str = "CPU") -> list[CommEvent]:
    """What a program communicates on a rank of a dry world; ranks of a pipeline run in turns, as far as they are told."""
    messages: dict[str, bytes] = {}
    while True:
        known = len(messages)
        for r in range(n) if program.startswith("pp") else [rank]:
            try:
                with dry_run(world=n, rank=r, device=device, values={"experts": EXPERTS}, messages=messages) as run:
                    events = PROGRAMS[program](n)
                if r == rank:
                    return events
            except OpRuleError:
                if not program.startswith("pp") or r == n - 1 and len(messages | run.messages) == known:
                    raise
            messages |= run.messages

