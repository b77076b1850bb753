# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: levels chosen before and after the model is distributed, cells in 16 bits, loss scaling."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn

from tests.surface.rows_training import SCALE, pair, step_of, trained
from tests.surface.table import Net, random, row, rows, seeded, values

LEVELS, CELLS, SCALING = "amp levels", "precision of cells", "loss scaling"
# float16 keeps 11 bits: a rank's part of a product is rounded before the parts are added, and so are cotangents
HALF = 4e-3


def trained_at(s, net):
    """Three steps; the parameters by the names of `Net`."""
    losses, params = trained(s, net, step_of(net, nn.Momentum(net.trainable_params(), 2e-2, 0.9)), 3)
    return losses, {name.replace("_backbone.", ""): p for name, p in params.items()}


def level_before(level):
    def fn(s):
        return trained_at(s, s.net(amp.auto_mixed_precision(seeded(Net()), level), s.mesh and s.plan()))
    return fn


def level_after(level):
    def fn(s):
        return trained_at(s, amp.auto_mixed_precision(s.net(), level))
    return fn


for _level in ("O0", "O1", "O2", "O3", "auto"):
    _loose = {} if _level == "O0" else {"rtol": HALF}
    row(LEVELS, f"auto_mixed_precision {_level}, before the model is distributed", **_loose)(level_before(_level))
    row(LEVELS, f"auto_mixed_precision {_level}, after it", **_loose)(level_after(_level))


def built(level, scale=1.0, **kwargs):
    def fn(s):
        net = s.net()
        optimizer = nn.Momentum(net.trainable_params(), 2e-2, 0.9, loss_scale=scale)
        step = amp.build_train_network(net, optimizer, nn.MSELoss(), level=level, **kwargs)
        losses = [step(*pair(i, s)) for i in range(3)]
        return losses, {p.name: p.value() for p in optimizer.parameters}
    return fn


for _level in ("O0", "O1", "O3", "auto"):
    _loose = {} if _level == "O0" else {"rtol": HALF}
    row(LEVELS, f"build_train_network {_level}", **_loose)(built(_level))
# MindSpore runs other loss scale managers on Ascend and GPU only
row(LEVELS, "build_train_network O2, FixedLossScaleManager", rtol=HALF)(
    built("O2", 128.0, loss_scale_manager=amp.FixedLossScaleManager(128.0, drop_overflow_update=False)))
row(LEVELS, "build_train_network O0, no loss scale manager, keep_batchnorm_fp32")(
    built("O0", loss_scale_manager=None, keep_batchnorm_fp32=False))


@row(LEVELS, "custom_mixed_precision(white_list=), before", rtol=HALF)
def custom_white(s):
    white = [*amp.get_white_list(), nn.Tanh]
    net = amp.custom_mixed_precision(seeded(Net()), white_list=white)
    return trained_at(s, s.net(net, s.mesh and s.plan()))


@row(LEVELS, "custom_mixed_precision(black_list=), after", rtol=HALF)
def custom_black(s):
    return trained_at(s, amp.custom_mixed_precision(s.net(), black_list=amp.get_black_list()))


# -- cells ----------------------------------------------------------------------------------------------------------------
@row(CELLS, "net.to_float(float16), before", rtol=HALF)
def half_before(s):
    net = seeded(Net()).to_float(ms.float16)
    return trained_at(s, s.net(net, s.mesh and s.plan()))


@row(CELLS, "net.to_float(float16), after", rtol=HALF)
def half_after(s):
    return trained_at(s, s.net().to_float(ms.float16))


@row(CELLS, "float16 parameters", rtol=HALF)
def half_parameters(s):
    net = seeded(Net())
    for p in net.get_parameters():
        p.set_dtype(ms.float16)
    net = s.net(net, s.mesh and s.plan())
    x, y = (s.sequence(random(i, 8, 4, n), ms.float16) for i, n in ((1, 7), (2, 5)))
    return ms.value_and_grad(lambda x: ((net(x) - y) ** 2).mean(), 0, net.trainable_params())(x)


# -- scaling --------------------------------------------------------------------------------------------------------------
def scaled(s, scaler, overflow_at=None, level="O0"):
    """The loop of MindSpore's tutorial on mixed precision; at one step an element of one rank's rows is infinite."""
    net = amp.auto_mixed_precision(s.net(), level)
    optimizer, loss_fn = nn.SGD(net.trainable_params(), 2e-2, momentum=0.9), nn.MSELoss()
    grad_fn = ms.value_and_grad(lambda x, y: scaler.scale(loss_fn(net(x), y)), None, optimizer.parameters)
    seen = []
    for i in range(5):
        x, y = random(10 + i, 8, 4, 7), random(30 + i, 8, 4, 5)
        if i == overflow_at:
            y[6, 3, 1] = np.inf
        loss, grads = grad_fn(s.sequence(x), s.sequence(y))
        loss, grads = scaler.unscale(loss), scaler.unscale(grads)
        finite = amp.all_finite(grads)
        if finite:
            optimizer(grads)
        scaler.adjust(finite)
        seen.append((loss, bool(finite), float(scaler.scale_value.asnumpy())))
    return seen, [p.value() for p in optimizer.parameters]


rows(SCALING, {
    "amp.StaticLossScaler": lambda s: scaled(s, amp.StaticLossScaler(SCALE)),
    "amp.DynamicLossScaler, an overflow on one rank": lambda s: scaled(s, amp.DynamicLossScaler(SCALE, 2, 2), 2),
})


@row(SCALING, "amp.DynamicLossScaler with O2", rtol=HALF)
def dynamic_half(s):
    return scaled(s, amp.DynamicLossScaler(SCALE, 2, 2), 1, "O2")


@row(SCALING, "amp.FixedLossScaleManager, amp.DynamicLossScaleManager by hand")
def managers(s):
    return [managed(s, amp.FixedLossScaleManager(64.0)), managed(s, amp.DynamicLossScaleManager(2.0 ** 10, 2, 2))]


def managed(s, manager):
    net = s.net()
    grad_fn = ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean() * manager.get_loss_scale(),
                                None, net.trainable_params())
    optimizer, seen = nn.SGD(net.trainable_params(), 2e-2), []
    for i in range(3):
        x, y = random(10 + i, 8, 4, 7), random(30 + i, 8, 4, 5)
        if i == 1:
            x[5, 0, 3] = np.nan
        scale = manager.get_loss_scale()
        loss, grads = grad_fn(s.sequence(x), s.sequence(y))
        finite = bool(amp.all_finite(grads))
        if finite:
            optimizer(tuple(g / scale for g in grads))
        manager.update_loss_scale(not finite)
        seen.append((loss, finite, scale))
    return seen, values(net)


@row(SCALING, "optimizer's loss_scale")
def optimizer_scale(s, net):
    return trained(s, net, step_of(net, nn.Momentum(net.trainable_params(), 2e-2, 0.9, loss_scale=SCALE),
                                   lambda out, y: ((out - y) ** 2).mean() * SCALE))


@row(SCALING, "amp.all_finite, of any rank's infinity, NaN or neither")
def all_finite(s):
    seen = []
    for bad in (None, np.inf, -np.inf, np.nan):
        x = random(1, 8, 6)
        if bad is not None:
            x[7, 2] = bad
        seen.append(bool(amp.all_finite((s.data(x), s.whole(random(2, 3)), Tensor(random(3, 2))))))
    return seen
