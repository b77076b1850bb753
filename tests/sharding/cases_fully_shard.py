# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` against one device: whatever a cell is, and whatever happens to it in a step."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from mindspore.nn.utils import no_init_parameters

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, fully_shard, init_device_mesh, optim, replicate, value_and_grad
from ms_dtensor.errors import ConfigError, LayoutError, MeshError
from ms_dtensor.parallel.sharding.call import units_of
from ms_dtensor.parallel.sharding.unit import State
from tests.cases import case
from tests.operands import Built, S, data, filled
from tests.support import counted, equal, of_plain, refusal, refused_alike

ROWS = np.random.default_rng(7).normal(size=(8, 5)).astype(np.float32)


def block(d: int, h: int) -> nn.Cell:
    return Built(lambda c, x: x + c.down(mint.tanh(c.up(c.norm(x)))), norm=nn.LayerNorm((d,)), up=nn.Dense(d, h),
                 down=nn.Dense(h, d))


class Net(nn.Cell):
    """Blocks between two projections of their own; widths that 4 ranks cut unevenly, one of them into an empty shard."""

    def __init__(self, order=(0, 1, 2)) -> None:
        super().__init__()
        self.order = order
        self.inner = nn.Dense(5, 6)
        self.blocks = nn.CellList([block(6, 10) for _ in range(3)])
        self.head = nn.Dense(6, 3)

    def construct(self, x):
        x = self.inner(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


def cut_up(net, mesh, **how):
    """The blocks, then the rest."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(net, mesh=mesh, **how)


def mine(mesh, rows=ROWS):
    """This rank's rows of the batch."""
    at = mesh.get_group().rank_index
    return Tensor(np.array_split(rows, mesh.size())[at])


def loss_of(net):
    return lambda x: (net(x) ** 2).mean()


ASKED = ("all_gather_object", "forward")  # the rows of the batch, told at every call


def same_step(net, plain, mesh, loss=loss_of, rtol: float = 2e-5):
    """Loss and gradients of a step; returns what it communicated, beside what is `ASKED`."""
    want = of_plain(plain, ROWS, loss, lambda: ms.value_and_grad(loss(plain), None, plain.trainable_params())(Tensor(ROWS)))
    with counted() as count:
        got = value_and_grad(loss(net), None, net.trainable_params())(mine(mesh))
    equal(got[0], want[0], "loss", rtol)
    for p, g, w in zip(net.trainable_params(), got[1], want[1], strict=True):
        assert g.placements == p.placements, (p.name, g, p)
        equal(g, w, p.name, rtol)
    count.pop(ASKED, None)
    return count


def fsdp(n: int = 4):
    return init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))


def both(**how):
    """All ranks, the model cut up over them, and the model of one device."""
    mesh = fsdp()
    return mesh, cut_up(filled(Net()), mesh, **how), filled(Net())


def one_collective_a_unit_and_direction(world):
    mesh, net, plain = both()
    assert "Parameter 'blocks.0.up.weight', f32[10@dp, 6]" in repr(net.blocks[0].up.weight)
    for _ in range(2):
        count = same_step(net, plain, mesh)
        assert count == {("all_gather", "forward"): 4, ("all_gather", "backward"): 3, ("reduce_scatter", "backward"): 4}, count
    kept = cut_up(filled(Net()), mesh, reshard_after_forward=False)
    count = same_step(kept, plain, mesh)
    assert count == {("all_gather", "forward"): 4, ("reduce_scatter", "backward"): 4}, count


def the_optimizer_divided(world):
    mesh, plain = fsdp(), filled(Net())
    net = replicate(filled(Net()), mesh=mesh, zero1=True)
    for _ in range(2):
        count = same_step(net, plain, mesh)
        assert count == {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1}, count
    one, many = optim.AdamW(plain.trainable_params(), 0.01), optim.AdamW(net.trainable_params(), 0.01)
    for p in net.trainable_params():
        state = many.state_dict()[p.name]
        assert state["exp_avg"].layout is p.layout and state["exp_avg"].local_shape == p.local_shape, (p, state)
    one(ms.value_and_grad(loss_of(plain), None, plain.trainable_params())(Tensor(ROWS))[1])
    many(value_and_grad(loss_of(net), None, net.trainable_params())(mine(mesh))[1])
    equal(net.trainable_params(), plain.trainable_params())


