# SPDX-License-Identifier: Apache-2.0
"""Real ranks: whole cells become distributed: once, with all that parameters carry, deferred ones with eager values."""
import itertools
import warnings

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.common import initializer as ms_init
from mindspore.nn.utils import no_init_parameters

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, comm, distribute_module, distribute_tensor, parallelize_module, replicate
from ms_dtensor.errors import CollectiveMismatch, LayoutError, MixedOperandError
from tests.operands import R, S, data, filled, mesh_1d, mesh_2d, placed
from tests.support import array, counted, equal, refusal, refused_alike, same_on_all_ranks, trains_as_one_device


class Net(nn.Cell):
    """Layers with every kind of initialiser."""

    def __init__(self):
        super().__init__()
        self.own = Parameter(ms_init.initializer(ms_init.TruncatedNormal(0.5), (5, 7)), name="own")
        self.odd = Parameter(ms_init.initializer(ms_init.Orthogonal(), (6, 6)), name="odd")
        self.last = Parameter(ms_init.initializer("xavier_uniform", (4, 3), ms.float16), name="last", requires_grad=False)
        self.table = nn.Embedding(10, 6)
        self.first, self.second = nn.Dense(6, 9), mint.nn.Linear(9, 6)
        self.norm = nn.LayerNorm((6,))
        self.register_buffer("table_of_ones", ops.ones((6,), ms.float32))

    def construct(self, ids):
        h = self.norm(self.table(ids))
        return self.second(ops.relu(self.first(h))) + self.table_of_ones


def made(deferred: bool) -> Net:
    ms.set_seed(11)
    if not deferred:
        return Net()
    with no_init_parameters():
        net = Net()
    assert all(p.has_init for p in net.get_parameters())
    return net


def _same_values(net, wanted) -> None:
    for p, w in zip(net.get_parameters(), wanted.get_parameters(), strict=True):
        assert isinstance(p, DTensor) and p.name == w.name and p.requires_grad == w.requires_grad and not p.has_init
        assert tuple(p.to_local().shape) == p.layout.local_shape()
        np.testing.assert_array_equal(array(p), w.asnumpy(), err_msg=f"{p.name} {p.layout}")


# -- deferred initialisation ---------------------------------------------------------------------------------------------
def deferred_parameters_equal_the_eager_ones_bit_for_bit(world):
    eager = made(False)
    state = np.random.get_state()[1:3]
    for mesh, cut in ((mesh_1d(), [S(0)]), (mesh_1d(), [S(-1)]), (mesh_2d(), [S(0), S(0)]), (mesh_2d(), [R, S(0)])):
        net = made(True)

        def partition(name, cell, on, cut=cut):
            for key, p in list(cell._params.items())[::-1]:  # in whatever order: the values are the eager ones
                cell._params[key] = Parameter(distribute_tensor(p, on, cut), name=p.name, requires_grad=p.requires_grad)
        with counted() as count:
            distribute_module(net, mesh, partition)
        assert sum(count.values()) == 2, count  # the random state, and the buffer; no weight
        _same_values(net, eager)
        now = np.random.get_state()[1:3]
        assert np.array_equal(now[0], state[0]) and now[1] == state[1]  # NumPy's generator goes on as after the eager model


def deferred_parameters_under_styles_do_not_depend_on_the_plans_order(world):
    eager = made(False)
    for mesh in (mesh_1d(), mesh_2d()["tp"]):
        plan = {"first": ColwiseParallel(), "second": md.RowwiseParallel(), "norm": md.SequenceParallel(), "table": md.RowwiseParallel()}
        for names in (list(plan), list(plan)[::-1]):
            net = parallelize_module(made(True), mesh, {n: plan[n] for n in names})
            _same_values(distribute_module(net, mesh), eager)
    net = replicate(parallelize_module(made(True), mesh_2d()["tp"], {"first": ColwiseParallel()}), mesh=mesh_2d()["dp"])
    _same_values(net, eager)
    assert net.first.weight.placements == (R, S(0))


