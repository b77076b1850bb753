# SPDX-License-Identifier: Apache-2.0
"""Flattened axes are one data axis: beside parameters on any other axis, under each way of data parallelism."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from ms_dtensor import (
    ColwiseParallel,
    DeviceMesh,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
    replicate,
    value_and_grad,
)
from ms_dtensor.errors import DTensorError
from tests.cases import case
from tests.dist.support import counted, equal_steps, refusal, same_on_all_ranks
from tests.sharding.support import ROWS, collected, filled, none_of
from tests.tiers import sampled


class Mlp(nn.Cell):
    """A projection up and one down, and one of the model's own, which no style touches."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Dense(4, 8), nn.Dense(8, 4), nn.Dense(4, 4)

    def construct(self, x):
        return self.last(x + self.down(mint.tanh(self.up(x))))


STYLES = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
WRAPS = {"fully_shard": lambda net, data: fully_shard(net, mesh=data),
         "blocks": lambda net, data: (fully_shard(net.up, mesh=data), fully_shard(net, mesh=data)),
         "kept": lambda net, data: fully_shard(net, mesh=data, reshard_after_forward=False),
         "replicate": lambda net, data: replicate(net, mesh=data),
         "zero1": lambda net, data: replicate(net, mesh=data, zero1=True)}


def one_step(net, plain, mesh, data, plain_rows: bool):
    """Loss and gradients on rows cut over the data axes; returns what the last of two steps communicated."""
    want = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(Tensor(ROWS))
    if plain_rows:
        x = Tensor(np.array_split(ROWS, data.size())[data.get_group().rank_index])
    else:
        x = distribute_tensor(Tensor(ROWS), mesh, {"edp": Shard(0), "ep": Shard(0)}, src_data_rank=None)
    for _ in range(2):
        with counted() as count:
            got = value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())(x)
        equal_steps(got, want, net.trainable_params())
    return count


def flattened(world, shape, names, over, other: str, plain_rows: bool) -> None:
    faults: list[str] = []
    for way, wrap in sampled(WRAPS.items(), 2, shape.index(1) + plain_rows):
        def steps(wrap=wrap, way=way):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            data = mesh[over].flatten("dp")
            plain, net = filled(Mlp()), filled(Mlp())
            parallelize_module(net, mesh[other], STYLES)
            wrap(net, data)
            count = one_step(net, plain, mesh, data, plain_rows)
            sums = count["all_reduce", "backward"] if way == "replicate" else count["reduce_scatter", "backward"]
            assert sums <= 3, ("the group is the flattened one: a sum a dtype, not one an axis", count)
        collected(faults, way, steps)
    none_of(faults)


@case(4)
def two_flattened_axes_beside_tensor_parallel_weights(world):
    flattened(world, (2, 1, 2), ("edp", "ep", "tp"), ("edp", "ep"), "tp", True)


@case(4)
def two_flattened_axes_of_two_beside_an_axis_of_one(world):
    flattened(world, (2, 2, 1), ("edp", "ep", "tp"), ("edp", "ep"), "tp", True)


@case(4)
def rows_laid_out_over_flattened_axes(world):
    flattened(world, (2, 1, 2), ("edp", "ep", "tp"), ("edp", "ep"), "tp", False)


@case(2)
def rows_on_a_flattened_axis_beside_an_equal_mesh_made_earlier(world):
    """Equal meshes are one to layouts, whatever they were sliced from; so where an axis comes from is asked of the cell."""
    earlier = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    kept = distribute_tensor(Tensor(ROWS), earlier, [Shard(0)], src_data_rank=None)
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("edp", "ep", "tp"))
    data = mesh["edp", "ep"].flatten("dp")
    plain, net = filled(Mlp()), filled(Mlp())
    parallelize_module(net, mesh["tp"], STYLES)
    replicate(net, mesh=data)
    x = distribute_tensor(Tensor(ROWS), data, [Shard(0)], src_data_rank=None)
    assert x.layout is kept.layout
    want = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(Tensor(ROWS))
    got = value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())(x)
    equal_steps(got, want, net.trainable_params())


@case(4)
def rows_that_do_not_divide_are_chunks_of_the_flattened_axis(world):
    """Of 5 rows four ranks bring 2, 2, 1 and none; on two axes of two they would lie as 2, 1, 1 and 1."""
    faults: list[str] = []
    for shift, (way, wrap) in enumerate(WRAPS.items()):
        for count in sampled((5, 6), 2, shift):
            def steps(wrap=wrap, count=count):
                mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("edp", "ep", "tp"))
                data = mesh["edp", "ep"].flatten("dp")
                plain, net = filled(Mlp()), filled(Mlp())
                parallelize_module(net, mesh["tp"], STYLES)
                wrap(net, data)
                rows = np.concatenate([ROWS, ROWS * 0.5])[:count]
                own = distribute_tensor(Tensor(rows), data, [Shard(0)], src_data_rank=None).to_local()
                want = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(Tensor(rows))
                got = value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())(own)
                equal_steps(got, want, net.trainable_params())
            collected(faults, f"{way}, {count} rows", steps)
    none_of(faults)


