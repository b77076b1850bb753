# SPDX-License-Identifier: Apache-2.0
"""What MindSpore keeps by its values: the gradients beside a frozen parameter are of the values that it has now.

A local tensor that stands for a frozen parameter is one to it; an average or a later training writes where it lies, and a
second model that begins with the same values, as each fold of a cross validation does, was given what is there by then.
"""
from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import ms_dtensor as md
from ms_dtensor import Replicate, Shard

pytestmark = pytest.mark.usefixtures("cpu")
ROWS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
NUMBERS = itertools.count(1)  # of values that no other test has: MindSpore keeps them for the whole process


def power(x, e):
    return ops.pow(ops.abs(x) + 0.5, e)


def convolved(x, kernel):
    return ops.conv2d(x.reshape(-1, 1, 2, 3), kernel)


class Frozen(nn.Cell):
    def __init__(self, op, how, values):
        super().__init__()
        self.op, self.how, self.weight = op, how, Parameter(Tensor(values), name="weight", requires_grad=False)

    def construct(self, x):
        return self.how(self.op, x, self.weight)


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
        cell = Frozen(function, how, values)
        return lay(cell, mesh) or cell
    first = made()
    wanted = gradient(first)
    ops.assign(first.weight, first.weight * 3)  # as an average of weights does
    gradient(first)
    assert np.array_equal(gradient(made()), wanted)