def whose_random_state_is_the_truth(world, line):
    np.random.seed(100 + world.rank)
    with no_init_parameters():
        net, other = nn.Dense(4, 8), nn.Dense(4, 8)
    parallelize_module(net, line, ColwiseParallel())
    np.random.seed(100)
    equal(net.weight, nn.Dense(4, 8).weight, "rank 0's")
    np.random.seed(100 + world.rank)
    with counted({}):
        parallelize_module(other, line, ColwiseParallel(), src_data_rank=None)
    np.random.seed(100 + world.rank)
    own = nn.Dense(4, 8).weight.asnumpy()
    np.testing.assert_array_equal(other.weight.to_local().asnumpy(), own[2 * world.rank:][:2], err_msg="its own")


def a_deferred_parameter_alone_and_empty_shards(world, line):
    ms.set_seed(3)
    wanted = [Parameter(ms_init.initializer(kind, (2, 3)), name="p") for kind in ("normal", "ones", "he_normal")]
    ms.set_seed(3)
    for kind, w in zip(("normal", "ones", "he_normal"), wanted):
        with no_init_parameters():
            p = Parameter(ms_init.initializer(kind, (2, 3)), name="p")
        out = distribute_tensor(p, line, [S(0)])
        assert out.local_shape == ((1, 3) if world.rank < 2 else (0, 3))
        equal(out, w, kind, rtol=0)


# -- distribute_module ---------------------------------------------------------------------------------------------------
def distribute_module_is_for_once(world, line):
    net = distribute_module(made(False), line)
    text = refused_alike(world, lambda: distribute_module(net, line), LayoutError)
    assert "distributed already" in text
    equal(net(distribute_tensor(Tensor(np.array([1, 2], np.int32)), line)), made(False).to_float(ms.float32)(
        Tensor(np.array([1, 2], np.int32))))
    inner = made(False)
    distribute_module(inner.first, line)  # a part first, then the whole
    distribute_module(inner, line)
    _same_values(inner, made(False))


def functions_of_two_arguments_are_called_with_a_warning(world, line):
    x = data(3, 8, 4)
    plain = nn.Dense(4, 4)
    net = nn.Dense(4, 4)
    for p, w in zip(net.get_parameters(), plain.get_parameters()):
        p.set_data(w)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        distribute_module(net, line, None, lambda inputs, on: distribute_tensor(inputs[0], on, [S(0)]),
                          lambda outputs, on: outputs.to_local())
    assert [w.category for w in seen] == [FutureWarning, FutureWarning], seen
    rank0 = distribute_tensor(plain.weight, line), distribute_tensor(plain.bias, line)
    want = ops.dense(x, Tensor(array(rank0[0])), Tensor(array(rank0[1])))
    out = net(distribute_tensor(x, line).to_local())
    assert type(out) is Tensor
    equal(out, want.asnumpy()[2 * world.rank:][:2])
    for wrong in (lambda: 0, lambda a: a, lambda a, b, c, d: a):
        assert "must take 3 arguments" in refusal(lambda: distribute_module(nn.Dense(2, 2), line, None, wrong), LayoutError)
    distribute_module(nn.Dense(2, 2), line, None, lambda *args: args[1])


