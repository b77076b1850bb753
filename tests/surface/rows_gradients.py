# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own gradient functions."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from tests.surface.table import random, row, rows

GROUP = "gradients"


def loss_of(net):
    def loss(x, y):
        return ((net(x) - y) ** 2).mean()
    return loss


def with_aux(net):
    def loss(x, y):
        out = net(x)
        return ((out - y) ** 2).mean(), out, (out - y).abs().max()
    return loss


COMPILED = ("MindSpore compiles what it differentiates here, and a compiled graph does not dispatch: take rows of the "
            "Jacobian with ms.vjp or ms.grad")


def bent(a, b):
    """A small function with a Jacobian: [4, 3] and [3] -> [4]."""
    return (ops.sin(a) * b).sum(-1) + (a * a).sum(-1)


def bent_aux(a, b):
    return bent(a, b), a * b


def curved(s):
    """`bent` and its arguments, rows cut as a batch."""
    return bent, s.data(random(11, 4, 3)), s.whole(random(12, 3))


rows(GROUP, {
    "ms.value_and_grad over weights":
        lambda net, x, y: ms.value_and_grad(loss_of(net), None, net.trainable_params())(x, y),
    "ms.value_and_grad of an input": lambda net, x, y: ms.value_and_grad(loss_of(net))(x, y),
    "ms.value_and_grad of inputs and weights":
        lambda net, x, y: ms.value_and_grad(loss_of(net), (1, 0), net.trainable_params())(x, y),
    "ms.value_and_grad(has_aux=True)":
        lambda net, x, y: ms.value_and_grad(with_aux(net), None, net.trainable_params(), has_aux=True)(x, y),
})


@row(GROUP, "ms.value_and_grad(return_ids=True), ms.get_grad")
def ids(net, x, y):
    value, grads = ms.value_and_grad(loss_of(net), 0, net.trainable_params(), return_ids=True)(x, y)
    return value, ms.get_grad(grads, 0), ms.get_grad(grads, net.up.weight), ms.get_grad(grads, net.down.bias)


rows(GROUP, {
    "ms.grad of an input": lambda net, x, y: ms.grad(loss_of(net))(x, y),
    "ms.grad(grad_position=(0, 1), weights)":
        lambda net, x, y: ms.grad(loss_of(net), (0, 1), ms.ParameterTuple(net.trainable_params()))(x, y),
    "ms.grad of one weight, has_aux=True":
        lambda net, x, y: ms.grad(with_aux(net), None, net.down.weight, has_aux=True)(x, y),
})


@row(GROUP, "ms.grad of ms.grad")
def second_order(s):
    a, b = s.data(random(11, 4, 3)), s.whole(random(12, 3))

    def inner(a, b):  # MindSpore's second derivative of a sum without keepdims, squared, is 0
        return (ops.sin(a) ** 3 * b).sum()
    return ms.grad(lambda a, b: (ms.grad(inner, 0)(a, b) * b).sum(), (0, 1))(a, b)


rows(GROUP, {
    "ops.GradOperation()": lambda net, x, y: ops.GradOperation()(loss_of(net))(x, y),
    "ops.GradOperation(get_all)": lambda net, x, y: ops.GradOperation(get_all=True)(loss_of(net))(x, y),
    "ops.GradOperation(get_by_list)":
        lambda net, x, y: ops.GradOperation(get_by_list=True)(loss_of(net), net.trainable_params())(x, y),
})


@row(GROUP, "ops.GradOperation(get_all, get_by_list)")
def grad_operation(net, x, y):
    return ops.GradOperation(get_all=True, get_by_list=True)(loss_of(net), net.trainable_params())(x, y)


@row(GROUP, "ops.GradOperation(sens_param) with a scalar")
def grad_operation_sens(net, x, y):
    return ops.GradOperation(get_by_list=True, sens_param=True)(loss_of(net), net.trainable_params())(
        x, y, Tensor(3.0, ms.float32))


@row(GROUP, "ops.GradOperation(get_all, get_by_list, sens_param) of a cell")
def grad_operation_cell(net, x, y):
    return ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(net, net.trainable_params())(x, y)


class GradNet(nn.Cell):
    """The cell of MindSpore's own documentation of GradOperation."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net
        self.weights = ms.ParameterTuple(net.trainable_params())
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, x, y):
        return self.grad(self.net, self.weights)(x, y)


@row(GROUP, "ops.GradOperation inside a cell of its own")
def grad_net(net, x, y):
    return GradNet(nn.WithLossCell(net, nn.MSELoss()))(x, y)


@row(GROUP, "ms.vjp")
def vjp(s):
    f, a, b = curved(s)
    out, pull = ms.vjp(f, a, b)
    return out, pull(s.data(random(13, 4)))


@row(GROUP, "ms.vjp(weights=)")
def vjp_of_weights(net, x, y):
    out, pull = ms.vjp(net, x, weights=ms.ParameterTuple(net.trainable_params()))
    return out, pull(y)


@row(GROUP, "ms.vjp(has_aux=True)")
def vjp_aux(s):
    _, a, b = curved(s)
    out, pull, aux = ms.vjp(bent_aux, a, b, has_aux=True)
    return out, pull(s.data(random(13, 4))), aux


@row(GROUP, "ms.jvp", refused=COMPILED)
def jvp(s):
    f, a, b = curved(s)
    return ms.jvp(f, (a, b), (s.data(random(14, 4, 3)), s.whole(random(15, 3))))


@row(GROUP, "ms.jacrev", refused=COMPILED)
def jacrev(s):
    f, a, b = curved(s)
    return ms.jacrev(f)(a, b)


@row(GROUP, "ms.jacfwd", refused=COMPILED)
def jacfwd(s):
    f, a, b = curved(s)
    return ms.jacfwd(f)(a, b)


@row(GROUP, "ops.stop_gradient")
def stop_gradient(net, x, y):
    def loss(x, y):
        out = net(x)
        return ((out - y) ** 2 * ops.stop_gradient(out.abs())).mean()
    return ms.value_and_grad(loss, 0, net.trainable_params())(x, y)


class Clamped(nn.Cell):
    """A gradient of one's own."""

    def construct(self, x):
        return x.clamp(-0.5, 0.5)

    def bprop(self, x, out, dout):
        return (dout * 0.5 + out * 0,)


@row(GROUP, "a cell with bprop")
def own_bprop(net, x, y):
    clamped = Clamped()
    return ms.value_and_grad(lambda x, y: ((clamped(net(x)) - y) ** 2).mean(), 0, net.trainable_params())(x, y)


@row(GROUP, "rows of a Jacobian by ms.vjp")
def jacobian_by_rows(s):
    f, a, b = curved(s)
    _, pull = ms.vjp(f, a, b)
    return [pull(s.data(unit)) for unit in np.eye(4, dtype=np.float32)]
