# SPDX-License-Identifier: Apache-2.0
"""Flattened axes are one data axis: beside parameters on any other axis, under each way of data parallelism."""
from __future__ import annotations

import numpy as np
from mindspore import Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.errors import DTensorError
from tests.cases import case, cases
from tests.operands import Built, filled
from tests.sharding.support import ROWS, own_rows, rows_of, same_step
from tests.support import crossed, each, refusal, same_on_all_ranks
from tests.tiers import sampled


def mlp() -> nn.Cell:
    """A projection up and one down, and one of the model's own, which no style touches."""
    return Built(lambda c, x: c.last(x + c.down(mint.tanh(c.up(x)))),
                 up=nn.Dense(4, 8), down=nn.Dense(8, 4), last=nn.Dense(4, 4))


STYLES = {"up": md.ColwiseParallel(use_local_output=False), "down": md.RowwiseParallel(use_local_output=False)}
WRAPS = {"fully_shard": lambda net, data: md.fully_shard(net, mesh=data),
         "blocks": lambda net, data: (md.fully_shard(net.up, mesh=data), md.fully_shard(net, mesh=data)),
         "kept": lambda net, data: md.fully_shard(net, mesh=data, reshard_after_forward=False),
         "replicate": lambda net, data: md.replicate(net, mesh=data),
         "zero1": lambda net, data: md.replicate(net, mesh=data, zero1=True)}


def laid_out(wrap, tp, data) -> tuple[nn.Cell, nn.Cell]:
    """A model of one device, and the same with styles on an axis and data parallelism on another."""
    plain, net = filled(mlp()), filled(mlp())
    md.parallelize_module(net, tp, STYLES)
    wrap(net, data)
    return plain, net


@cases(4, {
    "two_flattened_axes_beside_tensor_parallel_weights": ((2, 1, 2), ("edp", "ep", "tp"), True),
    "two_flattened_axes_of_two_beside_an_axis_of_one": ((2, 2, 1), ("edp", "ep", "tp"), True),
    "rows_laid_out_over_flattened_axes": ((2, 1, 2), ("edp", "ep", "tp"), False),
    "the_other_axis_stands_before_the_flattened_ones": ((2, 2, 1), ("tp", "edp", "ep"), True)})
def flattened(world, shape, names, plain_rows: bool) -> None:
    @each(sampled(WRAPS, 2, shape.index(1) + plain_rows))
    def steps(way):
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=names)
        data = mesh["edp", "ep"].flatten("dp")
        plain, net = laid_out(WRAPS[way], mesh["tp"], data)
        x = own_rows(data) if plain_rows else md.distribute_tensor(
            Tensor(ROWS), mesh, {"edp": md.Shard(0), "ep": md.Shard(0)}, src_data_rank=None)
        for _ in range(2):
            count = same_step(net, plain, x)
        sums = count["all_reduce", "backward"] if way == "replicate" else count["reduce_scatter", "backward"]
        assert sums <= 3, ("the group is the flattened one: a sum a dtype, not one an axis", count)


@case(2)
def rows_on_a_flattened_axis_beside_an_equal_mesh_made_earlier(world):
    """Equal meshes are one to layouts, whatever they were sliced from; so where an axis comes from is asked of the cell."""
    kept = rows_of(md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    mesh = md.init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("edp", "ep", "tp"))
    data = mesh["edp", "ep"].flatten("dp")
    plain, net = laid_out(WRAPS["replicate"], mesh["tp"], data)
    x = rows_of(data)
    assert x.layout is kept.layout
    same_step(net, plain, x)


def rows_that_do_not_divide_are_chunks_of_the_flattened_axis(world):
    """Of 5 rows four ranks bring 2, 2, 1 and none; on two axes of two they would lie as 2, 1, 1 and 1."""
    @each(crossed(WRAPS, (5, 6), 2))
    def steps(way, count):
        mesh = md.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("edp", "ep", "tp"))
        data = mesh["edp", "ep"].flatten("dp")
        plain, net = laid_out(WRAPS[way], mesh["tp"], data)
        rows = np.concatenate([ROWS, ROWS * 0.5])[:count]
        same_step(net, plain, rows_of(data, rows).to_local(), rows=rows)