def product() -> nn.Cell:
    """A product, whose gradient can be differentiated again."""
    return filled(Built(lambda c, x: mint.matmul(x, c.a), a=Parameter(Tensor(np.zeros((5, 6), np.float32)), name="a")))


def parameters_in_two_places(world):
    def shared():
        net = Built(lambda c, x: c.two(c.block(c.one(x))), one=nn.Dense(5, 5), block=block(5, 7), two=nn.Dense(5, 5))
        net.two.weight = net.one.weight
        return filled(net)
    mesh, plain, net = fsdp(), shared(), shared()
    fully_shard(net.block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert net.one.weight is net.two.weight
    same_step(net, plain, mesh)
    across = shared()  # the tie leaves one unit
    fully_shard(across.one, mesh=mesh)
    fully_shard(across, mesh=mesh)
    assert across.one.weight is across.two.weight
    same_step(across, plain, mesh)


def frozen_then_trained(world):
    mesh, net, plain = both()
    for freeze in (True, False):
        for n in (plain, net):
            for p in (*n.blocks[1].get_parameters(), n.head.weight):
                p.requires_grad = not freeze
        count = same_step(net, plain, mesh)
        assert count["reduce_scatter", "backward"] == (3 if freeze else 4), count
    only = value_and_grad(loss_of(net), None, [net.blocks[2].up.weight])(mine(mesh))[1]
    want = ms.value_and_grad(loss_of(plain), None, [plain.blocks[2].up.weight])(Tensor(ROWS))[1]
    equal(only[0], want[0])


def blocks_run_again_in_the_backward(world):
    for when in ("before", "after"):
        mesh, plain = fsdp(), filled(Net())
        net = filled(Net())
        if when == "before":
            for block in net.blocks:
                block.recompute()
        cut_up(net, mesh)
        if when == "after":
            md.checkpoint_wrapper(net.blocks)
        for _ in range(2):
            count = same_step(net, plain, mesh)
            assert count == {("all_gather", "forward"): 4, ("all_gather", "backward"): 3,
                             ("reduce_scatter", "backward"): 4}, (when, count)


def cells_called_twice_in_another_order_or_not_at_all(world):
    mesh, net, plain = both()
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0, 1), (0, 2), (), (0, 1, 2)):
        plain.order = net.order = order
        same_step(net, plain, mesh)
        assert not any(unit.state is State.GATHERING for unit in units_of(net)), order  # ahead, for one that did not run


def without_gradients_all_is_given_back(world):
    mesh, net, plain = both()
    for _ in range(2):
        with counted() as count:
            equal(net(mine(mesh)), plain(Tensor(ROWS)))
        assert count["all_gather", "forward"] == 5, count  # one is `equal`'s
    for block in net.blocks:
        block.unshard()
    with counted() as count:
        net(mine(mesh))
        net(mine(mesh))
    assert count["all_gather", "forward"] == 2, count
    for block in net.blocks:
        block.reshard()
    p = net.blocks[0].up.weight
    p.set_data(p * 2)
    q = plain.blocks[0].up.weight
    q.set_data(q * 2)
    equal(net(mine(mesh)), plain(Tensor(ROWS)))
    same_step(net, plain, mesh)


def other_dims_and_parameters_left_alone(world):
    mesh, plain, net = fsdp(), filled(Net()), filled(Net())
    replicate(net.head, mesh=mesh)
    left = net.head.weight
    cut_up(net, mesh, shard_placement_fn=lambda p: S(p.ndim - 1), ignored_params=net.head.trainable_params())
    assert "f32[10, 6@dp]" in repr(net.blocks[0].up.weight) and net.head.weight is left
    same_step(net, plain, mesh)


def scalar() -> nn.Cell:
    return filled(Built(lambda c, x: x * c.scale, scale=Parameter(Tensor(2.0, ms.float32), name="scale")))


