# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's tests of tensor-parallel styles, plans and examples check; indexed in docs/parity_behaviours.md."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, RowwiseParallel, distribute_tensor, parallelize_module, value_and_grad
from ms_dtensor.errors import ConfigError
from tests.dist.cases_styles import Mlp, fill
from tests.dist.operands import Built, R, S, data, mesh_1d, placed
from tests.dist.support import TOLD, array, counted, equal, refusal, same_on_all_ranks, trains_as_one_device


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


class Sum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.linear = nn.Dense(8, 8)

    def construct(self, x, y=2, z=None):
        out = self.linear(x) + y
        return out if z is None else out + z


def several_inputs_and_slots_left_alone(world):
    for layouts, fits in ((S(0), False), ((S(0), None), True)):
        net = Sum()
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
    net = parallelize_module(Sum(), mesh_1d(), {"linear": ColwiseParallel(use_local_output=False)})
    parallelize_module(net, mesh_1d(), md.PrepareModuleInput(input_kwarg_layouts={"y": S(0)},
                                                          desired_input_kwarg_layouts={"y": R}))
    with counted({TOLD: 1, ("all_gather", "forward"): 1}):
        out = net(data(1, 4, 8), y=ops.ones((1, 8)))
    assert out.shape == (4, 8)
    net = parallelize_module(Sum(), mesh_1d(), {"linear": ColwiseParallel(use_local_output=False)})
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
