# SPDX-License-Identifier: Apache-2.0
"""Training cells, training loops of one's own, and what models do to their weights: freezing, adapters, ties, averages."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_dtensor import ColwiseParallel, Partial, RowwiseParallel
from tests.operands import Built
from tests.surface.table import Net, random, row, rows, seeded, values

CELLS, LOOPS, WEIGHTS = "training cells", "training loops", "weights"
SCALE = 1024.0


def pair(i: int, s):
    """The batch of step i."""
    return s.sequence(random(10 + i, 8, 4, 7)), s.sequence(random(30 + i, 8, 4, 5))


def step_of(net, optimizer, loss_fn=None):
    """The step of MindSpore's quick start."""
    loss_fn = loss_fn or nn.MSELoss()
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)

    def step(x, y):
        loss, grads = grad_fn(x, y)
        optimizer(grads)
        return loss
    return step


def trained(s, net, step, steps: int = 5):
    return [step(*pair(i, s)) for i in range(steps)], values(net)


# -- cells ----------------------------------------------------------------------------------------------------------------
@row(CELLS, "nn.WithLossCell")
def with_loss(s, x, y):
    cell = nn.WithLossCell(s.net(), nn.SmoothL1Loss())
    return cell(x, y), ms.grad(cell, None, cell.trainable_params())(x, y)


rows(CELLS, {
    "nn.WithEvalCell": lambda net, x, y: nn.WithEvalCell(net, nn.L1Loss())(x, y),
    "nn.WithGradCell": lambda net, x, y: nn.WithGradCell(net, nn.MSELoss())(x, y),
})


@row(CELLS, "nn.ForwardValueAndGrad")
def forward_value_and_grad(s, x, y):
    cell = nn.WithLossCell(s.net(), nn.MSELoss())
    return nn.ForwardValueAndGrad(cell, cell.trainable_params(), get_all=True, get_by_list=True)(x, y)


@row(CELLS, "nn.TrainOneStepCell(nn.WithLossCell)")
def train_one_step(s, net):
    return trained(s, net, nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 1e-2)))


@row(CELLS, "nn.TrainOneStepCell(sens=)")
def train_one_step_sens(s, net):
    optimizer = nn.SGD(net.trainable_params(), 1e-2)
    return trained(s, net, nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, sens=8.0))


@row(CELLS, "nn.TrainOneStepCell, optimizer made before the model is distributed",
     refused="an optimizer makes its moments like the parameters it is given: make it after the model is distributed")
def optimizer_first(s):
    net = seeded(Net())
    optimizer = nn.Momentum(net.trainable_params(), 1e-2, 0.9)
    net = s.net(net, s.mesh and s.plan())
    return trained(s, net, nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer))


class Scaled(nn.TrainOneStepWithLossScaleCell):
    """With the overflow check of `amp`, as MindSpore's own runs on Ascend and GPU only."""

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(ms.amp.all_finite(compute_output))


def overflowing(s, scale):
    """Five steps; in the third one element of one rank's rows makes the gradients infinite."""
    net = s.net()
    step = Scaled(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 1e-2, 0.9), scale)
    seen = []
    for i in range(5):
        x, y = random(10 + i, 8, 4, 7), random(30 + i, 8, 4, 5)
        if i == 2:
            y[6, 3, 1] = np.inf
        loss, overflow, sense = step(s.sequence(x), s.sequence(y))
        seen.append((loss, bool(overflow), float(sense.asnumpy())))
    return seen, values(net)


rows(CELLS, {
    "nn.TrainOneStepWithLossScaleCell, nn.FixedLossScaleUpdateCell, an overflow":
        lambda s: overflowing(s, nn.FixedLossScaleUpdateCell(SCALE)),
    "nn.TrainOneStepWithLossScaleCell, nn.DynamicLossScaleUpdateCell, an overflow":
        lambda s: overflowing(s, nn.DynamicLossScaleUpdateCell(SCALE, 2, 2)),
})


@row(CELLS, "nn.TrainOneStepWithLossScaleCell, a Tensor and set_sense_scale")
def set_scale(s, net):
    step = Scaled(nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 1e-2), Tensor(SCALE, ms.float32))
    first = [step(*pair(i, s)) for i in range(2)]
    step.set_sense_scale(Tensor(64.0, ms.float32))
    return first, [step(*pair(i, s)) for i in range(2, 5)], values(net)