def what_a_parameter_carries_stays_with_it(world, line):

    def build():
        net = nn.SequentialCell(nn.Dense(4, 8), nn.Dense(4, 8), nn.LayerNorm((8,)))
        net[1].weight = net[0].weight
        net[0].weight.requires_grad = False
        net[0].bias.layerwise_parallel = True
        net[0].bias.parallel_optimizer = False
        net[0].bias.mine = "kept"
        net.register_buffer("steps", Tensor(np.array([world.rank, 7], np.int32)))
        return net
    for how in (lambda m: distribute_module(m, line),
                lambda m: distribute_module(parallelize_module(m, line, {"[01]": ColwiseParallel()}), line),
                lambda m: replicate(parallelize_module(m, mesh_2d()["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()}),
                                    mesh=mesh_2d()["dp"])):
        names = [p.name for p in build().get_parameters()]
        net = how(build())
        assert [p.name for p in net.get_parameters()] == names == list(net.parameters_dict())
        assert net[0].weight is net[1].weight and not net[0].weight.requires_grad and net[0].bias.requires_grad
        assert net[0].bias.layerwise_parallel is True and net[0].bias.parallel_optimizer is False
        assert net[0].bias.mine == "kept" and net[0].bias.param_info.obj is net[0].bias
        assert [p.name for p in net.trainable_params()] == [n for n in names if n != "0.weight"]
        assert isinstance(net.steps, DTensor) and array(net.steps).tolist() == [0, 7]
        assert all(isinstance(p, DTensor) for p in net.get_parameters())


def only_leaves_are_distributed(world, line):
    x = data(1, 4, 4)
    w = Parameter(data(2, 4, 4), name="w")
    text = refused_alike(
        world, lambda: md.value_and_grad(lambda t: distribute_tensor(t * 2, line, [S(0)]).sum(), 0)(x), LayoutError)
    assert "under differentiation" in text and "from_local" in text, text
    # what is merely used inside is not in the way
    g = md.value_and_grad(lambda p: (p * distribute_tensor(x, line, [S(0)])).sum(), 0)(distribute_tensor(w, line, [S(0)]))[1]
    equal(g, x)
    value, grad = md.value_and_grad(lambda t: (DTensor.from_local(t * 2, line, [R]) * 3.0).sum(), 0)(x)
    equal(grad, np.full((4, 4), 6, np.float32))


def a_parameters_data_is_replaced_in_its_own_layout(world, line):
    p = Parameter(distribute_tensor(data(1, 8, 3), line, [S(0)]), name="p")
    for source in (distribute_tensor(data(2, 8, 3), line, [S(0)]), distribute_tensor(data(2, 8, 3), line, [R]),
                   distribute_tensor(data(2, 8, 3), mesh_2d(), [S(1), S(0)]),
                   Tensor(np.ascontiguousarray(data(2, 8, 3).asnumpy()[2 * world.rank:][:2]))):
        p.set_data(distribute_tensor(data(1, 8, 3), line, [S(0)]))
        assert p.set_data(source) is p and p.placements == (S(0),) and p.local_shape == (2, 3) and tuple(p._shape) == (2, 3)
        equal(p, data(2, 8, 3))
    wrong = data(2, 8, 3), distribute_tensor(data(2, 4, 3), line)  # a whole plain tensor would pass for the shard
    for write, value in itertools.product((p.set_data, p.assign_value), wrong):
        refused_alike(world, lambda: write(value), LayoutError)
    equal(p, data(2, 8, 3))


# -- what belongs to one tensor, and not to the role it plays -----------------------------------------------------------
def the_views_of_a_replaced_parameter_do_not_guard_the_new_one(world, grid):
    ms.set_seed(6)  # else ranks of dp begin with different weights, and one is not compared with its own
    net = parallelize_module(nn.SequentialCell(nn.Dense(5, 6)), grid["tp"], {"0": ColwiseParallel()})
    old = net[0].weight
    old.note = "the user's"
    kept, wanted = old[:, 0:2], array(old).copy()
    weight = replicate(net, mesh=grid["dp"])[0].weight
    assert weight is not old and weight.note == old.note
    weight[0] = 1.0
    equal(kept, wanted[:, 0:2], "the old weight's view")
    wanted[0] = 1.0
    equal(weight, wanted, "the new weight")
    column = weight[:, 0:2]
    weight.view(30)  # gathers: a copy here, a view on one device, but gone
    weight[1] = 2.0
    wanted[1] = 2.0
    equal(weight, wanted, "written through")
    equal(column, wanted[:, 0:2], "the new weight's view")


def a_replaced_parameters_gradient_is_not_left_to_the_old_ones_bucket(world, grid):
    ms.set_seed(6)
    plain, net = nn.Dense(4, 3), nn.Dense(4, 3)
    for mine, theirs in zip(net.get_parameters(), plain.get_parameters(), strict=True):
        mine.set_data(Tensor(theirs.asnumpy().copy()))
    replicate(replicate(net, mesh=grid["dp"]), mesh=grid["tp"], bucket_mb=0)
    x = data(7, 8, 4)
    trains_as_one_device(net, plain, x, distribute_tensor(x, grid, [S(0), S(0)]))


# -- what a checkpoint planner asks --------------------------------------------------------------------------------------
def chunks_tile_the_tensor_and_each_has_one_owner(world):
    from ms_dtensor import DeviceMesh
    for mesh, placements, shape in ((mesh_2d(), [S(0), R], (5, 3)), (mesh_2d(), [S(0), S(0)], (7, 2)), (mesh_2d(), [R, R], (2, 2)),
                                    (mesh_1d(), [S(1)], (2, 3)), (DeviceMesh("cpu", [1, 3]), [S(0)], (4, 2))):
        x = placed(data(1, *shape), mesh, *placements)
        chunks, items = x.__create_chunk_list__(), x.__create_write_items__("w", x)
        assert [i.chunk for i in items] == chunks and all((i.name, i.shape, i.dtype) == ("w", shape, "float32") for i in items)
        for chunk in chunks:
            np.testing.assert_array_equal(x.__get_tensor_shard__(chunk).asnumpy(), x.to_local().asnumpy())
            np.testing.assert_array_equal(x.__get_tensor_shard__(chunk.offsets).asnumpy(), x.to_local().asnumpy())
        owned = [(tuple(i.chunk), x.__get_tensor_shard__(i.chunk).asnumpy()) for i in items if i.owner]
        whole = np.full(shape, np.nan, np.float32)
        for (at, size), values in sum(comm.group(tuple(range(world.size))).all_gather_object(owned), []):
            box = tuple(slice(a, a + n) for a, n in zip(at, size))
            assert np.isnan(whole[box]).all(), "two owners"
            whole[box] = values
        np.testing.assert_array_equal(whole, data(1, *shape).asnumpy())


def batches_of_any_number_of_rows_follow_each_other(world):
    """Of 7 rows after 8, or of 5 after 6, some ranks bring as many as before: all are told nevertheless."""
    plain = filled(nn.SequentialCell(nn.Dense(6, 5), nn.Tanh(), nn.Dense(5, 3)))
    for wrap in (replicate, md.fully_shard):
        net = wrap(filled(nn.SequentialCell(nn.Dense(6, 5), nn.Tanh(), nn.Dense(5, 3))), mesh=mesh_1d())
        for step, n in enumerate((8, 7, 8, 6, 5, 8, 2)):
            x, each = data(step, n, 6), -(-n // 4)
            with counted() as count:
                got = md.value_and_grad(lambda t, net=net: (net(t) ** 2).mean(), None, net.trainable_params())(
                    Tensor(x.asnumpy()[each * world.rank:each * (world.rank + 1)]))
            want = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
            assert count["all_gather_object", "forward"] == 1, count
            equal(got, want, f"{wrap.__name__} {n}")
        text = refusal(lambda net=net: net(data(1, 3 if world.rank == 1 else 2, 6)), LayoutError)
        assert "rank 1 brings [3, 6]" in text
        same_on_all_ranks(world, text)


class Tables(nn.Cell):
    """Reads its weights from a tuple, a child's among them, and a constant."""

    def __init__(self, buffer=True):
        super().__init__()
        self.dense = nn.Dense(3, 3)
        self.weights = ParameterTuple([Parameter(data(i, 3, 3), name=f"w{i}") for i in (1, 2)])
        self.all = ParameterTuple([self.dense.weight, *self.weights])
        self.dense.weight.set_data(data(3, 3, 3))
        self.dense.bias.set_data(data(5, 3))
        if buffer:
            self.register_buffer("scale", data(4, 3))
        else:
            self.scale = data(4, 3)

    def construct(self, x):
        for w in self.weights:
            x = mint.tanh(mint.matmul(x, w))
        return self.dense(x) * self.scale + sum(w.sum() for w in self.all)


def weights_in_a_tuple_and_buffers_are_distributed(world):
    x = data(9, 8, 3)
    for what in ("replicate", "distribute_module"):
        plain = Tables()
        wanted = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
        net, mesh = Tables(), mesh_1d(name="dp")
        net = replicate(net, mesh=mesh) if what == "replicate" else distribute_module(net, mesh)
        assert all(isinstance(w, DTensor) for w in (*net.all, net.scale)) and isinstance(net.all, ParameterTuple), what
        assert net.all[0] is net.dense.weight, what
        got = ms.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(placed(x, mesh, S(0)))
        equal(got, wanted, what)
    net = replicate(Tables(buffer=False), mesh=mesh_1d(name="dp"))
    text = refusal(lambda: net(placed(x, mesh_1d(name="dp"), S(0))), MixedOperandError)
    assert "self.register_buffer(name, t)" in text, text


def cells_laid_out_in_another_order(world):
    """Equal shapes, so nothing else tells that one rank's second cell would get the first values of the other's first."""
    for apply in (lambda c: md.fully_shard(c, mesh=mesh_1d()), lambda c: md.replicate(c, mesh=mesh_1d())):
        cells = nn.CellList([nn.Dense(16, 16, has_bias=False) for _ in range(2)])
        refusal(lambda: apply(cells[world.rank == 2]), CollectiveMismatch)
