# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of redistribution, local_map and register_sharding check; indexed in docs/parity_behaviours.md."""
import itertools

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import (
    ColwiseParallel,
    DTensor,
    Partial,
    RowwiseParallel,
    distribute_tensor,
    local_map,
    parallelize_module,
    value_and_grad,
)
from ms_dtensor.errors import ConfigError, RedistributeError
from tests.operands import Built, P, R, S, data, mesh_1d, mesh_2d, placed
from tests.parallel.cases_styles import Mlp, fill
from tests.support import TOLD, array, counted, equal, refusal, same_on_all_ranks, trains_as_one_device

SIZES = [((12, 3), 0), ((13, 3), 0), ((14, 3), 0), ((3, 12), 1), ((3, 13), 1), ((3, 14), 1)]


def _moved(x, dst, weight):
    """(result, gradient, counts forward, counts backward) of `x.redistribute(dst)` in a weighted sum."""
    held = []

    def f(t):
        held.append(t.redistribute(placements=dst))
        return (held[-1] * weight).sum()
    with counted() as count:
        grad = value_and_grad(f, 0)(x)[1]
    forward = {op: n for (op, phase), n in count.items() if phase == "forward"}
    return held[-1], grad, forward, {op: n for (op, phase), n in count.items() if phase == "backward"}


def _weight(shape, placements):
    return placed(data(9, *shape), mesh_1d(), *placements)


# -- redistribution ----------------------------------------------------------------------------------------------------------
def each_move_is_one_collective_and_its_transpose_another(world):
    moves = ((S, R, "all_gather", None), (R, R, None, None), (R, S, None, "all_gather"), (P, R, "all_reduce", None),
             (P, S, "reduce_scatter", "all_gather"))
    for (shape, dim), (src, dst, *ops_) in itertools.product(SIZES, moves):
        src, dst = (p(dim) if p is S else p for p in (src, dst))
        x = DTensor.from_local(data(1, *shape) * float(world.rank + 1), mesh_1d(), [P]) if src == P else placed(
            data(1, *shape), mesh_1d(), src)
        out, grad, *counts = _moved(x, [dst], _weight(shape, [dst]))
        assert counts == [{op: 1} if op else {} for op in ops_], (shape, src, dst, counts)
        assert out.placements == (dst,) and grad.placements == (R if src == P else src,), (out, grad)
        equal(out, data(1, *shape) * (10.0 if src == P else 1.0))
        equal(grad, data(9, *shape))


def partial_to_partial_is_free_both_ways(world):
    x = DTensor.from_local(data(1, 12, 3) * float(world.rank + 1), mesh_1d(), [P])
    with counted() as count:
        grad = value_and_grad(lambda t: t.redistribute(placements=[P]).sum(), 0)(x)[1]
    assert not count and grad.placements == (R,)  # the cotangent of a sum's summands is whole
    equal(grad.to_local(), np.ones((12, 3), np.float32))


def dtypes_change_around_a_move(world):
    """PyTorch's forward_dtype and backward_dtype are casts here: each side of the move in the dtype that is wanted."""
    for shape, dim in SIZES:
        x = placed(data(1, *shape), mesh_1d(), S(dim))
        with counted({("all_gather", "forward"): 1}):
            out = x.astype(ms.float16).redistribute(placements=[R])
        assert out.dtype == ms.float16
        equal(out, data(1, *shape).astype(ms.float16), rtol=0)
        grad = value_and_grad(lambda t: t.astype(ms.float16).redistribute(placements=[R]).astype(ms.float32).sum(), 0)(x)[1]
        assert grad.dtype == ms.float32 and grad.placements == (S(dim),)
        equal(grad, np.ones(shape, np.float32))