class TrainWithClip(nn.TrainOneStepCell):
    """A training cell of one's own, as the documentation derives them."""

    def construct(self, x, y):
        loss = self.network(x, y)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad(self.network, self.weights)(x, y, sens)
        grads = ops.clip_by_global_norm(grads, 0.7)
        return ops.depend(loss, self.optimizer(grads))


@row(CELLS, "a subclass of nn.TrainOneStepCell that clips")
def train_with_clip(s, net):
    return trained(s, net, TrainWithClip(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.1, 0.9)))


class Accumulating(nn.TrainOneStepCell):
    """The accumulating training cell of MindSpore's documentation: sums in parameters, an update every second call."""

    def __init__(self, network, optimizer, every: int = 2):
        super().__init__(network, optimizer)
        self.every, self.hyper_map = every, ops.HyperMap()
        self.sums = self.weights.clone(prefix="sums", init="zeros")
        self.zeros = self.weights.clone(prefix="zeros", init="zeros")
        self.counter = Parameter(Tensor(0, ms.int32), name="counter")

    def construct(self, x, y):
        loss = self.network(x, y)
        grads = self.grad(self.network, self.weights)(x, y, ops.ones_like(loss))
        self.hyper_map(ops.assign_add, self.sums, grads)
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        if self.counter % self.every == 0:
            self.optimizer(self.sums)
            self.hyper_map(ops.assign, self.sums, self.zeros)
        return loss


@row(CELLS, "a gradient accumulation cell (assign_add, assign)")
def accumulation_cell(s, net):
    return trained(s, net, Accumulating(nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 1e-2)), 6)


@row(CELLS, "nn.TimeDistributed")
def time_distributed(s, net):
    cell = nn.TimeDistributed(net.head, time_axis=1)
    x, y = s.batch()
    return ms.value_and_grad(lambda x: ((cell(x) - y) ** 2).mean(), 0, net.head.trainable_params())(x)


# -- loops ----------------------------------------------------------------------------------------------------------------
@row(LOOPS, "value_and_grad and an optimizer")
def quick_start(s, net):
    return trained(s, net, step_of(net, nn.SGD(net.trainable_params(), 1e-2, momentum=0.9)))


@row(LOOPS, "loss printed with asnumpy(), item() and a format")
def printed(s, net):
    step = step_of(net, nn.SGD(net.trainable_params(), 1e-2))
    losses = [step(*pair(i, s)) for i in range(4)]
    return losses[0].asnumpy(), losses[1].item(), float(f"{losses[2].asnumpy():>7f}"), float(np.mean(losses[3].asnumpy()))


class Accumulator:
    """The accumulator of MindSpore's tutorial on gradient accumulation."""

    def __init__(self, optimizer, every, clip_norm=1.0):
        self.optimizer, self.every, self.clip_norm = optimizer, every, clip_norm
        self.inner_grads = optimizer.parameters.clone(prefix="accumulate_", init="zeros")
        self.zeros = optimizer.parameters.clone(prefix="zeros_", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), "counter_")
        self.map = ops.HyperMap()

    def __call__(self, grads):
        self.map(ops.partial(ops.assign_add), self.inner_grads, grads)
        if self.counter % self.every == 0:
            self.optimizer(ops.clip_by_global_norm(self.inner_grads, self.clip_norm))
            self.map(ops.partial(ops.assign), self.inner_grads, self.zeros)
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        return True


@row(LOOPS, "the tutorial's Accumulator")
def accumulator(s, net):
    accumulate = Accumulator(nn.Momentum(net.trainable_params(), 0.05, 0.9), 2)
    loss_fn = nn.MSELoss()
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(net(x), y) / 2, None, net.trainable_params())
    losses = []
    for i in range(6):
        loss, grads = grad_fn(*pair(i, s))
        accumulate(grads)
        losses.append(loss)
    return losses, values(net)


