# SPDX-License-Identifier: Apache-2.0
"""Optimizers, parameter groups, schedules and clipping: parameters and states after five steps.

Not here, because MindSpore 2.10 has no CPU kernel for them or they train nothing there: nn.Lamb, nn.LARS, and
mint.optim but for its AdamW, which must be refused.
"""
import mindspore as ms
import mindspore.experimental.optim as experimental
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental.optim import lr_scheduler

from ms_dtensor import ColwiseParallel, RowwiseParallel
from tests.surface.table import random, row, seeded, values

STEPS = 5


def small(s):
    """Four parameters laid out in three ways; every optimizer is compiled anew, which takes its time by parameter."""
    net = seeded(nn.SequentialCell(nn.Dense(7, 12), nn.Dense(12, 5)))
    return s.net(net, {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel(use_local_output=False)})


def batch(s):
    return s.data(random(1, 8, 7)), s.data(random(2, 8, 5))


def gradients_of(net):
    return ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, net.trainable_params())


def trained(s, make, clip=lambda grads: grads, after=lambda optimizer: None):
    """Losses, parameters and the optimizer's state; `make` gets the parameters."""
    net, losses = small(s), []
    optimizer, step = make(net.trainable_params()), gradients_of(net)
    for _ in range(STEPS):
        loss, grads = step(*batch(s))
        optimizer(clip(grads))
        losses.append((loss, after(optimizer)))
    return losses, values(net), values(optimizer)


def rows(group, programs, refused={}):  # noqa: B006
    """A row for each `{name: make(params) -> optimizer}`."""
    for name, make in programs.items():
        row(group, name, refused=refused.get(name))(lambda s, make=make: trained(s, make))


rows("nn optimizers", {
    "nn.ASGD": lambda ps: nn.ASGD(ps, 0.05, weight_decay=0.01),
    "nn.AdaMax": lambda ps: nn.AdaMax(ps, 0.02, weight_decay=0.01),
    "nn.Adadelta": lambda ps: nn.Adadelta(ps, 0.5, epsilon=1e-3),
    "nn.Adagrad": lambda ps: nn.Adagrad(ps, learning_rate=0.05),
    "nn.Adam": lambda ps: nn.Adam(ps, 0.02, weight_decay=0.01),
    "nn.Adam(use_nesterov)": lambda ps: nn.Adam(ps, 0.02, use_nesterov=True),
    "nn.Adam(use_amsgrad)": lambda ps: nn.Adam(ps, 0.02, use_amsgrad=True),
    "nn.AdamOffload": lambda ps: nn.AdamOffload(ps, 0.02),
    "nn.AdamWeightDecay": lambda ps: nn.AdamWeightDecay(ps, 0.02, weight_decay=0.1),
    "nn.AdaFactor": lambda ps: nn.AdaFactor(ps, learning_rate=0.02, scale_parameter=False, relative_step=False),
    "nn.FTRL": lambda ps: nn.FTRL(ps, learning_rate=0.05),
    "nn.LazyAdam": lambda ps: nn.LazyAdam(ps, 0.02),
    "nn.Momentum": lambda ps: nn.Momentum(ps, 0.1, 0.9, weight_decay=0.01),
    "nn.Momentum(use_nesterov)": lambda ps: nn.Momentum(ps, 0.1, 0.9, use_nesterov=True),
    "nn.Momentum(loss_scale)": lambda ps: nn.Momentum(ps, 0.1, 0.9, loss_scale=4.0),
    "nn.ProximalAdagrad": lambda ps: nn.ProximalAdagrad(ps, learning_rate=0.05),
    "nn.RMSProp": lambda ps: nn.RMSProp(ps, 0.02, momentum=0.5),
    "nn.RMSProp(centered)": lambda ps: nn.RMSProp(ps, 0.02, centered=True),
    "nn.Rprop": lambda ps: nn.Rprop(ps, 0.02),
    "nn.SGD": lambda ps: nn.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01),
    "nn.SGD(nesterov)": lambda ps: nn.SGD(ps, 0.1, momentum=0.9, nesterov=True),
}, {"nn.AdaFactor": "its factors are means of whole rows and columns, a shard has parts: ms_dtensor.optim.Adafactor"})

