# SPDX-License-Identifier: Apache-2.0
"""Pipelines that run, on real ranks, and steps that ranks leave by an exception."""
import gc
import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import ones

from ms_dtensor import Shard, checkpoint_wrapper, distribute_tensor, fully_shard, init_device_mesh, replicate
from ms_dtensor.dispatch.held import Holding
from ms_dtensor.errors import ConfigError, ScheduleError
from ms_dtensor.pipeline import Schedule1F1B, ScheduleGPipe, ScheduleZBH1, pipeline
from tests.msrun import python
from tests.operands import Built, filled, weight


def test_what_is_no_stage_is_refused(cpu):
    mesh, net = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), nn.SequentialCell(nn.Dense(4, 4))
    stages = pipeline(net, mesh)
    for call, error, text in (
            (lambda: pipeline("net", mesh), ConfigError, "'module' is a str"),
            (lambda: Schedule1F1B([], 2), ScheduleError, "not this rank's stages"),
            (lambda: Schedule1F1B(nn.Dense(4, 4), 2), ScheduleError, "Dense"),
            (lambda: Schedule1F1B(stages, 2, len).step(ones((2, 4)), weights=["a", 1.0]), ScheduleError, "'a'")):
        with pytest.raises(error, match="For ") as refused:
            call()
        assert text in str(refused.value)


def added() -> nn.Cell:
    """Two parameters of which autograd hands out one gradient, the same tensor, and which is the first stage's."""
    return filled(Built(lambda c, x: x * 2 + c.a + c.b, a=weight(1, 4), b=weight(1, 4)))


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBH1])
def test_sums_and_weights_are_one_devices_where_gradients_are_one_tensor(cpu, kind):
    mesh, plain = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), added()
    x, t = (Tensor(np.random.default_rng(i).normal(size=(5, 4)).astype(np.float32)) for i in (3, 4))
    weights = [0.1, 0.35, 0.2, 0.05, 0.3]
    schedule = kind(pipeline(nn.SequentialCell(added()), mesh), 5, lambda y, t: ((y - t) ** 2).mean())

    def want():
        return (((plain(x) - t) ** 2).mean(-1) * Tensor(np.array(weights, np.float32))).sum()
    value, grads = ms.value_and_grad(want, None, plain.trainable_params())()
    loss, got = schedule.step(x, target=t, weights=weights)
    assert float(loss) == pytest.approx(float(value), rel=1e-6)
    assert float(schedule.eval(x, target=t, weights=weights)) == pytest.approx(float(value), rel=1e-6)
    for w, g in zip(grads, got, strict=True):
        np.testing.assert_allclose(g.asnumpy(), w.asnumpy(), rtol=1e-5)


class Follows(nn.Cell):
    """A scale that follows the rows, and is written before it is read."""

    def __init__(self, write, copied: bool) -> None:
        super().__init__()
        self.write, self.copied, self.up = write, copied, nn.Dense(4, 4)
        self.scale = Parameter(Tensor(np.ones(4, np.float32)), name="scale", requires_grad=False)
        for i, p in enumerate(self.up.get_parameters()):
            p.set_data(Tensor(np.random.default_rng(i).normal(size=p.shape).astype(np.float32)))

    def construct(self, x):
        x = self.up(x)
        self.write(self.scale, ops.stop_gradient(self.scale * 0.5 + (x * x).mean(0)))
        return x * (self.scale * 1 if self.copied else self.scale)


@pytest.mark.parametrize("write", [ops.assign, lambda p, value: p.set_data(value),
                                   lambda p, value: ops.assign_add(p, value - p)],
                         ids=["assign", "set_data", "assign_add"])
@pytest.mark.parametrize("laid_out", [False, True], ids=["plain", "replicate"])
def test_what_a_later_forward_has_written_is_not_what_a_backward_reads(cpu, write, laid_out):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    x, one = Tensor(np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)), Follows(write, False)
    want = [ms.grad(lambda x: (one(x) ** 3).mean() / 3, None, one.trainable_params())(x[i:i + 2]) for i in (0, 2, 4)]

    def step(kind, copied: bool, again: bool):
        stage, = pipeline(nn.SequentialCell(Follows(write, copied)), mesh["pp"])
        if laid_out:
            replicate(stage.module, mesh=mesh["dp"])
        if again:
            checkpoint_wrapper(stage.module)
        return kind(stage, 3, lambda y, _: (y ** 3).mean()).step(x)[1]
    for kind, copied, again in ((Schedule1F1B, False, False), (ScheduleGPipe, True, False), (ScheduleGPipe, False, True)):
        for got, *parts in zip(step(kind, copied, again), *want, strict=True):
            got = got.full_tensor() if laid_out else got
            np.testing.assert_allclose(got.asnumpy(), sum(parts).asnumpy(), rtol=1e-5)
    with pytest.raises(ScheduleError, match="written: 0.scale"):
        step(ScheduleGPipe, False, False)


def scaled(scale: Parameter) -> nn.Cell:
    """A loss with a parameter, its own or that of a stage."""
    return Built(lambda c, y, _: (y * c.scale).mean(), scale=scale)


def test_parameters_of_a_loss_alone_are_said_not_to_be_trained(cpu, recwarn):
    stages = pipeline(nn.SequentialCell(nn.Dense(4, 4)), init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)))
    scale = Parameter(ones((1,)), name="scale")
    with pytest.warns(UserWarning, match="Schedule1F1B: the loss has parameters of no stage, scale, which no step trains"):
        schedule = Schedule1F1B(stages, 2, scaled(scale))
    assert len(schedule.step(ones((2, 4)))[1]) == len(schedule.params) == 2
    scale.requires_grad = False
    Schedule1F1B(stages, 2, scaled(scale))
    Schedule1F1B(stages, 2, scaled(schedule.params[1]))
    assert not recwarn.list


def test_a_step_leaves_nothing_for_the_collector_of_garbage(cpu):
    """Products held back would wait for it, of every microbatch, where calls of units refer to each other."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))
    stages = pipeline(nn.SequentialCell(*(nn.SequentialCell(nn.Dense(4, 4), nn.Tanh()) for _ in range(2))), mesh["pp"])
    for cell in (*stages[0].module.cells(), stages[0].module):
        fully_shard(cell, mesh=mesh["dp"])
    x = distribute_tensor(Tensor(np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)), mesh["dp"], [Shard(0)])
    schedule = ScheduleZBH1(stages, 3, lambda y, t: ((y - t) ** 2).mean())
    schedule.step(x, target=x)
    gc.collect()
    gc.disable()
    try:
        schedule.step(x, target=x)
        left = [one for one in gc.get_objects() if isinstance(one, Holding) and one.products]
    finally:
        gc.enable()
    assert not left


def test_killed_ranks_and_swapped_actions_are_named():
    """At each of the five points of a step: a slice of what the script runs in full. The seconds are not judged here."""
    done = python("-m", "tests.long.check_pipeline", "kills", "orders", "--runs", "5", "--ranks", "2", "--limit", "60")
    assert done.stdout, done.stderr
    out = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert out["kills"]["measured"] == 5 and out["orders"]["runs"] == 1
