# SPDX-License-Identifier: Apache-2.0
"""Mixed precision on four ranks: values and gradients within bfloat16's rounding, sums over ranks in `reduce_dtype`; the
norm of gradients is one device's on any layout; seeds that differ are refused.
"""
import copy
import itertools
import math
from contextlib import nullcontext

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DTensor, MixedPrecisionPolicy, comm, distribute_module, distribute_tensor, replicate
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.optim import clip_grad_norm_
from tests.operands import Built, R, S, data, mesh_1d
from tests.sharding.cases_replicate import BF16, READERS, ROUNDING, filled, gradients, one_device
from tests.support import counted, equal, refusal, same_on_all_ranks


def scale(width: int) -> nn.Cell:
    """x * weight."""
    return Built(lambda c, x: x * c.weight, weight=Parameter(Tensor(np.ones(width, np.float32)), name="weight"))


def summands_of_a_gradient_are_added_up_in_reduce_dtype_on_every_axis(world, grid):
    """Three ranks' summands are half a unit in the last place of the first rank's: bfloat16 loses or rounds them."""
    small = 2.0**-9
    x = DTensor.from_local(Tensor(np.full((1, 4), 1.0 if world.rank == 0 else small, np.float32)), grid, [S(0), S(0)])
    # without a bucket it is one all-reduce over both axes, as for a parameter in its own dtype
    ways = ((replicate, {"bucket_mb": 25}, (["all_reduce"] * 2,)), (md.fully_shard, {}, (["all_reduce", "reduce_scatter"],)),
            (replicate, {"bucket_mb": 0}, (["all_reduce"], ["all_reduce"] * 2)))
    for (wrap, how, moves), (reduce_dtype, dtype) in itertools.product(ways, ((ms.float32, "Float32"), (None, "BFloat16"))):
        net = wrap(distribute_module(scale(4), grid["tp"]), mesh=grid["dp"],
                   mp_policy=MixedPrecisionPolicy(ms.bfloat16, reduce_dtype), **how)
        with comm.record() as events:
            _, (grad,) = md.value_and_grad(lambda t, net=net: net(t).sum(), None, net.trainable_params())(x)
        moved = [e for e in events if e.phase == "backward" and "reduce" in e.op]
        assert [e.op for e in moved] in moves and {e.dtype for e in moved} == {dtype}, moved
        got = grad.full_tensor().asnumpy()
        assert grad.dtype == ms.float32 and np.allclose(got, 1.0, atol=2 * 2.0**-7), got
        assert (got == 1 + 3 * small).all() if reduce_dtype else (got != 1 + 3 * small).all(), got


def a_tied_table_has_both_gradients_in_float32(world):
    make, x = READERS["tied"]
    mesh = mesh_1d(4, "dp")
    net = replicate(filled(make()), mesh=mesh, mp_policy=BF16)
    assert net.head.weight is net.table.embedding_table
    got = gradients(net, Tensor(np.array_split(x, 4)[world.rank]))
    equal(got[1:], one_device(make, x, mesh)[1:], rtol=ROUNDING)


def inputs_outputs_errors_copies_and_what_recomputes(world):
    mesh, rows = mesh_1d(4, "dp"), Tensor(np.ones((2, 6), np.float32))
    asked = MixedPrecisionPolicy(ms.bfloat16, ms.float32, output_dtype=ms.float32)
    net = replicate(filled(nn.SequentialCell(nn.Dense(6, 5), nn.Dense(5, 3))), mesh=mesh, mp_policy=asked)
    assert net(rows).dtype == ms.float32
    twin = copy.deepcopy(net)
    for p in twin.trainable_params():
        p.set_data(p * 2)
    assert not np.allclose(twin(rows).full_tensor().asnumpy(), net(rows).full_tensor().asnumpy()), "computes with its own"
    refusal(lambda: net(Tensor(np.ones((2, 7), np.float32))), (RuntimeError, ValueError))
    assert "weight" not in net[0].__dict__ and net[0].weight.dtype == ms.float32  # no copy is left behind
    plain = replicate(filled(nn.Dense(6, 5)), mesh=mesh,
                      mp_policy=MixedPrecisionPolicy(ms.bfloat16, cast_forward_inputs=False))
    assert plain(rows).dtype == ms.float32, "a float32 input stays, and wins"
    assert "has a policy already" in refusal(lambda: BF16.apply(net), ConfigError)
    told = []
    for early in (True, False):  # recompute() before the policy, or not at all
        cell = replicate(filled(nn.SequentialCell(nn.Dense(6, 5), nn.Dense(5, 3))), mesh=mesh)
        if early:
            cell[0].recompute()
        BF16.apply(cell)
        assert cell(rows).dtype == ms.bfloat16
        told.append(gradients(cell, rows))
    for g, w in zip(*told, strict=True):
        equal(g.float(), w.float())
    want = gradients(net, rows)
    net[0].recompute()
    for g, w in zip(gradients(net, rows), want, strict=True):
        equal(g.float(), w.float())


