# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own gradient functions."""
from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from tests.surface.table import row, values

GROUP = "gradients"


def loss_of(net):
    def loss(x, y):
        return ((net(x) - y) ** 2).mean()
    return loss


@row(GROUP, "ms.value_and_grad over weights")
def value_and_grad(s):
    net = s.net()
    return ms.value_and_grad(loss_of(net), None, net.trainable_params())(*s.batch())


@row(GROUP, "ops.GradOperation(get_all, get_by_list)")
def grad_operation(s):
    net = s.net()
    return ops.GradOperation(get_all=True, get_by_list=True)(loss_of(net), net.trainable_params())(*s.batch())


@row("training cells", "nn.TrainOneStepCell(nn.WithLossCell)")
def train_one_step(s):
    net = s.net()
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Adam(net.trainable_params(), 1e-2))
    return [step(*s.batch()) for _ in range(5)], values(net)
