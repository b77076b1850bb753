# SPDX-License-Identifier: Apache-2.0
"""`constants="replicate"`: a model that makes tensors in `construct`, unedited, against one device; and what it must not let in."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor.debug import checks
from ms_dtensor.errors import ConfigError, LayoutError, MixedOperandError
from tests.cases import case
from tests.operands import Built, S, data, filled
from tests.support import counted, equal, refusal, same_on_all_ranks

F, B = "forward", "backward"
MESSAGE = ("all_gather_object", F)
# The mask multiplies rows of both ranks: one sum, and its transpose. The cell on a constant computes alike on both, and its
# result's gradient is summed over rows. Constants themselves cost nothing.
ROWS = {MESSAGE: 1, ("reduce_scatter", F): 1, ("all_gather", B): 1, ("all_reduce", B): 1}
COUNTS = {"dp": {**ROWS, ("all_reduce", B): 2}, "tp": {("all_reduce", F): 1, ("all_reduce", B): 2},
          "fsdp": {**ROWS, ("all_gather", F): 3, ("all_gather", B): 3, ("reduce_scatter", B): 3},
          "recompute": {**ROWS, ("reduce_scatter", F): 2, ("all_gather", F): 1, ("all_gather", B): 2, ("reduce_scatter", B): 1}}


class Made(nn.Cell):
    """Positions, a mask, a table that is an attribute and a projection of a constant: what third parties' models make."""

    def __init__(self, rank_says=0.0):
        super().__init__()
        self.up, self.down, self.of_places = nn.Dense(6, 8), nn.Dense(8, 6), nn.Dense(1, 6)
        self.table, self.rank_says = data(5, 6), rank_says
        filled(self)

    def construct(self, x):
        rows = x.shape[0]
        places = ops.arange(6).astype(ms.float32).reshape(6, 1)
        x = x + self.of_places(places / 6).sum(0)  # a cell on a constant
        causal = ops.tril(ops.ones((rows, rows), ms.float32))  # of the batch's global size
        x = ops.matmul(causal, x) * self.table + Tensor(np.linspace(-1, 1, 6, dtype=np.float32))
        x = self.down(ops.tanh(self.up(x)))
        return ops.select(ops.zeros((rows, 6), ms.bool_), x, x + self.rank_says * ops.arange(6).astype(ms.float32))


def one_device(x):
    plain = Made()
    return ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)


def step(net, x):
    with counted() as count:
        got = md.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(x)
    return got, count


def whole(mesh):
    return data(9, 8, 6), md.distribute_tensor(data(9, 8, 6), mesh, {"dp": S(0)}), Tensor(
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
        assert count == COUNTS[how], (how, count)


@case(world_size=2)
def constants_of_a_registered_method_are_alike_too(world):
    """An encoder's `encode` makes positions, and is called in the place of the cell."""
    class Encodes(Made):
        def encode(self, x):
            return Made.construct(self, x)
    x, dx, rows = whole(mesh := mesh_of("dp"))
    wanted = one_device(x)
    for shard in (md.replicate, md.fully_shard):
        for first in (True, False):
            net = shard(Encodes(), mesh=mesh)
            if first:
                md.parallelize_module(net, mesh, constants="replicate")
            md.register_fsdp_forward_method(net, "encode")
            if not first:
                md.parallelize_module(net, mesh, constants="replicate")
            for given in (dx, rows):
                with counted() as count:
                    got = md.value_and_grad(lambda t, net=net: (net.encode(t) ** 2).mean(), None, net.trainable_params())(given)
                compare(got, wanted, net)
            assert count == step(net, rows)[1], count
    net = md.parallelize_module(md.replicate(Encodes(), mesh=mesh), mesh, constants="replicate")
    refusal(lambda: net.encode(dx), MixedOperandError)  # it knows of nothing before it is registered


@case(world_size=2)
def rows_that_come_from_outside_stay_rows(world):
    mesh = mesh_of("dp")
    x, dx, mine = whole(mesh)
    net = Made()
    for cell in (net.up, net.down, net.of_places):  # the rows come into `net`, which is no cell of data parallelism
        md.replicate(cell, mesh=mesh)
    md.parallelize_module(net, mesh, constants="replicate")
    text = same_on_all_ranks(world, refusal(lambda: net(mine), MixedOperandError))
    assert "each input of Made" in text and "register_buffer" in text and "parallelize_module(net" not in text, text
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
def a_constant_that_enters_a_style_is_whole(world):
    """The style notes that plain inputs of its cell are rows of the batch; this one is made inside."""
    mesh, x = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), data(9, 8, 6)
    columns = md.ColwiseParallel(use_local_output=False)
    net = md.parallelize_module(Made(), mesh["tp"], {"of_places": columns}, constants="replicate")
    md.replicate(net, mesh=mesh["dp"])
    for checked in (True, False):
        with checks(checked):
            got, _ = step(net, Tensor(x.asnumpy()[world.rank * 4:][:4]))
        compare(got, one_device(x), net)


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


