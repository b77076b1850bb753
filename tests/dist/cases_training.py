# SPDX-License-Identifier: Apache-2.0
"""What stands around a training step, where it communicates and where it refuses; values are `tests/surface`'s."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn
from mindspore.common.api import _pynative_executor
from mindspore.train import MAE, Metric

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, distribute_module, parallelize_module, redistribution_policy, replicate
from ms_dtensor.errors import ConfigError, ImplicitCommError, MixedOperandError
from tests.dist.cases_surface import placed
from tests.dist.operands import R, S, data, mesh_1d
from tests.dist.support import array, counted, equal, refusal
from tests.tiers import sampled


def labels_of_a_replicated_loss(world, grid):
    rows = slice(4 * grid.get_coordinate()[0], 4 * grid.get_coordinate()[0] + 4)
    out, y = data(1, 8, 6), data(2, 8, 6)
    logits, mine = placed(out, grid, S(0), S(1)), Tensor(array(y)[rows])
    message = refusal(lambda: nn.MSELoss()(logits, mine), MixedOperandError)
    assert "DTensor.from_local" in message and "replicate(loss_fn" in message
    loss = replicate(nn.MSELoss(), mesh=grid["dp"])
    with counted() as count:
        got = loss(logits, mine)
    assert count == {("all_gather_object", "forward"): 1}, count  # how many rows each rank brings
    equal(got, nn.MSELoss()(out, y))
    metric = MAE()
    with counted() as count:
        metric.update(logits, mine)  # laid out when the loss took it
    assert {op for op, _ in count} == {"all_gather"}, count
    np.testing.assert_allclose(metric.eval(), np.abs(array(out) - array(y)).sum() / 8, rtol=1e-6)


class _Last(Metric):
    def clear(self):
        self.seen = None

    def update(self, *inputs):
        self.seen = self._convert_data(inputs[0])

    def eval(self):
        return self.seen


def metrics_refuse_what_they_cannot_know(world):
    x, plain = placed(data(1, 8, 3), mesh_1d(), S(0)), data(2, 2, 3)
    with counted({}):
        message = refusal(lambda: MAE().update(x, plain), MixedOperandError)
        assert "MAE.update" in message and "replicate(loss_fn" in message
        with redistribution_policy("explicit"):
            assert "MAE.update" in refusal(lambda: MAE().update(x, x), ImplicitCommError)
    with md.implicit_replication():
        metric = MAE()
        metric.update(x, data(1, 8, 3))
    assert metric.eval() == 0
    own = _Last()
    own.update(x)
    np.testing.assert_array_equal(own.eval(), array(data(1, 8, 3)))


def a_scalars_array_is_its_value(world):
    x = data(1, 8, 3)
    total = placed(x, mesh_1d(), S(0)).sum()
    assert total.placements[0].is_partial()
    np.testing.assert_allclose(total.asnumpy(), array(x).sum(), rtol=1e-5)
    assert total.asnumpy().shape == () and total.asnumpy().dtype == np.float32
    with redistribution_policy("explicit"):
        assert "For 'asnumpy'" in refusal(total.asnumpy, ImplicitCommError)


def a_parameter_of_no_dims_counts_as_a_number_outside_gradients(world):
    x, scale = data(1, 8, 3), Parameter(Tensor(3.0, ms.float32), name="scale")
    dx = placed(x, mesh_1d(), S(0))
    for _ in range(2):  # a plan made on one side is not taken on the other
        equal(dx * scale, array(x) * 3)
        refusal(lambda: ms.grad(lambda t: (t * scale).sum(), None, [scale])(dx), MixedOperandError)
    scale.requires_grad = False
    equal(ms.grad(lambda t: (t * scale).sum())(dx), np.full((8, 3), 3))


def a_forward_that_raised_after_set_grad_leaves_no_recording(world):
    net = distribute_module(nn.Dense(3, 2), mesh_1d())
    net.set_grad()
    refusal(lambda: net(data(1, 8, 3)), MixedOperandError)
    assert not _pynative_executor.grad_flag()
    equal(ms.grad(lambda t: (t * 2).sum())(data(1, 4, 2)), np.full((4, 2), 2))


def plans_see_through_the_wrappers_of_mixed_precision(world):
    def net():
        return nn.SequentialCell(nn.Dense(6, 8), nn.LayerNorm((8,)), nn.Dense(8, 4))
    for level in sampled(("O2", "O1", "O3", "O1"), 2, 1):  # MindSpore's second rewriting makes other classes than its first
        cell = amp.auto_mixed_precision(net(), level)
        parallelize_module(cell, mesh_1d(), {"0": ColwiseParallel(use_local_output=False)})
        cut = [p.name for p in cell.get_parameters() if getattr(p, "placements", None)]
        assert len(cut) == 2 and all(".0." in f".{name}" for name in cut), (level, cut)
    spelled = amp.auto_mixed_precision(net(), "O3")
    parallelize_module(spelled, mesh_1d(), {"_backbone.2": ColwiseParallel(use_local_output=False)})
    assert len([p for p in spelled.get_parameters() if getattr(p, "placements", None)]) == 2
    every = amp.auto_mixed_precision(nn.SequentialCell(nn.Dense(6, 8), nn.Dense(8, 4)), "O3")
    parallelize_module(every, mesh_1d(), {"*": ColwiseParallel(use_local_output=False, output_layouts=R)})
    assert len([p for p in every.get_parameters() if getattr(p, "placements", None)]) == 4


def an_optimizer_of_the_old_parameters_is_explained(world):
    net = nn.Dense(3, 2)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    distribute_module(net, mesh_1d())
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    message = refusal(lambda: step(placed(data(1, 8, 3), mesh_1d(), S(0)), placed(data(2, 8, 2), mesh_1d(), S(0))), ConfigError)
    assert "after the model was distributed" in message