def experts() -> nn.Cell:
    """A dense layer, and expert weights that are cut over "ep", one of the data axes."""
    return Built(lambda c, x: c.last(mint.tanh(c.expert(mint.tanh(c.dense(x))))),
                 dense=nn.Dense(4, 4), expert=nn.Dense(4, 4), last=nn.Dense(4, 4))


def experts_on_one_of_the_flattened_axes(world):
    """Dense weights are cut over edp and ep together, the experts' over ep, and over edp by a unit of their own."""
    wraps = {"fully_shard": md.fully_shard, "replicate": md.replicate,
             "zero1": lambda n, mesh: md.replicate(n, mesh=mesh, zero1=True)}

    @each(wraps)
    def steps(way):
        mesh, wrap = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), wraps[way]
        data = mesh["edp", "ep"].flatten("dp")
        plain, net = filled(experts()), filled(experts())
        md.parallelize_module(net.expert, mesh["ep"], md.ColwiseParallel(
            input_layouts=md.Replicate(), output_layouts=md.Shard(0), use_local_output=False))
        wrap(net.expert, mesh=mesh["edp"])
        for rest in (net,) if way == "fully_shard" else (net.dense, net.last):
            wrap(rest, mesh=data)
        same_step(net, plain, md.distribute_tensor(Tensor(ROWS), mesh, [md.Shard(0), md.Shard(0)], src_data_rank=None))


def ends() -> nn.Cell:
    """Of what is here the first columns: no part of the global output that a layout can say."""
    return Built(lambda c, x: c.up(x)[:, :3], up=nn.Dense(4, 8))


def errors_name_the_way_that_was_used(world):
    """Styles that hand out plain tensors (use_local_output=True) under each way: right, or refused in its own name."""
    # the second style's input is a shard of the first one's
    kinds = {mlp: {"up": md.ColwiseParallel(), "down": md.ColwiseParallel()}, ends: {"up": md.ColwiseParallel()}}

    @each((kind, way) for kind in kinds for way in WRAPS if kind is mlp or way != "blocks")
    def refused(kind, way):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = filled(kind())
        md.parallelize_module(net, mesh["tp"], kinds[kind])
        WRAPS[way](net, mesh["dp"])
        text = refusal(lambda: net(Tensor(ROWS[:4])), DTensorError)
        assert way == "replicate" or "'replicate'" not in text, text


@case(4, timeout=120)
def siblings_split_from_one_line(world):
    """Columns on an axis of one mesh, shards on an axis of its sibling: one grid has both, whichever was split first."""
    @each(crossed(WRAPS, ((2, 2), (2, 2, 1)), 4))
    def steps(way, sizes):
        line = md.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        dense = line.unflatten(0, (2, 2), ("dp", "tp"))
        sparse = line.unflatten(0, sizes, ("edp", "ep", "one")[:len(sizes)])
        whole = md.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("edp", "tp"))
        counts = []
        for tp, data in ((dense["tp"], sparse["edp"]), (whole["tp"], whole["edp"])):
            plain, net = laid_out(WRAPS[way], tp, data)
            for _ in range(2):
                count = same_step(net, plain, own_rows(data))
            counts.append(count)
        assert counts[0] == counts[1], "as on a mesh of both"

    def across():
        line = md.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        net = filled(mlp())
        md.parallelize_module(net, line.unflatten(0, (2, 2), ("dp", "tp"))["tp"], STYLES)
        return md.fully_shard(net, mesh=line.unflatten(0, (1, 4), ("pp", "edp"))["edp"])
    text = refusal(across, DTensorError)
    assert "run across each other" in text, text
    same_on_all_ranks(world, text)
