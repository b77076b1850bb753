# SPDX-License-Identifier: Apache-2.0
"""Backwards that users write, a cell's `bprop` and a `_Function`'s: on any layout, cut and recomputed, they see whole values."""
import mindspore as ms
from mindspore import nn, ops

import ms_dtensor as md
from ms_dtensor import checkpoint_wrapper, fully_shard, replicate
from ms_dtensor.errors import MixedOperandError
from tests.cases import cases
from tests.operands import Built, R, S, data, filled, mesh_1d, mesh_2d, placed, weight
from tests.support import check_against_one_device, equal, mean_square, refusal, same_on_all_ranks


class Centred(nn.Cell):
    """Rows less their mean: a gradient of all rows."""

    def construct(self, x):
        return x - x.mean(0, keep_dims=True)

    def bprop(self, x, out, dout):
        return (dout - dout.mean(0, keep_dims=True),)


class Mean(nn.Cell):
    """Reads how many rows there are, has an argument that is no tensor, and gives two results."""

    def construct(self, x, factor=1.5):
        return ops.tanh(x) * factor, x.sum(0)

    def bprop(self, x, factor, out, dout):
        return (1 - (out[0] / factor) ** 2) * dout[0] * factor / x.shape[0] + dout[1], None


class Product(nn.Cell):
    """With a weight, whose gradient is a sum over rows; a bias of all columns, of which a row is handed back for each."""

    def construct(self, x, w, b):
        return x @ w + b

    def bprop(self, x, w, b, out, dout):
        return dout @ w.T, x.T @ dout * 2, dout


class Limited(ms._Function):
    """Its gradient is no longer than 1; of all ranks' elements."""

    @staticmethod
    def forward(ctx, x, factor=2.0):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor / ops.sqrt((grad * grad).sum()), None


class Exp(ms._Function):
    """Saves what it takes, what it gives, and what lies between."""

    @staticmethod
    def forward(ctx, x, w, b):
        y = x @ w
        out = ops.tanh(y)
        ctx.save_for_backward(x, w, y, out)
        return out + b

    @staticmethod
    def backward(ctx, grad):
        x, w, y, out = ctx.saved_tensors
        grad = grad * (1 - out * ops.tanh(y))
        return grad @ w.T, x.T @ grad, grad.sum(0)


class Apart(ms._Function):
    """Its context is set up by itself."""

    @staticmethod
    def forward(x):
        return x - x.mean(0, keep_dims=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output, *inputs)

    @staticmethod
    def backward(ctx, grad):
        out, x = ctx.saved_tensors
        return grad * out + x.mean()


LAYOUTS = [[S(0), R], [R, S(1)], [S(0), S(1)], [S(1), S(0)], [R, R]]


@cases(4, {f"a_bprop_sees_whole_values_{kind.__name__.lower()}": (kind, *shapes) for kind, *shapes in (
    (Centred, (7, 6)), (Mean, (7, 6)), (Product, (7, 6), (6, 5), (5,)),
    (Limited, (7, 6)), (Exp, (7, 6), (6, 5), (5,)), (Apart, (7, 6)))})
def whole_values(world, kind, *shapes):
    own, grid = (kind.apply if issubclass(kind, ms._Function) else kind()), mesh_2d()
    inputs = [data(i, *shape) for i, shape in enumerate(shapes)]

    def loss(*tensors):
        out = own(*[t * 1.5 for t in tensors])
        return (out[0].sin().sum() + (out[1] ** 2).sum()) if isinstance(out, tuple) else (out.sin() * (out + 1)).sum()
    for i, layout in enumerate(LAYOUTS):
        others = [LAYOUTS[(i + k) % 3] if t.ndim == 2 else [R, S(0)] for k, t in enumerate(inputs)]
        check_against_one_device(loss, inputs, [layout, *others[1:]], grid, f"{layout}")


def _net():
    return filled(Built(lambda self, x: self.last(self.product(self.centred(ops.tanh(self.first(x))), self.w, self.b)),
                        first=nn.Dense(6, 6), w=weight(6, 4), b=weight(4), last=nn.Dense(4, 3), product=Product(),
                        centred=Centred()), 3)


def _sharded(net, mesh):
    fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh)


WAYS = {"replicated": lambda net, mesh: replicate(net, mesh=mesh), "sharded": _sharded,
        "optimizer_cut": lambda net, mesh: replicate(net, mesh=mesh, zero1=True)}


@cases(4, {f"weights_of_a_bprop_get_the_gradient_of_all_rows_{way}{'_again' * again}": (way, again)
           for way in WAYS for again in (False, True)})
def weights(world, way, again):
    net, plain, line = _net(), _net(), mesh_1d()
    if again:
        checkpoint_wrapper(net)
    net = WAYS[way](net, line)
    for rows in (8, 3):
        x = data(rows, rows, 6)
        want = ms.value_and_grad(mean_square(plain), None, plain.trainable_params())(x)
        loss, grads = md.value_and_grad(mean_square(net), None, net.trainable_params())(placed(x, line, S(0)))
        equal([loss, *grads], [want[0], *want[1]], f"{rows} rows")


class Constant(nn.Cell):
    """Its gradient is a tensor that nobody has laid out."""

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (ops.ones(dout.shape, ms.float32),)


def a_plain_gradient_of_a_bprop_is_refused(world, line):
    cell, x = Constant(), placed(data(1, 8, 3), line, S(0))
    same_on_all_ranks(world, refusal(lambda: md.grad(lambda x: cell(x).sum())(x), MixedOperandError))
    with md.implicit_replication():
        equal(md.grad(lambda x: (cell(x) ** 2).sum())(x), ops.ones((8, 3)))