@case(4)
def the_other_axis_stands_before_the_flattened_ones(world):
    flattened(world, (2, 2, 1), ("tp", "edp", "ep"), ("edp", "ep"), "tp", True)


class Experts(nn.Cell):
    """A dense layer, and expert weights that are cut over "ep", one of the data axes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert, self.last = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):
        return self.last(mint.tanh(self.expert(mint.tanh(self.dense(x)))))


@case(4)
def experts_on_one_of_the_flattened_axes(world):
    """Dense weights are cut over edp and ep together, the experts' over ep, and over edp by a unit of their own."""
    faults: list[str] = []
    for way in ("fully_shard", "replicate", "zero1"):
        def steps(way=way):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
            data = mesh["edp", "ep"].flatten("dp")
            plain, net = filled(Experts()), filled(Experts())
            parallelize_module(net.expert, mesh["ep"], ColwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False))
            wrap = {"fully_shard": fully_shard, "replicate": replicate,
                    "zero1": lambda n, mesh: replicate(n, mesh=mesh, zero1=True)}[way]
            wrap(net.expert, mesh=mesh["edp"])
            if way == "fully_shard":
                fully_shard(net, mesh=data)
            else:
                wrap(net.dense, mesh=data)
                wrap(net.last, mesh=data)
            x = distribute_tensor(Tensor(ROWS), mesh, [Shard(0), Shard(0)], src_data_rank=None)
            want = ms.value_and_grad(lambda x: (plain(x) ** 2).mean(), None, plain.trainable_params())(Tensor(ROWS))
            got = value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())(x)
            equal_steps(got, want, net.trainable_params())
        collected(faults, way, steps)
    none_of(faults)


@case(4)
def errors_name_the_way_that_was_used(world):
    """Styles that hand out plain tensors (use_local_output=True) under each way: right, or refused in its own name."""
    faults: list[str] = []
    styles = {"up": ColwiseParallel(), "down": ColwiseParallel()}  # the second one's input is a shard of the first one's
    for way, wrap in WRAPS.items():
        def steps(way=way, wrap=wrap, styles=styles):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            net = filled(Mlp())
            parallelize_module(net, mesh["tp"], styles)
            wrap(net, mesh["dp"])
            try:
                net(Tensor(ROWS[:4]))
            except DTensorError as e:
                assert way == "replicate" or "'replicate'" not in str(e), e
            else:
                raise AssertionError("taken")
        collected(faults, way, steps)

    class Ends(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Dense(4, 8)

        def construct(self, x):
            return self.up(x)[:, :3]  # of what is here: no part of the global output that a layout can say
    for way, wrap in WRAPS.items():
        if way == "blocks":
            continue

        def ends(way=way, wrap=wrap):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            net = filled(Ends())
            parallelize_module(net, mesh["tp"], {"up": ColwiseParallel()})
            wrap(net, mesh["dp"])
            try:
                net(Tensor(ROWS[:4]))
            except DTensorError as e:
                assert way in ("replicate",) or "'replicate'" not in str(e), e
            else:
                raise AssertionError("taken")
        collected(faults, f"{way}, an output of no layout", ends)
    none_of(faults)


@case(4, timeout=120)
def siblings_split_from_one_line(world):
    """Columns on an axis of one mesh, shards on an axis of its sibling: one grid has both, whichever was split first."""
    faults: list[str] = []
    for shift, (way, wrap) in enumerate(WRAPS.items()):
        for sizes in sampled(((2, 2), (2, 2, 1)), 4, shift):
            def steps(wrap=wrap, sizes=sizes):
                line = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
                dense = line.unflatten(0, (2, 2), ("dp", "tp"))
                sparse = line.unflatten(0, sizes, ("edp", "ep", "one")[:len(sizes)])
                plain, net = filled(Mlp()), filled(Mlp())
                parallelize_module(net, dense["tp"], STYLES)
                wrap(net, sparse["edp"])
                count = one_step(net, plain, None, sparse["edp"], plain_rows=True)
                whole = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("edp", "tp"))
                other = filled(Mlp())
                parallelize_module(other, whole["tp"], STYLES)
                wrap(other, whole["edp"])
                assert count == one_step(other, plain, None, whole["edp"], plain_rows=True), "as on a mesh of both"
            collected(faults, f"{way}, {sizes}", steps)

    def across():
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        net = filled(Mlp())
        parallelize_module(net, line.unflatten(0, (2, 2), ("dp", "tp"))["tp"], STYLES)
        return fully_shard(net, mesh=line.unflatten(0, (1, 4), ("pp", "edp"))["edp"])
    text = refusal(across, DTensorError)
    assert "run across each other" in text, text
    same_on_all_ranks(world, text)
    none_of(faults)