class Clipped(nn.Optimizer):
    """As others write theirs: compiled, betas of shape [1], all gradients scaled by their common norm."""

    def __init__(self, params):
        super().__init__(0.1, params)
        self.beta = Tensor(np.array([0.9], np.float32))
        self.power = Parameter(Tensor(np.array([1.0], np.float32)), name="power")
        self.moments = self.parameters.clone(prefix="moment", init="zeros")

    def run(self, gradients):
        norm = ops.sqrt(sum((g * g).sum() for g in gradients))
        self.power = self.power * self.beta
        for p, m, g in zip(self.parameters, self.moments, gradients):
            ops.assign(m, self.beta * m + (Tensor([1.0], ms.float32) - self.beta) * g / norm)
            ops.assign(p, p - self.get_lr() * m / (1 - self.power))
        return True

    def construct(self, gradients):
        return self.run(gradients)


class Compiled(Clipped):
    @ms.jit
    def construct(self, gradients):
        return self.run(gradients)


@case(world_size=2)
def optimizers_of_others_equal_one_device(world):
    mesh = mesh_of("dp")
    x, _, mine = whole(mesh)
    for make in (Clipped, Compiled):
        plain = Made()
        optimizer = Clipped(plain.trainable_params())
        for _ in range(3):
            optimizer(ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)[1])
        for how in ("dp", "fsdp"):
            net = spread(how, Made(), mesh)
            optimizer = make(net.trainable_params())
            for _ in range(3):
                grads = step(net, mine)[0][1]
                with counted() as count:
                    optimizer(grads)
                norms = {("all_reduce", F): 2} if how == "fsdp" else {}  # of `0 + ...`, and of the sum
                assert count == norms, (make, how, count)
            equal(net.trainable_params(), plain.trainable_params(), f"{make.__name__} {how}")
        plain_grads = tuple(g.to_local() for g in grads)  # shards, which no rule says of
        same_on_all_ranks(world, refusal(lambda o=optimizer, g=plain_grads: o(g), MixedOperandError))


@case(world_size=2)
def parameters_and_local_outputs_are_no_constants(world):
    mesh = mesh_of("tp")
    x = md.distribute_tensor(data(9, 8, 6), mesh)

    def weighted(of_it):
        return Built(lambda c, x: c.up(x) * (c.w * 2 if of_it else c.w), up=nn.Dense(6, 6),
                     w=Parameter(data(3, 6), name="w"))
    for of_it in (True, False):
        net = md.parallelize_module(weighted(of_it), mesh, {"up": md.ColwiseParallel(use_local_output=False)},
                                    constants="replicate")
        text = refusal(lambda net=net: md.value_and_grad(lambda t: net(t).mean(), None, net.trainable_params())(x),
                       MixedOperandError)
        same_on_all_ranks(world, text)
    net = md.parallelize_module(weighted(False), mesh, {"up": md.ColwiseParallel()}, constants="replicate")
    text = same_on_all_ranks(world, refusal(lambda: net(x), LayoutError))
    assert "hands out a plain tensor" in text and "use_local_output=False" in text, text
    assert "but got 'shard'" in refusal(lambda: md.parallelize_module(net, mesh, constants="shard"), ConfigError)