@row(LOOPS, "loss += micro_loss inside the differentiated function")
def micro_losses(s, net):
    optimizer, loss_fn = nn.SGD(net.trainable_params(), 1e-2), nn.MSELoss()

    def loss_of(micros):
        loss = 0.0
        for x, y in micros:
            micro_loss = loss_fn(net(x), y)
            loss += micro_loss
        return loss / len(micros)
    grad_fn = ms.value_and_grad(loss_of, None, net.trainable_params())
    losses = []
    for i in range(3):
        loss, grads = grad_fn([pair(3 * i + k, s) for k in range(3)])
        optimizer(grads)
        losses.append(loss)
    return losses, values(net)


@row(LOOPS, "total += micro_loss from Tensor(0.0)",
     refused="`+=` writes into a plain tensor, where this rank's shard would stand: total = total + loss, or begin with 0.0")
def from_a_tensor(s):
    total = Tensor(0.0, ms.float32)
    total += s.net()(s.batch()[0]).mean()
    return total


@row(LOOPS, "total += micro_loss and gradients summed outside it")
def summed_outside(s, net):
    optimizer, loss_fn = nn.SGD(net.trainable_params(), 1e-2), nn.MSELoss()
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, net.trainable_params())
    totals = []
    for i in range(3):
        total, sums = 0.0, None
        for k in range(3):
            micro_loss, grads = grad_fn(*pair(3 * i + k, s))
            total += micro_loss
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads)]
        optimizer(tuple(g / 3 for g in sums))
        totals.append(total)
    return totals, values(net)


@row(LOOPS, "micro-batches cut out of the batch")
def micro_batches(net, x, y):
    loss_fn = nn.MSELoss(reduction="sum")

    def loss_of(x, y):
        loss = 0.0
        for k in range(2):
            loss += loss_fn(net(x[4 * k:4 * k + 4]), y[4 * k:4 * k + 4]) / y.size
        return loss
    return ms.value_and_grad(loss_of, None, net.trainable_params())(x, y)


@row(LOOPS, "hand-written SGD with ops.assign_sub")
def by_hand(s, net):
    grad_fn = ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, net.trainable_params())
    losses = []
    for i in range(5):
        loss, grads = grad_fn(*pair(i, s))
        for p, g in zip(net.trainable_params(), grads):
            ops.assign_sub(p, 0.05 * g)
        losses.append(loss)
    return losses, values(net)


@row(LOOPS, "two models, one optimizer each, in turns")
def adversaries(s):
    a, b = s.net(), s.net()
    opt_a, opt_b = nn.SGD(a.trainable_params(), 0.05), nn.Adam(b.trainable_params(), 1e-2)
    step_a = ms.value_and_grad(lambda x, y: ((a(x) - b(x)) ** 2).mean(), None, opt_a.parameters)
    step_b = ms.value_and_grad(lambda x, y: ((b(x) - y) ** 2).mean(), None, opt_b.parameters)
    seen = []
    for i in range(3):
        for step, opt in ((step_a, opt_a), (step_b, opt_b)):
            loss, grads = step(*pair(i, s))
            opt(grads)
            seen.append(loss)
    return seen, values(a), values(b)


# -- weights --------------------------------------------------------------------------------------------------------------
@row(WEIGHTS, "frozen before the model is distributed")
def frozen_before(s):
    net = seeded(Net())
    for p in (net.up.weight, net.norm.gamma, net.down.bias):
        p.requires_grad = False
    net = s.net(net, s.mesh and s.plan())
    assert len(net.trainable_params()) == 5
    return trained(s, net, step_of(net, nn.Adam(net.trainable_params(), 1e-2)))


@row(WEIGHTS, "frozen after it, thawed later")
def frozen_after(s, net):
    for p in net.get_parameters():
        p.requires_grad = not p.name.startswith("up")
    first = trained(s, net, step_of(net, nn.SGD(net.trainable_params(), 1e-2)), 2)
    for p in net.get_parameters():
        p.requires_grad = True
    return first, trained(s, net, step_of(net, nn.SGD(net.trainable_params(), 1e-2)), 3)


