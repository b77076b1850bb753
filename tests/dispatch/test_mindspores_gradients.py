# SPDX-License-Identifier: Apache-2.0
"""What MindSpore's own gradients keep: frozen parameters by their values, leaves by aliases, and a recording that was left.

A local tensor that stands for a frozen parameter is one to it; an average or a later training writes where it lies, and a
second model that begins with the same values, as each fold of a cross validation does, was given what is there by then.
"""
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh, value_and_grad
from ms_dtensor.dispatch import patches
from ms_dtensor.dispatch.operands import recording
from tests.operands import Built

ROWS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
NUMBERS = itertools.count(1)  # of values that no other test has: MindSpore keeps them for the whole process


def power(x, e):
    return ops.pow(ops.abs(x) + 0.5, e)


def convolved(x, kernel):
    return ops.conv2d(x.reshape(-1, 1, 2, 3), kernel)


def frozen(op, how, values) -> nn.Cell:
    return Built(lambda c, x: how(op, x, c.weight), weight=Parameter(Tensor(values), requires_grad=False))


def by_local_tensors(op, x, weight):
    return md.DTensor.from_local(op(x.to_local(), weight.to_local()), x.device_mesh, [Shard(0)])


def by_local_map(op, x, weight):
    return md.local_map(op, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))(x, weight)


def directly(op, x, weight):
    return op(x, weight)


def by_function(again):
    """A DFunction whose backward takes a gradient beside what it saved; `again`: it may be differentiated again."""
    class Saved(md.DFunction):
        in_placements, out_placements, second_order = ([Shard(0)], [Replicate()], None), [Shard(0)], again

        @staticmethod
        def forward(ctx, x, weight, op):
            ctx.save_for_backward(x, weight)
            ctx.op = op
            return op(x, weight)

        @staticmethod
        def backward(ctx, dout):
            x, weight = ctx.saved_tensors
            return ms.grad(lambda t: (ctx.op(t, weight) * dout).sum())(x), None, None
    return lambda op, x, weight: Saved.apply(x, weight, op)


def handed_back(name):
    return lambda op, x, weight: op(x, HANDED_BACK[name](weight))


HANDED_BACK = {"a whole slice": lambda w: w[0:w.shape[0]], "all of it": lambda w: w[:],
               "a slice of a cast": lambda w: w.float()[:]}


def whole(cell, mesh):
    return md.fully_shard(cell, mesh=mesh, local_inputs=True, shard_placement_fn=lambda p: Replicate())


def laid_out(cell, mesh):
    return md.distribute_module(cell, mesh)


def copied(cell, mesh):
    return md.replicate(cell, mesh=mesh)


def plain(cell, mesh):
    return cell


WAYS = {"to_local": (by_local_tensors, laid_out), "to_local under replicate": (by_local_tensors, copied),
        "local_map": (by_local_map, laid_out),
        "a cell of local tensors that keeps it whole": (directly, whole),
        **{f"a DFunction{once}, {where}": (by_function(bool(once)), lay) for once in ("", " twice")
           for where, lay in {"laid out": laid_out, "under replicate": copied, "on one device": plain}.items()},
        **{name: (handed_back(name), laid_out) for name in HANDED_BACK}}
OPS = {"a power": (power, (6,)), "a convolution": (convolved, (1, 1, 2, 3))}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("way", WAYS)
def test_a_second_model_of_the_same_values_has_its_own(way, op):
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    (how, lay), (function, shape) = WAYS[way], OPS[op]
    values = (1 + np.random.default_rng(next(NUMBERS)).random(shape)).astype(np.float32)

    def gradient(cell):
        rows = Tensor(ROWS) if lay in (whole, plain) else md.distribute_tensor(Tensor(ROWS), mesh, [Shard(0)])
        out = ms.grad(lambda x: ops.tanh(cell(x)).sum())(rows)
        return (out if lay in (whole, plain) else out.to_local()).asnumpy()

    def made():
        cell = frozen(function, how, values)
        return lay(cell, mesh) or cell
    first = made()
    wanted = gradient(first)
    ops.assign(first.weight, first.weight * 3)  # as an average of weights does
    gradient(first)
    assert np.array_equal(gradient(made()), wanted)


