# SPDX-License-Identifier: Apache-2.0
"""Modes nest in any order, per thread, and leave nothing behind."""
import itertools
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DFunction, DTensor, Shard, SkipDTensorDispatch, implicit_replication, local_map, redistribution_policy
from ms_dtensor.debug import checks
from ms_dtensor.dispatch import modes
from ms_dtensor.errors import ConfigError, DTensorError, MixedOperandError
from tests.msrun import PATIENCE

A = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def x():
    return md.distribute_tensor(Tensor(A), md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), [Shard(0)])


BLOCKS = {"skip": lambda: SkipDTensorDispatch(), "keep": lambda: SkipDTensorDispatch({mint.matmul}),
          "implicit": implicit_replication, "warn": lambda: redistribution_policy("warn"),
          "explicit": lambda: redistribution_policy("explicit"), "loss": md.loss_parallel,
          "checks": lambda: checks(gradients=True)}


@pytest.mark.parametrize("names", list(itertools.permutations(BLOCKS, 3)))
def test_nested_in_any_order_and_left_in_any_order(names):
    for order in itertools.permutations(range(3)):
        blocks = [BLOCKS[n]() for n in names]
        for b in blocks:
            b.__enter__()
        now = modes.mode.get()
        assert now.skip == bool({"skip", "keep"} & set(names))
        assert now.implicit_replication == ("implicit" in names)
        assert now.no_gather == ("loss" in names) and now.check_gradients == ("checks" in names)
        last = [n for n in names if n in ("warn", "explicit")]
        assert now.policy == (last[-1] if last else "auto")
        for i, k in enumerate(order):
            blocks[k].__exit__(None, None, None)
            left = [names[j] for j in sorted(set(range(3)) - set(order[:i + 1]))]
            assert modes.mode.get().implicit_replication == ("implicit" in left)
            assert modes.mode.get().check_rules == ("checks" in left)
        assert modes.mode.get() is modes.DEFAULT


@pytest.mark.parametrize("name", BLOCKS)
def test_reentrant_reusable_and_exception_safe(name):
    block = BLOCKS[name]()
    for _ in range(2):
        with block:
            inside = modes.mode.get()
            with block:
                assert modes.mode.get() == inside
            assert modes.mode.get() == inside
            with pytest.raises(KeyError), block:
                raise KeyError
            assert modes.mode.get() == inside
        assert modes.mode.get() is modes.DEFAULT


def test_per_thread_even_for_a_shared_block(x):
    block, seen, gate = SkipDTensorDispatch(), [], threading.Barrier(2)

    def other():
        seen.append(modes.mode.get().skip)
        with block:
            gate.wait(PATIENCE)
            gate.wait(PATIENCE)
        seen.append(modes.mode.get().skip)
    thread = threading.Thread(target=other)
    thread.start()
    gate.wait(PATIENCE)
    assert isinstance(x + x, DTensor)  # the other thread skips, this one does not
    with block:
        assert not isinstance(x + x, DTensor)
        gate.wait(PATIENCE)
        thread.join()
        assert not isinstance(x + x, DTensor)
    assert seen == [False, False] and isinstance(x + x, DTensor)


def test_inside_skip_everything_is_local(x):
    with SkipDTensorDispatch():
        results = [x + x, x + 1, Tensor(A) * x, mint.matmul(x, Tensor(np.ones((2, 2), np.float32))), x[0], x[:, 1],
                   x[1:3], x.clone(), ops.stack([x, x]), ops.concat([x, Tensor(A)]), ops.full_like(x, 3), x.reshape((2, 4)),
                   ops.addn([x, x])]
        for r in results:
            assert isinstance(r, Tensor) and not isinstance(r, DTensor), r
    assert isinstance(x + 1, DTensor)


def test_setitem_inside_skip_writes_the_shard(x):
    with SkipDTensorDispatch():
        x[0] = 9.0
    np.testing.assert_array_equal(x.to_local().asnumpy()[0], 9.0)


def test_a_parameters_gradient_survives_skip(x):
    p = Parameter(x, name="p")

    def loss():
        with SkipDTensorDispatch():
            return (p * p).sum() + p[0].sum() + mint.cat([p, p]).sum()
    g, = ms.grad(loss, None, [p])()
    wanted = 2 * A + 2
    wanted[0] += 1
    np.testing.assert_allclose(g.to_local().asnumpy(), wanted)
    with SkipDTensorDispatch():  # the mode of the backward is not that of the forward
        g, = ms.grad(lambda: (p * 3).sum(), None, [p])()
    assert isinstance(g, DTensor)
    np.testing.assert_allclose(g.to_local().asnumpy(), np.full((4, 2), 3))


