# SPDX-License-Identifier: Apache-2.0
"""`constants="replicate"`: a model that makes tensors in `construct`, unedited, against one device; and what it must not let in."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor.debug import checks
from ms_dtensor.errors import ConfigError, LayoutError, MixedOperandError
from tests.cases import case
from tests.dist.support import counted, data, equal, refusal, same_on_all_ranks

MESSAGE = ("all_gather_object", "forward")


class Made(nn.Cell):
    """Positions, a mask, a table that is an attribute and a projection of a constant: what third parties' models make."""

    def __init__(self, rank_says=0.0):
        super().__init__()
        self.up, self.down, self.of_places = nn.Dense(6, 8), nn.Dense(8, 6), nn.Dense(1, 6)
        self.table, self.rank_says = data(5, 6), rank_says
        for i, p in enumerate(self.get_parameters()):
            p.set_data(data(i, *p.shape))

    def construct(self, x):
        rows = x.shape[0]
        places = ops.arange(6).astype(ms.float32).reshape(6, 1)
        x = x + self.of_places(places / 6).sum(0)  # a cell on a constant
        causal = ops.tril(ops.ones((rows, rows), ms.float32))  # of the batch's global size
        x = ops.matmul(causal, x) * self.table + Tensor(np.linspace(-1, 1, 6, dtype=np.float32))
        x = self.down(ops.gelu(self.up(x)))
        return ops.select(ops.zeros((rows, 6), ms.bool_), x, x + self.rank_says * ops.arange(6).astype(ms.float32))


def one_device(x):
    plain = Made()
    return ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)


def step(net, x):
    with counted() as count:
        got = md.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(x)
    return got, count


def whole(mesh):
    return data(9, 8, 6), md.distribute_tensor(data(9, 8, 6), mesh, {"dp": md.Shard(0)}), Tensor(
        data(9, 8, 6).asnumpy()[mesh.get_rank() * 4:][:4])


def compare(got, wanted, net):
    equal(got[0], wanted[0], "loss")
    for p, g, w in zip(net.trainable_params(), got[1], wanted[1], strict=True):
        equal(g, w, p.name)
        assert np.abs(w.asnumpy()).max() > 0, p.name


def mesh_of(name):
    return md.init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def spread(how, net, mesh):
    if how == "fsdp":
        for cell in (net.up, net.down):
            md.fully_shard(cell, mesh=mesh)
        md.fully_shard(net, mesh=mesh)
    elif how == "recompute":
        md.checkpoint_wrapper(net)
        md.fully_shard(net, mesh=mesh)
    elif how == "tp":
        plan = {"up": md.ColwiseParallel(use_local_output=False), "down": md.RowwiseParallel(use_local_output=False)}
        md.parallelize_module(net, mesh, plan, constants="replicate")
        return md.distribute_module(net, mesh)
    else:
        md.replicate(net, mesh=mesh)
    return md.parallelize_module(net, mesh, constants="replicate")


@case(world_size=2)
def an_unedited_model_equals_one_device(world):
    for how in ("dp", "fsdp", "recompute", "tp"):
        mesh = mesh_of("tp" if how == "tp" else "dp")
        net, x = spread(how, Made(), mesh), data(9, 8, 6)
        mine = md.distribute_tensor(x, mesh) if how == "tp" else Tensor(x.asnumpy()[world.rank * 4:][:4])
        got, count = step(net, mine)
        compare(got, one_device(x), net)
        without, _ = one_device(x), None
        del without
        print(how, dict(count), flush=True)


@case(world_size=2)
def rows_that_come_from_outside_stay_rows(world):
    mesh = mesh_of("dp")
    x, dx, mine = whole(mesh)
    net = Made()
    for cell in (net.up, net.down, net.of_places):  # the rows come into `net`, which is no cell of data parallelism
        md.replicate(cell, mesh=mesh)
    md.parallelize_module(net, mesh, constants="replicate")
    text = refusal(lambda: net(mine), MixedOperandError)
    assert "each input of Made" in text and "register_buffer" in text and "parallelize_module(net" not in text, text
    same_on_all_ranks(world, text)
    got, _ = step(net, dx)  # laid out, nothing else is plain
    compare(got, one_device(x), net)
    text = refusal(lambda: md.replicate(Made(), mesh=mesh)(mine), MixedOperandError)
    fixes = text[text.index("fix:"):]
    assert fixes.startswith('fix:  parallelize_module(net, device_mesh, constants="replicate")'), text

    class Second(nn.Cell):
        """Rows that come in beside the first input."""

        def construct(self, x, more):
            return (x * more + ops.ones(6)).mean()
    loss = md.parallelize_module(md.replicate(Second(), mesh=mesh), mesh, constants="replicate")
    equal(loss(mine, mine), Second()(x, x))


@case(world_size=2)
def what_differs_by_rank_is_found_under_checks(world):
    mesh = mesh_of("dp")
    x, dx, mine = whole(mesh)
    net = md.parallelize_module(md.replicate(Made(rank_says=1.0 + world.rank), mesh=mesh), mesh, constants="replicate")
    with checks():
        text = refusal(lambda: net(mine), LayoutError)
    assert "For 'add', a plain tensor differs from rank to rank on axis 'dp'" in text and "ms.set_seed" in text, text
    same_on_all_ranks(world, text)
    net = md.parallelize_module(md.replicate(Made(), mesh=mesh), mesh, constants="replicate")
    with checks():
        got, count = step(net, mine)
    compare(got, one_device(x), net)
    assert count[MESSAGE] > 5, count
    compared = count[MESSAGE]
    _, count = step(net, mine)
    assert compared > count[MESSAGE] == 1, count  # the rows of the batch


@case(world_size=2)
def parameters_and_local_outputs_are_no_constants(world):
    mesh = mesh_of("tp")
    x = md.distribute_tensor(data(9, 8, 6), mesh)

    class Weighted(nn.Cell):
        def __init__(self, of_it):
            super().__init__()
            self.up, self.w, self.of_it = nn.Dense(6, 6), Parameter(data(3, 6), name="w"), of_it

        def construct(self, x):
            return self.up(x) * (self.w * 2 if self.of_it else self.w)
    for of_it in (True, False):
        net = md.parallelize_module(Weighted(of_it), mesh, {"up": md.ColwiseParallel(use_local_output=False)},
                                    constants="replicate")
        text = refusal(lambda net=net: md.value_and_grad(lambda t: net(t).mean(), None, net.trainable_params())(x),
                       MixedOperandError)
        same_on_all_ranks(world, text)
    net = md.parallelize_module(Weighted(False), mesh, {"up": md.ColwiseParallel()}, constants="replicate")
    text = refusal(lambda: net(x), LayoutError)
    assert "hands out a plain tensor" in text and "use_local_output=False" in text, text
    same_on_all_ranks(world, text)
    assert "but got 'shard'" in refusal(lambda: md.parallelize_module(net, mesh, constants="shard"), ConfigError)