rows("experimental.optim", {
    "experimental.optim.ASGD": lambda ps: experimental.ASGD(ps, lr=0.05),
    "experimental.optim.Adadelta": lambda ps: experimental.Adadelta(ps, lr=0.5, eps=1e-3),
    "experimental.optim.Adagrad": lambda ps: experimental.Adagrad(ps, lr=0.05),
    "experimental.optim.Adam": lambda ps: experimental.Adam(ps, lr=0.02, weight_decay=0.01),
    "experimental.optim.Adam(amsgrad)": lambda ps: experimental.Adam(ps, lr=0.02, amsgrad=True),
    "experimental.optim.AdamW": lambda ps: experimental.AdamW(ps, lr=0.02, weight_decay=0.1),
    "experimental.optim.Adamax": lambda ps: experimental.Adamax(ps, lr=0.02),
    "experimental.optim.NAdam": lambda ps: experimental.NAdam(ps, lr=0.02),
    "experimental.optim.RAdam": lambda ps: experimental.RAdam(ps, lr=0.02),
    "experimental.optim.RMSprop": lambda ps: experimental.RMSprop(ps, lr=0.02, momentum=0.5),
    "experimental.optim.RMSprop(centered)": lambda ps: experimental.RMSprop(ps, lr=0.02, centered=True),
    "experimental.optim.Rprop": lambda ps: experimental.Rprop(ps, lr=0.02),
    "experimental.optim.SGD": lambda ps: experimental.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "experimental.optim.SGD(nesterov, maximize)": lambda ps: experimental.SGD(
        ps, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
})

FUSED = "its fused kernel, on Ascend only, would see a shard for the whole: ms_dtensor.optim.AdamW or nn.AdamWeightDecay"


@row("mint.optim", "mint.optim.AdamW", refused=FUSED)
def fused_adamw(s):
    return trained(s, lambda ps: mint.optim.AdamW(ps, lr=0.02) if s.mesh else experimental.AdamW(ps, lr=0.02))


# -- groups and schedules -------------------------------------------------------------------------------------------------
def split(ps):
    """Weights and the others, as documented: by name."""
    return [p for p in ps if "weight" in p.name], [p for p in ps if "weight" not in p.name]


def groups(ps, lr):
    weights, others = split(ps)
    return [{"params": weights, "weight_decay": 0.1, "lr": lr}, {"params": others}, {"order_params": ps}]


def each(ps, *rates):
    """A group for each parameter."""
    return [{"params": [p], "lr": rate} for p, rate in zip(ps, rates)]


SCHEDULES = {
    "groups with lr and weight_decay, nn.Adam": lambda ps: nn.Adam(groups(ps, 0.05), 0.02),
    "groups with lr and weight_decay, nn.AdamWeightDecay": lambda ps: nn.AdamWeightDecay(groups(ps, 0.05), 0.02),
    "groups with lr and weight_decay, nn.SGD": lambda ps: nn.SGD(groups(ps, 0.05), 0.02, momentum=0.9),
    "groups with a schedule each": lambda ps: nn.Momentum(groups(ps, nn.CosineDecayLR(0.01, 0.1, 4)), 0.05, 0.9),
    "nn.ExponentialDecayLR, NaturalExpDecayLR, InverseDecayLR, CosineDecayLR": lambda ps: nn.Adam(each(
        ps, nn.ExponentialDecayLR(0.1, 0.7, 2), nn.NaturalExpDecayLR(0.1, 0.7, 2, True), nn.InverseDecayLR(0.1, 0.7, 2),
        nn.CosineDecayLR(0.01, 0.1, 4)), 0.1),
    "nn.PolynomialDecayLR, WarmUpLR and one of one's own": lambda ps: nn.Momentum(each(
        ps, nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5), nn.WarmUpLR(0.05, 3), Triangle(), Triangle()), 0.1, 0.9),
    "nn.CosineDecayLR for all": lambda ps: nn.AdamWeightDecay(ps, nn.CosineDecayLR(0.01, 0.1, 4), weight_decay=0.1),
    "nn.piecewise_constant_lr, exponential_decay_lr, natural_exp_decay_lr, inverse_decay_lr": lambda ps: nn.SGD(each(
        ps, nn.piecewise_constant_lr([2, 6], [0.05, 0.01]), nn.exponential_decay_lr(0.1, 0.9, 6, 2, 1),
        nn.natural_exp_decay_lr(0.1, 0.9, 6, 2, 1), nn.inverse_decay_lr(0.1, 0.5, 6, 1, 1)), 0.1),
    "nn.cosine_decay_lr, polynomial_decay_lr, warmup_lr, a list": lambda ps: nn.Adam(each(
        ps, nn.cosine_decay_lr(0.01, 0.1, 6, 2, 2), nn.polynomial_decay_lr(0.1, 0.01, 6, 2, 2, 0.5),
        nn.warmup_lr(0.05, 6, 2, 2), [0.1, 0.05, 0.02, 0.01, 0.01, 0.0]), 0.1),
    "a Tensor of learning rates": lambda ps: nn.Adam(ps, Tensor([0.1, 0.05, 0.02, 0.01, 0.01], ms.float32)),
    "a weight decay that is a Cell": lambda ps: nn.AdamWeightDecay(ps, 0.02, weight_decay=Triangle()),
}


class Triangle(nn.learning_rate_schedule.LearningRateSchedule):
    """Up, then down."""

    def construct(self, global_step):
        return 0.02 * (3.0 - ops.abs(global_step.astype(ms.float32) - 2.0))


rows("parameter groups and schedules", SCHEDULES)

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, 0.001),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.05, 2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.8 ** epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.7)], [2]),
}