def which_layouts_may_become_partial(world):
    t = data(1, 12, 8)
    for src, dst, allowed in (([P, S(0)], [P, S(0)], True), ([P, S(0)], [P, S(1)], True), ([S(0), P], [R, P], True),
                              ([S(0), Partial("prod")], [R, Partial("prod")], True), ([S(0), R], [S(0), P], False),
                              ([S(0), R], [R, P], False), ([S(0), S(1)], [R, P], False),
                              ([S(0), Partial("prod")], [R, P], False)):
        x = DTensor.from_local(t, mesh_2d(), src)
        try:
            assert x.redistribute(placements=dst).placements == tuple(dst) and allowed, (src, dst)
        except RedistributeError:
            assert not allowed, (src, dst)


def an_axis_of_one_rank_needs_no_communication(world):
    mesh = md.init_device_mesh("cpu", (4, 1))
    for src, dst in itertools.product((S(1), R, P), (S(0), S(1), R)):
        x = DTensor.from_local(data(1, 16, 8), mesh, [S(0), src])
        with counted({}):
            out = x.redistribute(placements=[S(0), dst])
        assert out.placements == (S(0), dst)


def complex_numbers_move_too(world):
    whole = (data(1, 13, 3).asnumpy() + 1j * data(2, 13, 3).asnumpy()).astype(np.complex64)
    x = placed(Tensor(whole), mesh_1d(), S(0))
    np.testing.assert_array_equal(x.redistribute(placements=[R]).to_local().asnumpy(), whole)
    np.testing.assert_array_equal(x.redistribute(placements=[S(1)]).full_tensor().asnumpy(), whole)


# -- local_map -----------------------------------------------------------------------------------------------------------
X, W = data(1, 16, 8), data(2, 8, 12)


def _reduced(mesh, a, b):
    return mesh.get_group().all_reduce(mint.matmul(a, b), "sum")


def _lying(placements_x, placements_w):
    return (placed(X, mesh_1d(), *placements_x), placed(W, mesh_1d(), *placements_w))


def a_local_product_with_its_own_all_reduce(world):
    x, w = _lying([S(1)], [S(0)])
    for fn in (local_map(_reduced, [R], (None, [S(1)], [S(0)]), device_mesh=mesh_1d()),
               local_map(out_placements=[R], in_placements=(None, [S(1)], [S(0)]))(_reduced)):
        with counted() as count:
            out = fn(mesh_1d(), x, w)
        assert sum(count.values()) == 1 and out.placements == (R,)
        equal(out, mint.matmul(X, W))


def out_placements_of_none_leave_results_plain(world):
    def alike(mesh, a, b):
        return all(mesh.get_group().all_gather_object(bool((a.asnumpy() == b.asnumpy()).all())))
    x = placed(X, mesh_1d(), S(0))
    assert local_map(alike, None)(mesh_1d(), x, x) is True and local_map(alike, None)(mesh_1d(), x, x * 2) is False


def in_placements_given_or_taken_as_they_lie(world):
    x, w = _lying([S(0)], [R])
    for fn in (local_map(mint.matmul, [S(0)], ([S(0)], [R]), device_mesh=mesh_1d()), local_map(mint.matmul, [S(0)])):
        with counted({}):
            out = fn(x, w)
        assert out.placements == (S(0),)
        equal(out, mint.matmul(X, W))


# -- register_sharding -------------------------------------------------------------------------------------------------------
def a_sharding_for_an_op_with_non_tensor_arguments_in_any_place(world):
    from ms_dtensor import register_rule
    with register_rule("named_copy", "S(0) -> S(0)") as rule:
        @rule
        def named_copy(name, x):
            assert name == "test"
            return x * 1
        x = placed(data(1, 4, 4), mesh_1d(), R)
        out = named_copy("test", x)
        assert isinstance(out, DTensor)
        equal(out, data(1, 4, 4))


def a_sharding_for_tensors_passed_by_keyword(world):
    from ms_dtensor import register_rule
    with register_rule("keyed", "S(0), S(0) -> S(0), S(0)") as rule:
        keyed = rule(lambda a, *, b: (a + b, a * b))
        x, y = (placed(data(i, 8, 4), mesh_1d(), S(0)) for i in (1, 2))
        total, product = keyed(x, b=y)
        assert total.placements == product.placements == (S(0),)
        equal(total, data(1, 8, 4) + data(2, 8, 4))
        equal(product, data(1, 8, 4) * data(2, 8, 4))