# -- ops that hand a parameter back: an alias of the leaf, and a DTensor made of it would have no gradient, silently ---
FORMS = {
    "astype": lambda p: p.astype(ms.float32), "to": lambda p: p.to(ms.float32), "float": lambda p: p.float(),
    "cast": lambda p: ops.cast(p, ms.float32), "type_as": lambda p: p.type_as(p), "x[:]": lambda p: p[:],
    "x[0:2]": lambda p: p[0:2], "x[...]": lambda p: p[...], "narrow": lambda p: mint.narrow(p, 0, 0, 2),
    "pad by 0": lambda p: mint.nn.functional.pad(p, (0, 0)), "reshape": lambda p: p.reshape(2, 3),
    "view": lambda p: p.view(2, 3), "permute": lambda p: p.permute(0, 1), "broadcast_to": lambda p: p.broadcast_to((2, 3)),
    "expand_as": lambda p: p.expand_as(p), "squeeze": lambda p: p.squeeze(), "tile": lambda p: ops.tile(p, (1, 1)),
    "split": lambda p: mint.split(p, 2, 0)[0], "chunk": lambda p: mint.chunk(p, 1, 0)[0], "cat": lambda p: mint.cat([p], 0),
    "stack": lambda p: ops.stack([p])[0], "mint.stack": lambda p: mint.stack([p])[0], "clone": lambda p: p.clone(),
    "contiguous": lambda p: p.contiguous(), "dropout 0": lambda p: ops.dropout(p, 0.0),
    "Identity": lambda p: nn.Identity()(p),
    "swapaxes": lambda p: p.swapaxes(0, 0), "clamp": lambda p: p.clamp(-99, 99), "sum over none": lambda p: p * 1 + 0,
}


@pytest.mark.parametrize("name", FORMS)
def test_gradient_survives(name, cpu):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    array = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    p = Parameter(distribute_tensor(Tensor(array), mesh, [Replicate()]), name="w")
    fn = FORMS[name]
    value, (grad,) = value_and_grad(lambda: (fn(p) * fn(p)).sum(), None, [p])()
    assert value.item() == (array ** 2).sum()
    assert np.allclose(grad.to_local().asnumpy(), 2 * array)


@pytest.mark.parametrize("stop", [ops.stop_gradient, lambda p: p.detach(), lambda p: ops.stop_gradient(p.float())])
def test_a_stopped_gradient_stays_stopped(stop, cpu):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    array = np.random.default_rng(4).normal(size=(2, 3)).astype(np.float32)
    p = Parameter(distribute_tensor(Tensor(array), mesh, [Replicate()]), name="w")
    _, (grad,) = value_and_grad(lambda: (stop(p) * p).sum(), None, [p])()
    assert np.allclose(grad.to_local().asnumpy(), array)


# -- a function that raised inside `ms.grad`, before the first DTensor was made, has left MindSpore recording ----------
X = np.arange(6, dtype=np.float32).reshape(3, 2)


def _raise(t):
    raise ValueError("mine")


class _Raises(nn.Cell):
    def construct(self, t):
        return _raise(t * 2)


def _leave_recording(fn) -> None:
    """As a script does that meets DTensors later."""
    patches.uninstall()
    with pytest.raises(ValueError, match="mine"):
        ms.grad(fn)(Tensor(X))
    assert recording()


def _step():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    net = md.distribute_module(nn.Dense(2, 3), mesh)
    x = distribute_tensor(Tensor(X), mesh, None)
    ms.value_and_grad(lambda t: (net(t) ** 2).sum(), None, net.trainable_params())(x)


@pytest.mark.parametrize("fn", [_raise, _Raises()], ids=["function", "cell"])
def test_the_first_dtensor_ends_it(fn):
    _leave_recording(fn)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    distribute_tensor(Tensor(X), mesh, None)
    assert not recording()
    _step()


def test_the_first_dtensor_may_be_made_inside_a_gradient():
    _leave_recording(_raise)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def inside(t):
        return (md.DTensor.from_local(t, mesh, None).to_local() ** 2).sum()
    assert np.array_equal(ms.grad(inside)(Tensor(X)).asnumpy(), 2 * X)
    _step()


def test_a_gradient_around_the_first_dtensor_goes_on():
    patches.uninstall()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    def outer(t):
        inner = ms.grad(lambda u: (md.DTensor.from_local(u, mesh, None) ** 3).sum())(t * 2)
        assert recording()
        return inner.to_local().sum() if isinstance(inner, md.DTensor) else inner.sum()
    assert np.allclose(ms.grad(outer)(Tensor(X)).asnumpy(), 24 * X)


def test_experts_of_one_device_are_differentiated_after_it():
    """They are differentiated once, and took the gradient after the one that raised for a second."""
    x, one = Tensor(X), Tensor(np.ones((3, 1), np.float32))
    w1, w3, w2 = (Tensor(np.random.default_rng(i).normal(size=s).astype(np.float32)) for i, s in enumerate(
        ((2, 4, 2), (2, 4, 2), (2, 2, 4))))
    step = md.grad(lambda t: (md.moe(t, one, Tensor([[0], [1], [0]], ms.int32), w1, w2, w3) ** 2).sum())
    wanted = step(x).asnumpy()
    for time in range(2):
        _leave_recording(_raise)
        assert np.array_equal(step(x).asnumpy(), wanted), time