@row("parameter groups and schedules", "experimental.optim.lr_scheduler: " + ", ".join(SCHEDULERS))
def schedulers(s):
    net, seen = small(s), []
    optimizer, step = experimental.SGD(net.trainable_params(), lr=0.03, momentum=0.9), gradients_of(net)
    for make in SCHEDULERS.values():  # one takes over where the last one left
        scheduler = make(optimizer)
        for _ in range(2):
            loss, grads = step(*batch(s))
            optimizer(grads)
            scheduler.step()
            seen.append((loss, scheduler.get_last_lr()))
    return seen, values(net)


def plateau(s, metric):
    net, seen = small(s), []
    optimizer = experimental.SGD(net.trainable_params(), lr=3.0)
    scheduler, step = lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.1, 0), gradients_of(net)
    for _ in range(STEPS):
        loss, grads = step(*batch(s))
        optimizer(grads)
        scheduler.step(metric(loss))
        seen.append((loss, [group["lr"].value() for group in optimizer.param_groups]))
    return seen, values(net)


@row("parameter groups and schedules", "experimental.optim.lr_scheduler.ReduceLROnPlateau, step(loss.item())")
def plateau_of_a_number(s):
    return plateau(s, lambda loss: loss.item())


@row("parameter groups and schedules", "experimental.optim.lr_scheduler.ReduceLROnPlateau, step(loss)",
     refused="it keeps the best value in a plain Parameter: scheduler.step(loss.item())")
def plateau_of_a_tensor(s):
    return plateau(s, lambda loss: loss)


@row("parameter groups and schedules", "groups, experimental.optim.Adam")
def experimental_groups(s):
    net = small(s)
    weights, others = split(net.trainable_params())
    optimizer = experimental.Adam([{"params": weights, "lr": 0.05, "weight_decay": 0.1}, {"params": others}], lr=0.02)
    step = ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, optimizer.parameters)  # in the groups' order
    return [(step(*batch(s))[0], optimizer(step(*batch(s))[1])) for _ in range(STEPS)], values(net)


@row("parameter groups and schedules", "writing the learning rate between steps")
def written_rate(s):
    net = small(s)
    optimizer, step = nn.Adam(net.trainable_params(), 0.1), gradients_of(net)
    for i in range(STEPS):
        optimizer(step(*batch(s))[1])
        ops.assign(optimizer.learning_rate, Tensor(0.1 / (i + 2), ms.float32))
    return optimizer.get_lr(), values(net), values(optimizer)


@row("parameter groups and schedules", "freezing: requires_grad = False, then thawed with a second optimizer")
def freezing(s):
    net = small(s)
    for p in net.get_parameters():
        p.requires_grad = "0." not in p.name
    first = nn.Adam(net.trainable_params(), 0.02)
    names = [p.name for p in net.trainable_params()]
    step = gradients_of(net)
    for _ in range(2):
        first(step(*batch(s))[1])
    middle = {k: v.copy() for k, v in values(net).items()}
    net[0].set_grad()
    for p in net[0].get_parameters():
        p.requires_grad = True
    second, step = nn.SGD(net.trainable_params(), 0.1), gradients_of(net)
    for _ in range(3):
        second(step(*batch(s))[1])
    return names, middle, values(net), values(first)


@row("parameter groups and schedules", "two optimizers for two parts of a net")
def two_optimizers(s):
    net = small(s)
    params = net.trainable_params()
    first = nn.Adam([p for p in params if "1." in p.name], 0.05)
    second = nn.Momentum([p for p in params if "1." not in p.name], 0.05, 0.9)
    step = gradients_of(net)
    for _ in range(STEPS):
        grads = step(*batch(s))[1]
        first(tuple(g for p, g in zip(params, grads) if "1." in p.name))
        second(tuple(g for p, g in zip(params, grads) if "1." not in p.name))
    return values(net), values(first), values(second)


# -- clipping -------------------------------------------------------------------------------------------------------------
CLIPS = {
    "ops.clip_by_global_norm": lambda grads: ops.clip_by_global_norm(grads, 0.3),
    "ops.clip_by_norm, each gradient": lambda grads: tuple(ops.clip_by_norm(g, 0.1) for g in grads),
    "ops.clip_by_norm, all of them": lambda grads: tuple(ops.clip_by_norm(list(grads), 0.3)),
    "ops.clip_by_value": lambda grads: ops.clip_by_value(grads, Tensor(-0.02, ms.float32), Tensor(0.05, ms.float32)),
    "ops.clamp": lambda grads: tuple(ops.clamp(g, -0.02, 0.05) for g in grads),
    "ops.HyperMap of a function": lambda grads: ops.HyperMap()(lambda g: ops.clip_by_value(g, -0.02, 0.05), grads),
    "a norm written out": lambda grads: tuple(g / ops.sqrt(sum((h * h).sum() for h in grads)) for g in grads),
}

for _name, _clip in CLIPS.items():
    row("clipping", _name)(lambda s, clip=_clip: trained(s, lambda ps: nn.SGD(ps, 0.2), clip))