def a_second_derivative_goes_through_the_copies(world):
    """In float64, as MindSpore's CPU kernels differentiate nothing twice in 16 bits."""
    w = distribute_module(filled(scale(4)), mesh_1d(4, "tp"))
    MixedPrecisionPolicy(ms.float64, ms.float32).apply(w)
    x = Tensor(np.arange(32, dtype=np.float32).reshape(8, 4) / 4)
    dx = distribute_tensor(x, w.weight.device_mesh, [S(0)])

    def slope(t):
        return md.grad(lambda s: ops.square(w(s)).sum())(t).sum()
    got = md.grad(slope, None, w.trainable_params())(dx)
    got = got[0] if isinstance(got, tuple | list) else got
    assert got.dtype == ms.float32
    equal(got, 4 * (x.asnumpy() * w.weight.full_tensor().asnumpy()).sum(0))  # d/dw of sum 2 w^2 x


SHAPES = ((6, 5), (5,), (5, 3))
LAYOUTS = ([S(0), R], [R, S(0)], [S(1), S(0)])  # uneven shards among them


def the_norm_is_the_global_one(world, grid):
    grads = [distribute_tensor(Tensor(np.full(s, 2.0, np.float32)), grid, p) for s, p in zip(SHAPES, LAYOUTS)]
    assert abs(float(clip_grad_norm_(grads, 1e9)) - 2 * np.sqrt(30 + 5 + 15)) < 1e-4


def a_norm_of_large_or_spoiled_gradients_is_one_devices_on_every_rank(world, grid):
    x = data(3, 6, 5).asnumpy()
    spoiled = x.copy()
    spoiled[5, 4] = np.nan  # of the last rank
    for placements in (*LAYOUTS, [S(0), S(1)]):
        grads = [distribute_tensor(Tensor(v), grid, placements, src_data_rank=None) for v in (x, spoiled)]
        for p in (math.inf, -math.inf, 2.0, 3.0):
            for device in (False, True):
                with rehearsal("GPU") if device else nullcontext():
                    norms = [float(clip_grad_norm_(grads[:n], math.inf, p)) for n in (1, 2)]
                equal(norms[0], np.linalg.norm(x.reshape(-1), p), f"{p} {placements}")
                assert math.isnan(norms[1]), (p, placements, device)
    grad = distribute_tensor(Tensor(x * np.float32(1e30)), grid, [S(0), R])
    equal(clip_grad_norm_([grad], 1.0), np.linalg.norm(x.astype(np.float64)) * 1e30)
    equal(grad, x / np.linalg.norm(x))


def seeds_that_differ_are_refused_on_all_ranks(world, grid):
    x = data(3, 6, 5)
    y = distribute_tensor(x, grid, [S(0), R], src_data_rank=None)
    for draw in (lambda: md.randn((5, 3), grid, [S(0), R]), lambda: mint.nn.functional.dropout(y, 0.5),
                 lambda: md.init.normal_(md.empty((5, 3), device_mesh=grid))):
        ms.set_seed(70 + world.rank)  # what many a script does with NumPy's
        text = same_on_all_ranks(world, refusal(draw, ConfigError))
        assert "rank 3: seed 73" in text, text
    ms.set_seed(70)
    with counted({("all_gather_object", "forward"): 1}):
        for _ in range(3):
            md.randn((5, 3), grid, [S(0), R])