class LoraDense(nn.Cell):
    """x W^T + (x A^T) B^T; W is frozen."""

    def __init__(self, base: nn.Dense, rank: int = 3):
        super().__init__()
        self.base = base
        base.weight.requires_grad = False
        self.a = nn.Dense(base.in_channels, rank, has_bias=False)
        self.b = nn.Dense(rank, base.out_channels, has_bias=False)

    def construct(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


def lora(s, plan):
    net = Net()
    net.up, net.down = LoraDense(net.up), LoraDense(net.down)
    net = s.net(seeded(net), plan)
    return trained(s, net, step_of(net, nn.Adam(net.trainable_params(), 1e-2)))


KEEP = {"use_local_output": False}


@row(WEIGHTS, "LoRA (x A^T) B^T beside column and row parallel weights")
def lora_reduced(s):
    return lora(s, {"up.base": ColwiseParallel(**KEEP), "up.b": ColwiseParallel(**KEEP),
                    "down.base": RowwiseParallel(**KEEP), "down.a": RowwiseParallel(**KEEP)})


@row(WEIGHTS, "LoRA under row parallel, x A^T left Partial into B^T")
def lora_partial(s):
    return lora(s, {"up.base": ColwiseParallel(**KEEP), "up.b": ColwiseParallel(**KEEP),
                    "down.base": RowwiseParallel(output_layouts=Partial(), **KEEP),
                    "down.a": RowwiseParallel(output_layouts=Partial(), **KEEP)})


@row(WEIGHTS, "chained matmuls, a Partial input")
def chain(s):
    net = Built(lambda c, x: c.third(c.second(c.first(x))),
                first=nn.Dense(7, 8, has_bias=False), second=nn.Dense(8, 6, has_bias=False),
                third=nn.Dense(6, 5, has_bias=False))
    net = s.net(seeded(net), {"first": ColwiseParallel(**KEEP), "second": RowwiseParallel(output_layouts=Partial(), **KEEP)})
    return trained(s, net, step_of(net, nn.SGD(net.trainable_params(), 1e-2)))


@row(WEIGHTS, "embedding and head tied by use")
def tied_use(s):
    net = Built(lambda c, ids: ops.matmul(c.mix(c.table(ids)), c.table.embedding_table.T),
                table=nn.Embedding(12, 8), mix=nn.Dense(8, 8))
    net = s.net(seeded(net), {"table": RowwiseParallel(**KEEP)})
    ids, labels = (np.random.default_rng(k).integers(0, 12, (8, 4)).astype(np.int32) for k in (5, 6))
    x, y = s.data(ids), s.data(labels)
    step = step_of(net, nn.Adam(net.trainable_params(), 1e-2),
                   lambda out, y: ops.cross_entropy(out.reshape(-1, 12), y.reshape(-1)))
    return [step(x, y) for _ in range(5)], values(net)


@row(WEIGHTS, "cells tied by assignment")
def tied_cells(s):
    plan = {"first": ColwiseParallel(**KEEP), "second": ColwiseParallel(**KEEP)}
    net = Built(lambda c, x: c.head(c.second(ops.tanh(c.first(c.norm(x))))), norm=nn.LayerNorm((7,)), first=nn.Dense(7, 7),
                second=nn.Dense(7, 7), head=nn.Dense(7, 5))
    net.second.weight = net.first.weight
    net = s.net(seeded(net), plan)
    assert net.second.weight is net.first.weight
    return trained(s, net, step_of(net, nn.Momentum(net.trainable_params(), 1e-2, 0.9)))


@row(WEIGHTS, "an exponential moving average of the weights")
def moving_average(s, net):
    params = ms.ParameterTuple(net.trainable_params())
    ema = params.clone(prefix="ema", init="same")
    step, losses = step_of(net, nn.SGD(net.trainable_params(), 5e-2)), []
    for i in range(5):
        losses.append(step(*pair(i, s)))
        for e, p in zip(ema, params):
            ops.assign(e, 0.9 * e + 0.1 * p)
    return losses, values(net), [e.name for e in ema], list(ema)


@row(WEIGHTS, "weights of the average evaluated by set_data")
def swapped(s, net):
    kept = [p.clone() for p in net.trainable_params()]
    first = trained(s, net, step_of(net, nn.SGD(net.trainable_params(), 5e-2)), 2)
    for p, k in zip(net.trainable_params(), kept):
        p.set_data(k)
    return first, net(s.batch()[0]), values(net)
