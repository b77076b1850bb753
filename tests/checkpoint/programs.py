# SPDX-License-Identifier: Apache-2.0
"""Programs to save and load: a model in every kind of layout on one to four ranks, an optimizer, an average, numbers.

As a script, `python -m tests.checkpoint.programs save|load FOLDER`, a job of any size saves all of its layouts with values
that follow from names alone, or loads every checkpoint of the folder into each and compares bit by bit.
"""
import itertools
import os
import sys
import zlib
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.checkpoint.state import Leaf, State
from ms_dtensor.tensor.distribute import like_parameter
from tests.msrun import report
from tests.support import mesh_1d, mesh_2d

S = md.Shard


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


STYLES = {"up": md.ColwiseParallel(), "again": md.ColwiseParallel(), "down": md.RowwiseParallel()}


def _fully(net, mesh, **options):
    for cell in (net.up, net.down, net):
        md.fully_shard(cell, mesh=mesh, **options)


def _uneven(net, mesh):
    """Another layout for each parameter: inside out, uneven, empty shards."""
    places = itertools.cycle([(("tp", "dp"), "None"), ("None", ("dp", "tp")), ("dp", "tp"), ("tp", "dp")])
    for _, cell in net.cells_and_names():
        for key, p in cell._params.items():
            if not isinstance(p, md.DTensor):
                where = next(places)
                where = where if len(p.shape) == 2 else [S(0), S(0)]
                cell._params[key] = like_parameter(md.distribute_tensor(p, mesh, where, src_data_rank=None), p)
    md.distribute_module(net, mesh)


BY_RANKS = {
    1: {"1": lambda net: None},
    2: {"tp=2": lambda net: md.parallelize_module(net, mesh_1d(2, "tp"), STYLES),
        "fsdp=2": lambda net: _fully(net, mesh_1d(2, "dp"))},
    3: {"fsdp=3, uneven": lambda net: _fully(net, mesh_1d(3, "dp"))},
}
BY_RANKS[4] = {
    "whole on 4": lambda net: None,
    "tp=4": lambda net: md.parallelize_module(net, mesh_1d(4, "tp"), STYLES),
    "dp=2 x tp=2": lambda net: md.replicate(md.parallelize_module(net, mesh_2d()["tp"], STYLES), mesh=mesh_2d()["dp"]),
    "zero1=4": lambda net: md.replicate(net, mesh=mesh_1d(4, "dp"), zero1=True),
    "fsdp=4": lambda net: _fully(net, mesh_1d(4, "dp")),
    "fsdp=2 x tp=2": lambda net: _fully(md.parallelize_module(net, mesh_2d()["tp"], STYLES), mesh_2d()["dp"]),
    "hsdp=2x2": lambda net: _fully(net, mesh_2d()),
    "uneven, other orders": lambda net: _uneven(net, mesh_2d()),
}


def program(layout: str, ranks: int = 4) -> dict:
    """A model, an optimizer that has stepped, and an average."""
    net = Net(0)
    BY_RANKS[ranks][layout](net)
    params = net.trainable_params()
    return {"model": net, "optimizer": md.optim.AdamW(params, 0.1), "ema": md.optim.EMA(params, 0.5), "step": 0,
            "words": ["", {"deep": 0.0}]}


def local_values(leaf: Leaf) -> np.ndarray:
    """This rank's piece of the values that follow from a tensor's name."""
    rng = np.random.default_rng(zlib.crc32(leaf.key.encode()))
    array, _ = leaf.target()
    whole = rng.normal(size=leaf.shape).astype(array.dtype)
    if leaf.layout is None:
        return whole
    return leaf.layout.assemble(lambda box: whole[tuple(slice(*extent) for extent in box)])


def fill(state: dict) -> None:
    """Gives every tensor the values that follow from its name."""
    for leaf in State(state, "fill").tensors.values():
        array, direct = leaf.target()
        array[...] = local_values(leaf)
        if not direct:
            leaf.store(array)
    state["step"], state["words"][0], state["words"][1]["deep"] = 7, "é", 0.1
    state["optimizer"].step = 9


def faults(state: dict) -> list[str]:
    """The tensors on this rank that are not what follows from their names, bit by bit."""
    wrong = [leaf.key for leaf in State(state, "faults").tensors.values()
             if leaf.here() and leaf.array().tobytes() != local_values(leaf).tobytes()]
    plain = (state["step"], state["words"], state["optimizer"].step) == (7, ["é", {"deep": 0.1}], 9)
    return wrong if plain else [*wrong, "plain values"]


def folder_name(layout: str) -> str:
    """Of a checkpoint."""
    return layout.replace(" ", "_")


def save_all(root: Path, ranks: int) -> None:
    """Saves each layout of this many ranks."""
    for layout in BY_RANKS[ranks]:
        fill(state := program(layout, ranks))
        md.checkpoint.save(state, root / folder_name(layout))


def load_all(root: Path, ranks: int) -> dict[str, list[str]]:
    """Loads every checkpoint into each layout; what was wrong, by "source -> target"."""
    found = {}
    for layout in BY_RANKS[ranks]:
        for source in sorted(os.listdir(root)):
            state = program(layout, ranks)
            md.checkpoint.load(state, root / source)
            found[f"{source} -> {folder_name(layout)}"] = faults(state)
    return found


def main(what: str, root: str) -> int:
    """On a rank."""
    ranks = md.comm.start("cpu").size
    if what == "save":
        save_all(Path(root), ranks)
    else:
        report(load_all(Path(root), ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
