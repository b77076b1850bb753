# SPDX-License-Identifier: Apache-2.0
"""Writes by index and by mask into parameters and activations while training, and counting what a step communicates."""
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_dtensor import ColwiseParallel
from ms_dtensor.debug import CommDebugMode
from tests.surface.rows_training import pair, step_of, trained
from tests.surface.table import random, row, seeded, values

WRITES, COUNTS = "writes in training", "debug tools"
COL = ColwiseParallel(use_local_output=False)


class Memory(nn.Cell):
    """A projection whose result stands beside rows of a table; which, the ids say."""

    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(random(70, 6, 7) * 0.4), name="table")
        self.head = nn.Dense(7, 5)

    def construct(self, x):
        return self.head(x + self.table.sum(0))


def memory(s):
    net = s.net(seeded(Memory()), {"head": COL})
    return net, step_of(net, nn.SGD(net.trainable_params(), 1e-2))


@row(WRITES, "ops.scatter_update of a parameter, between steps")
def scatter_update(s):
    net, step = memory(s)
    losses = []
    for i in range(5):
        losses.append(step(*pair(i, s)))
        ops.scatter_update(net.table, s.whole(np.array([4, i % 3], np.int32)), s.whole(random(80 + i, 2, 7) * 0.2))
    return losses, values(net)


def put(s, x, rows, new, accumulate=False):
    """`x` after `x.index_put_`, which has no kernel on CPU: in NumPy on one device."""
    if s.mesh is not None:
        x.index_put_((s.whole(rows),), s.whole(new), accumulate=accumulate)
        return x
    whole = x.asnumpy().copy()
    if accumulate:
        np.add.at(whole, rows, new)
    else:
        whole[rows] = new
    return ops.assign(x, Tensor(whole)) if isinstance(x, Parameter) else Tensor(whole)


@row(WRITES, "Tensor.index_put_, into a parameter and into a batch")
def index_put(s):
    net, step = memory(s)
    losses = []
    for i in range(5):
        x, y = pair(i, s)
        x = put(s, x, np.array([1, 6]), random(80 + i, 2, 4, 7))
        losses.append(step(x, y))
        put(s, net.table, np.array([5, 5, i]), random(90 + i, 3, 7) * 0.1, accumulate=True)
    return losses, values(net)


@row(WRITES, "boolean masks: x[mask] = values in the model, gradients of what is left")
def masked_assignment(s):
    mask = s.whole(np.random.default_rng(71).random((8, 4)) > 0.6)

    class Masked(Memory):
        def construct(self, x):
            h = x * 1
            h[mask] = 0.25
            h = ops.tanh(h)
            rows = h[mask]
            return self.head(h + self.table.sum(0)) + rows.mean()
    net = s.net(seeded(Masked()), {"head": COL})
    return trained(s, net, step_of(net, nn.SGD(net.trainable_params(), 1e-2)))


@row(COUNTS, "CommDebugMode(module=net) around a step: the step is the same")
def counted(s, net):
    losses = []
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    for i in range(5):
        with CommDebugMode(module=net) as mode:
            losses.append(step(*pair(i, s)))
        if s.mesh is not None and s.mesh.size() > 1:
            assert mode.get_total_counts() and "down" in mode.generate_comm_debug_tracing_table()
    return losses, values(net)