def _step(cell, *inputs):
    """(result, communication forward, communication backward) of one step that differentiates the first input too."""
    with counted() as count:
        out = cell(*inputs)
    forward = {op: n for (op, _), n in count.items()}
    with counted() as count:
        value_and_grad(lambda *xs: cell(*xs).sum(), 0, cell.trainable_params())(*inputs)
    return out, forward, {op: n for (op, phase), n in count.items() if phase == "backward"}


# -- styles --------------------------------------------------------------------------------------------------------------
def each_style_has_its_collectives_and_their_transposes(world):
    """A bias behind rows is added once, on one rank: one more sum of 16 numbers in the backward."""
    told, wide, narrow = {TOLD[0]: 1}, 16, 4
    for style, bias, width, shape, there, back in (
            (ColwiseParallel(), True, wide, (8, 4), {}, {"all_reduce": 1}),
            (ColwiseParallel(input_layouts=S(0)), True, wide, (32, 4), told | {"all_gather": 1}, {"reduce_scatter": 1}),
            (RowwiseParallel(), False, narrow, (8, 16), told | {"all_reduce": 1}, {}),
            (RowwiseParallel(), True, narrow, (8, 16), told | {"all_reduce": 1}, {"all_reduce": 1}),
            (RowwiseParallel(output_layouts=S(0)), False, narrow, (2, 16), told | {"reduce_scatter": 1}, {"all_gather": 1}),
            (RowwiseParallel(output_layouts=S(0)), True, narrow, (2, 16), told | {"reduce_scatter": 1},
             {"all_gather": 1, "all_reduce": 1})):
        out, forward, backward = _step(parallelize_module(nn.Dense(16, 16, has_bias=bias), mesh_1d(), style),
                                       data(1, 8, width))  # a tensor of its own: of one, extents are told once
        assert (out.shape, forward, backward) == (shape, there, back), (style, bias, out.shape, forward, backward)


def added() -> nn.Cell:
    return Built(lambda c, x, y=2, z=None: c.linear(x) + y + (0 if z is None else z), linear=nn.Dense(8, 8))


def several_inputs_and_slots_left_alone(world):
    for layouts, fits in ((S(0), False), ((S(0), None), True)):
        net = added()
        desired = R if layouts == S(0) else (R, None)
        parallelize_module(net, mesh_1d(), {"linear": ColwiseParallel()})
        parallelize_module(net, mesh_1d(), md.PrepareModuleInput(input_layouts=layouts, desired_input_layouts=desired))
        try:
            out = net(data(1, 2, 8), ops.ones((8, 2)))
        except ConfigError as e:
            assert not fits
            same_on_all_ranks(world, str(e))
        else:
            assert fits and out.shape == (8, 2)


def keyword_inputs_are_prepared(world):
    net = parallelize_module(added(), mesh_1d(), {"linear": ColwiseParallel(use_local_output=False)})
    parallelize_module(net, mesh_1d(), md.PrepareModuleInput(input_kwarg_layouts={"y": S(0)},
                                                          desired_input_kwarg_layouts={"y": R}))
    with counted({TOLD: 1, ("all_gather", "forward"): 1}):
        out = net(data(1, 4, 8), y=ops.ones((1, 8)))
    assert out.shape == (4, 8)
    net = parallelize_module(added(), mesh_1d(), {"linear": ColwiseParallel(use_local_output=False)})
    parallelize_module(net, mesh_1d(), md.PrepareModuleInput(
        input_kwarg_layouts={"x": S(0), "z": S(0)}, desired_input_kwarg_layouts={"x": R, "z": R}))
    for x in (data(world.rank, 1, 8), DTensor.from_local(data(world.rank, 1, 8), mesh_1d(), [S(0)])):
        with counted() as count:
            out = net(x=x, z=ops.ones((1, 8)))
        count.pop(TOLD, None)
        assert sum(count.values()) == 2 and out.shape == (4, 8), count


