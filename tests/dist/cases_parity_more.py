# SPDX-License-Identifier: Apache-2.0
"""More of what PyTorch's tests ask, in our words: those that did not hold when they were first tried here."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, Partial, parallelize_module
from tests.dist.operands import Built, P, R, S, data, placed
from tests.dist.support import array, counted, equal, refusal

REDUCED = {"sum": lambda x: x.sum(0), "avg": lambda x: x.mean(0), "max": lambda x: x.max(0), "min": lambda x: x.min(0),
           "prod": lambda x: x.prod(0)}


def what_is_copied_into_a_partial_keeps_its_reduction(world, line):
    for op, reduced in REDUCED.items():
        for shape in ((3, 5), (5,), (3, 1), ()):
            mine = [data(10 + r, *shape).asnumpy() for r in range(4)]
            x = DTensor.from_local(data(world.rank, 3, 5), line, [Partial(op)])
            with counted({}):
                out = x.copy_(DTensor.from_local(Tensor(mine[world.rank]), line, [Partial(op)]))
            assert out is x and x.placements == (Partial(op),), (op, shape)
            equal(x, np.broadcast_to(reduced(np.stack(mine)), (3, 5)), f"{op} {shape}")
    x = DTensor.from_local(data(1, 3, 5), line, [P])
    for other in (Partial("max"), R):
        assert "change its placement" in refusal(lambda other=other: x.copy_(DTensor.from_local(data(2, 3, 5), line, [other])))


def seeds_of_mindspore_seed_dtensors(world, line):

    def drawn():
        return array(md.rand((8, 3), device_mesh=line, placements=[S(0)]))
    ms.set_seed(3)
    first, second = drawn(), drawn()
    ms.set_seed(3)
    assert np.array_equal(first, drawn()) and np.array_equal(second, drawn()) and not np.array_equal(first, second)
    ms.set_seed(4)
    assert not np.array_equal(first, drawn())


class Scaled(nn.Dense):
    """A linear map whose result a buffer scales; the buffer is of the input's size, or one number."""

    def __init__(self, ins, outs, by):
        super().__init__(ins, outs)
        self.register_buffer("by", by)
        self.weight.set_data(data(ins, outs, ins))
        self.bias.set_data(data(outs, outs))

    def construct(self, x):
        return super().construct(x * self.by)


def styles_replicate_the_buffers_of_their_cells(world, grid):
    def net_of_two():
        norm = nn.LayerNorm((8,))
        norm.register_buffer("unused", data(6, 3))
        return Built(lambda c, x: c.down(mint.tanh(c.up(c.norm(x)))), norm=norm, up=Scaled(8, 12, data(1, 8)),
                     down=Scaled(12, 8, data(2)))
    x = data(5, 4, 8)
    plain = net_of_two()
    plan = {"norm": md.SequenceParallel(sequence_dim=0), "up": ColwiseParallel(use_local_output=False),
            "down": md.RowwiseParallel(use_local_output=False)}
    net = net_of_two()
    net.up._buffers["by"] = data(1 + world.rank, 8)  # coordinate 0's are everybody's
    net = parallelize_module(net, grid["tp"], plan)
    for buffer in (net.norm.unused, net.up.by, net.down.by):
        assert isinstance(buffer, DTensor) and buffer.placements == (R,) and not isinstance(buffer, Parameter)
    if world.rank < 2:
        equal(net.up.by, data(1, 8))
    alone = parallelize_module(net_of_two(), grid["tp"], plan)
    want = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
    for model in (alone, md.distribute_module(parallelize_module(net_of_two(), grid["tp"], plan), grid["tp"])):
        got = md.value_and_grad(lambda t, m=model: (m(t) ** 2).mean(), None, model.trainable_params())(
            placed(x, grid["tp"], R))
        equal(got, want)
