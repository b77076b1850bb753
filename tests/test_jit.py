# SPDX-License-Identifier: Apache-2.0
"""A compiled graph bypasses dispatch, so a DTensor that enters one is refused."""
import pytest

from ms_dtensor.errors import ConfigError, OpRuleError


@pytest.fixture
def graph_mode(cpu):
    import mindspore as ms

    yield lambda: ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_context(mode=ms.PYNATIVE_MODE)


def test_graph_mode_is_named_before_anything_is_probed(graph_mode):
    import mindspore as ms

    from ms_dtensor import distribute_tensor, init_device_mesh
    from ms_dtensor.dispatch import patches
    from ms_dtensor.internals import probes

    mesh = init_device_mesh("cpu", (1,))
    patches.uninstall()
    probes.check_internals.cache_clear()
    graph_mode()
    try:
        with pytest.raises(ConfigError, match="is in GRAPH_MODE(.|\n)*set_context.mode=ms.PYNATIVE_MODE"):
            distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        patches.install()


def test_graph_mode_set_after_distribution_is_named(graph_mode):
    import mindspore as ms
    from mindspore import nn

    from ms_dtensor import ColwiseParallel, init_device_mesh, parallelize_module

    net = parallelize_module(nn.SequentialCell(nn.Dense(4, 4), nn.ReLU()), init_device_mesh("cpu", (1,)),
                             {"0": ColwiseParallel(use_local_output=False)})
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 1e-3))

    def loss(x):
        return net(x).mean()
    graph_mode()
    for call in (net, step, ms.value_and_grad(loss, None, net.trainable_params()), ms.grad(loss)):
        with pytest.raises(OpRuleError, match="For 'GRAPH_MODE'(.|\n)*set_context.mode=ms.PYNATIVE_MODE"):
            call(ms.ops.ones((2, 4)))


def test_a_jitted_function_refuses_a_dtensor(cpu):
    import mindspore as ms

    from ms_dtensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh, [Shard(0)])
    double = ms.jit(lambda t: t * 2)
    with pytest.raises(OpRuleError, match="For 'ms.jit', an argument is a DTensor"):
        double(x)
    assert (x * 2).sum().item() == 6.0