def rms(n):
    return Built(lambda c, x: x * mint.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * c.weight,
                weight=ms.Parameter(data(3, n), name="weight"))


def sequence_parallel_dropout_keeps_the_cut(world):
    cell = parallelize_module(nn.Dropout(p=0.5), mesh_1d(), md.SequenceParallel())
    cell.set_train()
    x = placed(ops.ones((3, 8, 12)), mesh_1d(), S(1))
    cell(x)  # at a mesh's first random op ranks compare their seeds
    with counted({}):
        out = cell(x)
    assert out.placements == (S(1),)
    assert set(np.unique(array(out))) == {0.0, 2.0}


def sequence_parallel_brings_another_cut_to_the_sequence(world):
    cell = parallelize_module(rms(12), mesh_1d(), md.SequenceParallel())
    x = placed(data(1, 4, 8, 12), mesh_1d(), S(0))
    with counted({("all_to_all", "forward"): 1}):
        out = cell(x)
    assert out.placements == (S(1),)
    equal(out, rms(12)(data(1, 4, 8, 12)))


# -- plans -----------------------------------------------------------------------------------------------------------------
def a_plan_for_nested_cells(world):
    x = data(1, 12, 12)
    net = fill(nn.SequentialCell(Mlp("nn"), Mlp("nn")))
    parallelize_module(net, mesh_1d(), {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    trains_as_one_device(net, fill(nn.SequentialCell(Mlp("nn"), Mlp("nn"))), x, x)


def patterns_have_wildcards_per_level(world):
    for pattern in ("*.up", "[01].up", "?.u?"):
        net = parallelize_module(nn.SequentialCell(Mlp("nn"), Mlp("nn")), mesh_1d(), {pattern: ColwiseParallel()})
        assert net[0].up.weight.placements == net[1].up.weight.placements == (S(0),)
        assert not isinstance(net[0].down.weight, DTensor)
    assert "did you mean 'up'" in refusal(lambda: parallelize_module(Mlp("nn"), mesh_1d(), {"upp": ColwiseParallel()}), ConfigError)
    for pattern in ("up", "*.*.up", "2.up"):
        assert "matches no cell" in refusal(lambda: parallelize_module(nn.SequentialCell(Mlp("nn")), mesh_1d(), {pattern: ColwiseParallel()}), ConfigError)


def no_plan_changes_nothing_and_warns(world):
    import warnings
    net = Mlp("nn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert parallelize_module(net, mesh_1d()) is net
    assert len(seen) == 1 and "no plan" in str(seen[0].message)
    assert not any(isinstance(p, DTensor) for p in net.get_parameters())


class Tied(nn.Cell):
    def __init__(self, tied):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(16, 8), nn.Dense(8, 16, has_bias=False)
        self.embedding.embedding_table.set_data(data(1, 16, 8))
        self.fc.weight.set_data(data(2, 16, 8))
        if tied:
            self.fc.weight = self.embedding.embedding_table

    def construct(self, ids):
        return self.fc(self.embedding(ids))


def tied_weights_stay_tied_and_get_both_gradients(world):
    ids = Tensor(np.array([3, 0, 15, 7, 3], np.int32))
    for tied in (False, True):
        plain, net = Tied(tied), Tied(tied)
        parallelize_module(net, mesh_1d(), {"embedding": RowwiseParallel(input_layouts=R, use_local_output=False),
                                            "fc": ColwiseParallel(use_local_output=False)})
        assert (net.fc.weight is net.embedding.embedding_table) == tied
        trains_as_one_device(net, plain, ids, distribute_tensor(ids, mesh_1d(), src_data_rank=None))
    late = Tied(False)
    parallelize_module(late, mesh_1d(), {"embedding": RowwiseParallel(input_layouts=R, use_local_output=False)})
    late.fc.weight = late.embedding.embedding_table  # tied after the styles
    assert late.fc.weight is late.embedding.embedding_table
    equal(late(distribute_tensor(ids, mesh_1d(), src_data_rank=None)), Tied(False).embedding(ids) @ data(1, 16, 8).T)