class Own(DFunction):
    in_placements, out_placements = ([Shard(0)],), [Shard(0)]
    forward = staticmethod(lambda ctx, t: t * 2)
    backward = staticmethod(lambda ctx, grad: grad * 2)


@pytest.mark.parametrize("keep", [[mint.matmul], {"matmul"}, ["MatMulExt"], "matmul", mint.matmul])
def test_no_skip_keeps_ops(x, keep):
    w = md.distribute_tensor(Tensor(np.array([[2, -3], [5, 7]], np.float32)), x.device_mesh)
    with SkipDTensorDispatch(no_skip=keep):
        assert isinstance(mint.matmul(x, w), DTensor)
        assert not isinstance(x + x, DTensor)
        assert not isinstance(Own.apply(x), DTensor)
        with SkipDTensorDispatch():
            assert not isinstance(mint.matmul(x, w), DTensor)


def test_no_skip_understands_public_names(x):
    for op, run in ((mint.transpose, lambda: mint.transpose(x, 0, 1)), ("concat", lambda: ops.concat([x, x])),
                    (ops.ReLU(), lambda: ops.relu(x)), (mint.add, lambda: x + x)):
        with SkipDTensorDispatch([op]):
            assert isinstance(run(), DTensor), op
    with pytest.raises(ConfigError, match="did you mean 'matmul'"):
        SkipDTensorDispatch(["matmull"])


def test_implicit_replication_and_policies(x):
    with pytest.raises(MixedOperandError):
        x + Tensor(A)
    with redistribution_policy("explicit"), implicit_replication():
        assert isinstance(x + Tensor(A), DTensor)
    with pytest.raises(MixedOperandError):
        x + Tensor(A)
    with pytest.raises(ConfigError):
        redistribution_policy("never")


def test_local_map_inside_any_mode_and_modes_inside_local_map(x):
    for name, make in BLOCKS.items():
        with make():
            def inner(a):
                assert type(a) is Tensor
                with SkipDTensorDispatch(), implicit_replication():
                    return a * 2
            before = modes.mode.get()
            out = local_map(inner, [Shard(0)], ([Shard(0)],))(x)
            assert isinstance(out, DTensor) != (name in ("skip", "keep")) and modes.mode.get() == before
            np.testing.assert_array_equal(out.asnumpy() if type(out) is Tensor else out.to_local().asnumpy(), 2 * A)
            nested = local_map(lambda a: local_map(lambda b: b + 1, [Shard(0)])(a), [Shard(0)], ([Shard(0)],))(x)
            assert modes.mode.get() == before and nested.shape == (4, 2)
    assert modes.mode.get() is modes.DEFAULT


@pytest.mark.parametrize("name", BLOCKS)
def test_an_error_inside_leaves_no_mode_and_no_recording(x, name):
    for wrong in (lambda t: t.reshape((3, 5)), lambda t: local_map(lambda a: 1 / 0, [Shard(0)])(t), lambda t: [].pop()):
        with pytest.raises((DTensorError, ZeroDivisionError, IndexError, ValueError, RuntimeError)):
            with BLOCKS[name]():
                md.value_and_grad(lambda t, w=wrong: w(t).sum(), 0)(x)
        assert modes.mode.get() is modes.DEFAULT
    g = md.value_and_grad(lambda t: (t * t).sum(), 0)(x)[1]
    np.testing.assert_array_equal(g.to_local().asnumpy(), 2 * A)


def test_each_thread_has_modes_and_default_mesh_of_its_own(x):
    seen = {}

    def work(name):
        for _ in range(20):
            with BLOCKS[name](), x.device_mesh:
                seen.setdefault(name, set()).add(modes.mode.get())
        seen[name].add(modes.mode.get())
    threads = [threading.Thread(target=work, args=(n,)) for n in BLOCKS]
    with redistribution_policy("explicit"):
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert modes.mode.get().policy == "explicit"
    for name in BLOCKS:
        with BLOCKS[name]():
            assert seen[name] == {modes.mode.get(), modes.DEFAULT}, name