def a_model_that_never_was_whole(world):
    def make(mesh):
        np.random.seed(11)
        with no_init_parameters():
            net = Net()
        return cut_up(net, mesh)
    net, other = make(fsdp()), make(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "cut")))
    plain = Net()
    for p, q, r in zip(net.get_parameters(), other.get_parameters(), plain.get_parameters(), strict=True):
        whole = p.full_tensor()
        assert (whole.asnumpy() == q.full_tensor().asnumpy()).all(), p.name
        r.set_data(whole)
    assert np.std(plain.head.weight.asnumpy()) > 0.1
    same_step(net, plain, fsdp())


def outputs_in_tuples_lists_and_dicts(world):
    def tree(c, x):
        y = mint.tanh(c.a(x))
        return {"both": [y, c.b(y)], "weight": (c.b.weight,)}

    def outer(c, x):
        got = c.many(c.first(x))
        return mint.cat(got["both"], 1).sum(1) * (got["weight"][0] ** 2).sum()

    def made():
        return filled(Built(outer, first=nn.Dense(5, 6), many=Built(tree, a=nn.Dense(6, 6), b=nn.Dense(6, 4))))
    mesh, plain, net = fsdp(), made(), made()
    fully_shard(net.many, mesh=mesh)
    fully_shard(net, mesh=mesh)
    same_step(net, plain, mesh)


def hooks_see_reduced_gradients(world):
    mesh, net, plain = both()
    seen = []
    for n in (net, plain):
        n.blocks[0].up.weight.register_hook(lambda g: seen.append(g) or g * 3)
    same_step(net, plain, mesh)
    assert seen[0].shape == seen[1].shape and seen[1].placements == (S(0),) or seen[0].placements == (S(0),), seen


def refusals(world, grid):
    mesh = fsdp()
    net = cut_up(filled(Net()), mesh)

    cut = md.parallelize_module(nn.Dense(4, 8), grid["dp"], ColwiseParallel())
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    for kind, what, call in (
            (LayoutError, "was sharded already", lambda: fully_shard(net, mesh=mesh)),
            (LayoutError, "laid out over 'dp' already", lambda: fully_shard(cut, mesh=grid["dp"])),
            (LayoutError, "laid out over 'dp' already", lambda: replicate(net.head, mesh=mesh)),
            (LayoutError, "no such dim", lambda: fully_shard(nn.Dense(4, 4), mesh=mesh, shard_placement_fn=lambda p: S(2))),
            (ConfigError, "3 axes", lambda: fully_shard(nn.Dense(4, 4), mesh=three)),
            (MeshError, "no axis 'pp'", lambda: fully_shard(nn.Dense(4, 4), mesh=grid["pp"])),
            (ConfigError, "a number that divides the 4 ranks",
             lambda: fully_shard(nn.Dense(4, 4), mesh=mesh, reshard_after_forward="no")),
            (ConfigError, "= 3 is out of range", lambda: fully_shard(nn.Dense(4, 4), mesh=mesh, reshard_after_forward=3))):
        assert what in refused_alike(world, call, kind), what
    w = product()
    fully_shard(w, mesh=mesh)
    assert "derivative of a parameter's gradient" in refusal(lambda: value_and_grad(
        lambda x: (value_and_grad(loss_of(w), None, [w.a])(x)[1][0] ** 2).sum())(mine(mesh)))
    same_step(net, filled(Net()), mesh)


@case(2)
def a_sum_over_tp_is_made_after_stages_of_unlike_numbers_of_cells(world):
    stages = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    mesh = md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def wrapped(of):
        net = md.distribute_module(Built(lambda c, x: x * c.w.to_local(), w=ms.Parameter(data(1, 4), name="w")), of)
        return md.fully_shard(net, mesh=of["dp"], local_inputs=True)
    for _ in range(1 + world.rank):
        wrapped(stages["dp"])
    net, xs = wrapped(mesh), [data(5 + r, 3, 4) for r in range(2)]
    with md.recorded(net):
        md.backward(net(xs[world.rank]).sum())
    equal(net.w.grad, sum(x.asnumpy() for x in xs).sum(0))
