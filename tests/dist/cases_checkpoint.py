# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what one layout saved, every other loads bit for bit, optimizers too; one error on all ranks, no hang."""
from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import (
    ColwiseParallel,
    DTensor,
    FusedShard,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    checkpoint,
    comm,
    distribute_tensor,
    fully_shard,
    optim,
    parallelize_module,
    replicate,
)
from ms_dtensor.errors import CheckpointError
from ms_dtensor.tensor.distribute import like_parameter
from tests.cases import case
from tests.dist.support import array, counted, data, mesh_1d, mesh_2d, refusal, same_on_all_ranks

R, S = Replicate(), Shard


def folder(world) -> Path:
    """A new one, the same on all ranks."""
    return Path(comm.group(tuple(range(world.size))).broadcast_object(tempfile.mkdtemp(dir=os.getcwd()), 0))


class Net(nn.Cell):
    """Sizes that do not divide by four, a tied weight, a 16-bit one."""

    def __init__(self, seed):
        super().__init__()
        self.up, self.down, self.again = nn.Dense(6, 10), nn.Dense(10, 5), nn.Dense(6, 10)
        self.again.weight = self.up.weight
        self.half = Parameter(Tensor(np.zeros((7, 3)), ms.bfloat16), name="half")
        rng = np.random.default_rng(seed)
        for p in self.get_parameters():
            p.set_data(Tensor(rng.normal(size=p.shape).astype(np.float32)).astype(p.dtype))

    def construct(self, x):
        return self.down(mint.tanh(self.up(x) + self.again(x))) + self.half.astype(ms.float32).sum()


STYLES = {"up": ColwiseParallel(), "again": ColwiseParallel(), "down": RowwiseParallel()}


def _fully(net, mesh, **options):
    for cell in (net.up, net.down, net):
        fully_shard(cell, mesh=mesh, **options)


def _uneven(net, mesh):
    """Another layout for each parameter: inside out, uneven, empty shards."""
    places = itertools.cycle([(("tp", "dp"), "None"), ("None", ("dp", "tp")), ("dp", "tp"), ("tp", "dp")])
    for _, cell in net.cells_and_names():
        for key, p in cell._params.items():
            if not isinstance(p, DTensor):
                where = next(places)
                where = where if len(p.shape) == 2 else [S(0), S(0)]
                cell._params[key] = like_parameter(distribute_tensor(p, mesh, where, src_data_rank=None), p)
    md.distribute_module(net, mesh)


LAYOUTS = {
    "plain": lambda net: None,
    "tp=4": lambda net: parallelize_module(net, mesh_1d(4, "tp"), STYLES),
    "dp=2 x tp=2": lambda net: replicate(parallelize_module(net, mesh_2d()["tp"], STYLES), mesh=mesh_2d()["dp"]),
    "zero1=4": lambda net: replicate(net, mesh=mesh_1d(4, "dp"), zero1=True),
    "fsdp=4": lambda net: _fully(net, mesh_1d(4, "dp")),
    "fsdp=2 x tp=2": lambda net: _fully(parallelize_module(net, mesh_2d()["tp"], STYLES), mesh_2d()["dp"]),
    "hsdp=2x2": lambda net: _fully(net, mesh_2d()),
    "uneven, other orders": lambda net: _uneven(net, mesh_2d()),
}
BUILD = {
    "AdamW": lambda ps: optim.AdamW(ps, 0.1), "Muon": lambda ps: optim.Muon(ps, 0.1),
    "Adafactor": lambda ps: optim.Adafactor(ps, 0.3), "nn.Adam": lambda ps: nn.Adam(ps, 0.1),
}


def program(layout, seed, build="AdamW"):
    """A model that is laid out, its optimizer after two steps, and an average."""
    net = Net(seed)
    LAYOUTS[layout](net)
    params = [p for p in net.trainable_params() if build[:2] != "nn" or p.dtype == ms.float32]  # it has no such kernels
    optimizer, ema = BUILD[build](params), optim.EMA(params, 0.5)
    for step in range(2):
        draw = np.random.default_rng(seed + step)
        grads = [Tensor(draw.normal(size=p.shape).astype(np.float32)).astype(p.dtype) for p in params]
        optimizer(tuple(distribute_tensor(g, p.device_mesh, p.layout.placements, src_data_rank=None)
                        if isinstance(p, DTensor) and p.layout.order == tuple(range(p.layout.mesh.ndim)) else
                        _like(g, p) for g, p in zip(grads, params)))
        ema.update()
    return {"model": net, "optimizer": optimizer, "ema": ema, "step": seed, "words": ["a", None, True, 0.1 + seed]}


def _like(value, p):
    if not isinstance(p, DTensor):
        return value
    whole = DTensor.from_local(value, p.device_mesh, [R] * p.device_mesh.ndim)
    from ms_dtensor.dispatch.operands import redistribute
    return redistribute(whole, p.layout)


def values(state):
    """Every tensor's global values, by key, and the plain values."""
    from ms_dtensor.checkpoint.state import State
    held = State(state, "test")
    return {key: array(leaf.tensor).copy() for key, leaf in held.tensors.items()}, held.values


def _same(got, want, what):
    assert got[0].keys() == want[0].keys() and got[1] == want[1], what
    for key in want[0]:
        a, b = got[0][key], want[0][key]
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), (what, key)


@case(world_size=4, timeout=300)
def what_one_layout_saves_every_other_loads_bit_for_bit(world):
    saved = {}
    root = folder(world)
    for layout in LAYOUTS:
        state = program(layout, 1)
        checkpoint.save(state, root / layout.replace(" ", "_"))
        saved[layout] = values(state)
    for layout in LAYOUTS:
        state = program(layout, 2)
        params = {p.name: (id(p), p.layout if isinstance(p, DTensor) else None) for p in state["model"].get_parameters()}
        for source in LAYOUTS:
            checkpoint.load(state, root / source.replace(" ", "_"))
            _same(values(state), saved[source], f"{source} -> {layout}")
        assert params == {p.name: (id(p), p.layout if isinstance(p, DTensor) else None)
                          for p in state["model"].get_parameters()}


@case(world_size=4, timeout=300)
def every_optimizer_comes_back_bit_for_bit(world):
    root = folder(world)
    for build in list(BUILD)[1:]:
        state = program("fsdp=2 x tp=2", 1, build)
        want = values(state)
        checkpoint.save(state, root, step=3)
        for layout in ("uneven, other orders", "plain", "hsdp=2x2"):
            other = program(layout, 2, build)
            assert checkpoint.load(other, root).step == 3
            _same(values(other), want, f"{build} {layout}")
