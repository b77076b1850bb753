# SPDX-License-Identifier: Apache-2.0
"""Real ranks at the library's doors: NumPy on the left, few logits, moved hooks, wrong shards, styles after replicate."""
import itertools
import operator

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, debug, distribute_tensor, loss_parallel, replicate, value_and_grad
from ms_dtensor.errors import ImplicitCommError, LayoutError, MixedOperandError, OpRuleError
from tests.dist.operands import R, S, data, filled, mesh_1d, mesh_2d, placed
from tests.dist.support import counted, equal, refusal, refused_alike, same_on_all_ranks
from tests.tiers import sampled


def few_logits_stay_sharded_in_a_loss(world, line):
    weight = Tensor(np.float32([0.5, 1, 2, 1.5]))
    x, y = data(1, 8, 4) * 3, Tensor(np.array([0, 3, 1, 1, 2, -1, 0, -1], np.int32))
    dx = distribute_tensor(x, line, [S(1)])
    fns = (ops.cross_entropy, mint.nn.functional.cross_entropy)
    options = ({}, {"label_smoothing": 0.1}, {"weight": weight}, {"weight": weight, "label_smoothing": 0.1})
    for shift, (reduction, more) in enumerate(itertools.product(("none", "mean", "sum"), options)):
        how = {"ignore_index": -1, "reduction": reduction, **more}
        want = ms.value_and_grad(lambda t: ops.cross_entropy(t, y, **how), 0)(x)
        for fn in sampled(fns, 2, shift + shift // 4):
            if fn is not ops.cross_entropy and len(more) == 2 and reduction == "mean":
                continue  # mint selects the labels that count: a shape that depends on data, which is refused
            with counted() as count, loss_parallel():
                got = value_and_grad(lambda t: fn(t, y, **how), 0)(dx)
            equal(got, want, f"{fn.__name__} {how}")
            assert got[1].placements == (S(1),)
            if fn is not ops.cross_entropy:  # which moves rows, too; the block lets no logits be gathered
                assert {op for op, _ in count} <= {"all_reduce"}, (how, count)
    with loss_parallel():
        assert "inside loss_parallel()" in refusal(lambda: mint.sort(dx, dim=1), ImplicitCommError)


def numpy_on_the_left_is_a_number_or_refused(world, line):
    x = data(2, 6, 3)
    dx, whole = distribute_tensor(x, line, [S(0)]), x.asnumpy()
    names = "add sub mul truediv floordiv mod pow eq ne lt le gt ge"
    for name in names.split():
        fn = getattr(operator, name)
        for number in (np.float32(2), np.float64(whole[1, 1]), np.int64(2), np.array(2.0)):
            got = fn(number, dx)
            assert isinstance(got, DTensor), (name, got)
            with np.errstate(all="ignore"):
                equal(got, fn(np.float32(number), whole).astype(got.full_tensor().asnumpy().dtype), f"{name} {number!r}", 1e-4)
    for name in (*names.split(), "matmul", "and_", "or_", "xor", "lshift", "iadd", "imul", "itruediv"):
        told = same_on_all_ranks(world, refusal(lambda n=name: getattr(operator, n)(whole.copy(), dx), MixedOperandError))
        assert "a numpy.ndarray meets a DTensor" in told and "full_tensor().asnumpy()" in told, (name, told)
    assert "NumPy was given a DTensor" in refusal(lambda: np.exp(dx), MixedOperandError)
    assert "divmod" in refusal(lambda: divmod(np.float32(2), dx), MixedOperandError)
    equal(np.bool_(True) & (dx > 0), whole > 0)


def memory_questions_are_answered_alike(world):
    x = distribute_tensor(data(3, 3, 2), mesh_1d(), [S(0)])  # one rank has nothing
    assert x.is_contiguous() is True and x.storage_offset() == 0 and x.stride() == (2, 1)
    for view in (x.T, x[1:], x.reshape(6)):
        for ask in ("is_contiguous", "storage_offset", "stride"):
            same_on_all_ranks(world, refusal(getattr(view, ask), OpRuleError))
    assert x.T.contiguous().clone().is_contiguous() is True


def handles_of_moved_hooks_remove_them(world):
    x = data(4, 8, 6)

    def grads(net, t):
        return ms.grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(t)
    for bucket, frozen in ((25, False), (0, True)):  # frozen: while it is laid out
        net, plain = filled(nn.Dense(6, 4)), filled(nn.Dense(6, 4))
        scaled = [lambda g: 2 * g, lambda g: 3 * g, lambda g: 5 * g, lambda g: 7 * g]
        handles = [net.weight.register_hook(fn) for fn in scaled]
        net.weight.register_hook(lambda g: 11 * g)  # nobody keeps its handle
        handles[1].remove()
        want = grads(plain, x)
        net.weight.requires_grad = not frozen
        net = md.parallelize_module(net, mesh_2d()["tp"], ColwiseParallel(use_local_output=False))
        handles[2].remove()
        replicate(net, mesh=mesh_2d()["dp"], bucket_mb=bucket)
        net.weight.requires_grad = True
        mine = distribute_tensor(x, mesh_2d(), [S(0), R])
        for remove, factor in ((None, 2 * 7 * 11), (0, 7 * 11), (3, 11), (3, 11)):
            if remove is not None:
                handles[remove].remove()
            got = grads(net, mine)
            equal(got[0], factor * want[0].asnumpy(), f"{bucket} {factor}")
            equal(got[1], want[1], f"{bucket} bias")


def a_wrong_shard_is_told_by_all_ranks(world, line):
    wrong = data(6, 3 if world.rank == 2 else 2, 3)
    flat = data(6, 3) if world.rank == 2 else data(6, 2, 3)
    half = data(6, 2, 3).astype(ms.float16 if world.rank == 1 else ms.float32)
    ways = [lambda: DTensor.from_local(wrong, line, [S(0)], shape=(8, 3)), lambda: DTensor.from_local(wrong, line, [S(0)]),
            lambda: DTensor.from_local(flat, line, [S(1)]), lambda: DTensor.from_local(half, line, [S(0)], shape=(8, 3))]
    for i, way in enumerate(ways):
        with debug.checks():
            told = refusal(way, LayoutError)
        assert "do not make one tensor" in told and f"rank {1 if i == 3 else 2} holds" in told, told
        same_on_all_ranks(world, told)
    for run_check in ({"shape": (8, 3)}, {}):
        same_on_all_ranks(world, refusal(lambda o=run_check: DTensor.from_local(wrong, line, [S(0)], run_check=True, **o), LayoutError))
    same_on_all_ranks(world, refusal(lambda: DTensor.from_local(flat, line, [S(1)], run_check=True), LayoutError))
    x = distribute_tensor(data(7, 8, 3), line, [S(0)])
    cut = md.local_map(lambda t: t[1:] if world.rank == 3 else t, [S(0)], out_shapes=((8, 3),))
    with debug.checks():
        told = refusal(lambda: cut(x), LayoutError)
    assert "rank 3 holds" in told
    same_on_all_ranks(world, told)
    with debug.checks():
        equal(DTensor.from_local(data(6, 2, 3), line, [S(0)], shape=(8, 3)), np.tile(data(6, 2, 3).asnumpy(), (4, 1)))


def styles_after_replicate_are_refused_with_the_order(world):
    net = replicate(nn.Dense(6, 4), mesh=mesh_2d()["dp"])
    before = net.weight
    told = refused_alike(world, lambda: md.parallelize_module(net, mesh_2d()["tp"], ColwiseParallel()), LayoutError)
    assert net.weight is before and "parallelize_module(...) first, then replicate" in told
    assert "either order" not in replicate.__doc__ and "after tensor-parallel styles" in replicate.__doc__


def methods_and_augmented_assignment_give_what_one_device_gives(world):
    a = np.array([[1, 2, -3.5], [2, 2, 0], [5, 1, 1], [0, 0, 7], [-4, 1, 2]], np.float32)  # one rank has nothing of it
    calls = {
        "float32": [lambda x: x.std(), lambda x: x.std(0), lambda x: x.var(0), lambda x: x.argmin(1), lambda x: x.argmin(),
                    lambda x: x.argmax(keepdim=True), lambda x: x.argsort(0), lambda x: x.sort()[1], lambda x: x.sort(0)[1],
                    lambda x: x.topk(2)[1], lambda x: x.count_nonzero(), lambda x: x.count_nonzero(0), lambda x: x.cumsum(0)],
        "int32": [lambda x: x.std(), lambda x: x.var(), lambda x: x.var(0), lambda x: x.cumsum(0), lambda x: x.trace(),
                  lambda x: x.argmin(0), lambda x: x.bitwise_and(1)],
        "int8": [lambda x: x.cumsum(0), lambda x: x.var(0), lambda x: x.trace()],
        "uint32": [lambda x: x.any(), lambda x: x.cumsum(0), lambda x: x.count_nonzero(0)],
        "bool": [lambda x: x.trace(), lambda x: x.frac(), lambda x: x.cumsum(0), lambda x: x & 1],
        "complex64": [lambda x: x.cumsum(0), lambda x: x.trace(), lambda x: x.count_nonzero()]}
    for shift, (dtype, fns) in enumerate(calls.items()):
        made = {"uint32": np.abs(a), "complex64": a * (1 + 2j), "bool": a > 0}.get(dtype, a)
        whole = Tensor(made.astype(dtype))
        for k, fn in enumerate(fns):
            want = fn(whole)
            for placements in sampled(([S(0), S(1)], [S(1), R], [S(0), S(0)]), 2, shift + k):
                got = fn(placed(whole, mesh_2d(), *placements)).full_tensor()
                assert (got.dtype, got.shape) == (want.dtype, want.shape), (dtype, k, placements, got, want)
                close = np.allclose(got.asnumpy(), want.asnumpy(), rtol=1e-5, atol=1e-5)
                assert close, (dtype, k, placements, got, want)

    def residual(x, w):
        h = x * 1
        kept = h
        h += w
        h *= x
        h -= kept.std()
        h /= kept * kept + 2
        return (h * kept + kept.cumsum(0)).sum()
    for placements in ([S(0), S(1)], [S(1), R]):
        got = value_and_grad(residual, (0, 1))(*(distribute_tensor(data(k, 5, 6), mesh_2d(), placements) for k in (1, 2)))
        want = ms.value_and_grad(residual, (0, 1))(data(1, 5, 6), data(2, 5, 6))
        equal(got[0], want[0])
        equal(got[1], want[1], str(placements), 1e-4)
