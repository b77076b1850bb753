# SPDX-License-Identifier: Apache-2.0
"""AdamW against float64 NumPy, and the gradient norm, on plain tensors. Layouts are tested where ranks are."""
import math
from contextlib import nullcontext

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint

from ms_dtensor.errors import LayoutError
from ms_dtensor.internals import target
from ms_dtensor.internals.target import rehearsal
from ms_dtensor.optim import AdamW, adamw, clip_grad_norm_
from ms_dtensor.optim import arrays as storage

SHAPES = ((3, 5), (7,), (200, 400), (0, 4))  # the third is large enough for the fused kernel


def numpy_adamw(values, grads_of_steps, lr, betas, eps, decay):
    values = [v.astype(np.float64) for v in values]
    m, v2 = [np.zeros_like(v) for v in values], [np.zeros_like(v) for v in values]
    for t, grads in enumerate(grads_of_steps, 1):
        for i, g in enumerate(np.asarray(g, np.float64) for g in grads):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v2[i] = betas[1] * v2[i] + (1 - betas[1]) * g * g
            m_hat, v_hat = m[i] / (1 - betas[0] ** t), v2[i] / (1 - betas[1] ** t)
            values[i] = values[i] * (1 - lr * decay) - lr * m_hat / (np.sqrt(v_hat) + eps)
    return values


def arrays(seed, shapes=SHAPES):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.fixture(params=["host", "device"])
def branch(request):
    with nullcontext() if request.param == "host" else rehearsal("GPU"):
        yield request.param


def test_adamw_equals_numpy(branch):
    shapes = SHAPES if branch == "host" else SHAPES[:3]
    start, steps = arrays(0, shapes), [arrays(s, shapes) for s in range(1, 6)]
    params = [Parameter(Tensor(v), name=f"p{i}") for i, v in enumerate(start)]
    optimizer = AdamW(params, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    for grads in steps:
        optimizer([Tensor(g) for g in grads])
    for param, want in zip(params, numpy_adamw(start, steps, 1e-2, (0.9, 0.95), 1e-8, 0.1)):
        assert np.allclose(param.asnumpy(), want, rtol=2e-6, atol=2e-6)


def test_a_gradient_that_is_a_view_counts_as_what_it_shows():
    start, (base,) = arrays(0, [(500, 300)]), arrays(1, [(300, 510)])
    param = Parameter(Tensor(start[0]), name="w")
    grad = (Tensor(base) * 1)[:, 10:].T
    AdamW([param], 1e-2, (0.9, 0.95), 1e-8, 0.1)([grad])
    want = numpy_adamw(start, [[base[:, 10:].T]], 1e-2, (0.9, 0.95), 1e-8, 0.1)[0]
    assert np.allclose(param.asnumpy(), want, rtol=2e-6, atol=2e-6)


def test_the_update_is_seen_by_the_next_forward():
    weight = Parameter(Tensor(np.ones((4, 4), np.float32)), name="w")
    optimizer = AdamW([weight], lr=0.5, weight_decay=0.0)
    run = ms.value_and_grad(lambda x: mint.matmul(x, weight).sum(), None, optimizer.params)
    x = Tensor(np.ones((1, 4), np.float32))
    losses = []
    for _ in range(3):
        loss, grads = run(x)
        optimizer(grads)
        losses.append(float(loss))
    assert losses == pytest.approx([16.0, 8.0, 0.0], abs=1e-4)


def rounded(values, dtype):
    """float32 values as a parameter of 16 bits holds them."""
    return Tensor(values).astype(dtype).astype("float32").asnumpy()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_parameters_of_16_bits_move_by_their_float32_masters(branch, name):
    """Steps of 3e-4 that a parameter at 1.0 cannot see by themselves; and weights that are loaded later count."""
    dtype = getattr(ms, name)
    start = rounded(np.linspace(-1, 1, 9, dtype=np.float32), dtype)
    grads = [rounded(arrays(s, [(9,)])[0], dtype) for s in range(1, 9)]
    param = Parameter(Tensor(start).astype(dtype), name="w")
    optimizer = AdamW([param], 3e-4, (0.9, 0.95), 1e-8, 0.1)
    for grad in grads:
        optimizer([Tensor(grad).astype(dtype)])
    want = numpy_adamw([start], [[g] for g in grads], 3e-4, (0.9, 0.95), 1e-8, 0.1)[0]
    master = optimizer.state_dict()["w"]["master"].asnumpy().copy()
    assert param.dtype == dtype and np.allclose(master, want, rtol=1e-6, atol=1e-7)
    assert np.array_equal(param.astype(ms.float32).asnumpy(), rounded(master, dtype))
    loaded = rounded(np.linspace(2, 3, 9, dtype=np.float32), dtype)
    with_one = np.where(np.arange(9) == 4, loaded, param.astype(ms.float32).asnumpy())
    param.set_data(Tensor(with_one).astype(dtype))
    optimizer.lr = 0.0
    optimizer([Tensor(grads[0]).astype(dtype)])
    master = optimizer.state_dict()["w"]["master"].asnumpy().copy()
    assert master[4] == loaded[4] and np.allclose(np.delete(master, 4), np.delete(want, 4), rtol=1e-6, atol=1e-7)


def by_kernel(copy, var, m, v, grad, step, lr, b1, b2, decay, eps) -> float:
    """What MindSpore's fused AdamW writes; returns the number of the step."""
    t, g = float(step.asnumpy()[0]) + 1, grad.asnumpy()
    first, second = b1 * m.asnumpy() + (1 - b1) * g, b2 * v.asnumpy() + (1 - b2) * g * g
    moved = lr * (first / (1 - b1 ** t)) / (np.sqrt(second / (1 - b2 ** t)) + eps)
    for x, value in ((m, first), (v, second), (var, var.asnumpy() * (1 - lr * decay) - moved)):
        copy(x, Tensor(value.astype(np.float32)))
    return t


def test_on_ascend_one_kernel_steps_the_master(monkeypatch):
    """What `aclnnApplyAdamWV2` is given: float32 everything, steps counted from 0, scalars as numbers."""
    seen, counts = [], []

    class Kernel:
        def __call__(self, var, m, v, max_v, grad, step, lr, b1, b2, decay, eps, amsgrad, maximize):
            assert {x.dtype for x in (var, m, v, max_v, grad, step)} == {ms.float32} and max_v is v
            assert all(type(x) is float for x in (lr, b1, b2, decay, eps)) and (amsgrad, maximize) == (False, False)
            seen.append(by_kernel(Tensor.copy_, var, m, v, grad, step, lr, b1, b2, decay, eps))
            counts.append(step)

    monkeypatch.setattr(adamw, "ascend_kernels", lambda: True)
    monkeypatch.setattr(adamw.gen_ops_prim, "AdamW", Kernel)
    start, steps = arrays(0, SHAPES[:2]), [arrays(s, SHAPES[:2]) for s in range(1, 4)]
    params = [Parameter(Tensor(start[0]), name="a"), Parameter(Tensor(start[1]).astype(ms.bfloat16), name="b")]
    start[1] = rounded(start[1], ms.bfloat16)
    with target.rehearsal("GPU"):
        optimizer = AdamW(params, 1e-2, (0.9, 0.95), 1e-8, 0.1)
        for grads in steps:
            grads[1] = rounded(grads[1], ms.bfloat16)
            optimizer([Tensor(grads[0]), Tensor(grads[1]).astype(ms.bfloat16)])
    want = numpy_adamw(start, steps, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    assert seen == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert all(step is counts[0] for step in counts), "a number of its own is copied from the host"
    assert np.allclose(params[0].asnumpy(), want[0], rtol=2e-6, atol=2e-6)
    assert np.allclose(optimizer._masters[1].asnumpy(), want[1], rtol=2e-6, atol=2e-6)
    with target.rehearsal("GPU"):
        optimizer.step = 9  # as loading states sets it
        optimizer([Tensor(steps[0][0]), None])
    assert seen[-1] == 10.0


def test_a_missing_gradient_leaves_its_parameter_and_a_wrong_one_is_refused():
    params = [Parameter(Tensor(np.ones(3, np.float32)), name=n) for n in "ab"]
    optimizer = AdamW(params)
    optimizer([None, params[1]])
    assert (params[0].asnumpy() == 1).all() and (params[1].asnumpy() != 1).all()
    with pytest.raises(ValueError, match="2 parameters but 1 gradients"):
        optimizer([None])
    with pytest.raises(LayoutError, match="4 local elements"):
        optimizer([Tensor(np.ones(4, np.float32)), None])
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"params": []}):
        with pytest.raises(ValueError):
            AdamW(**{"params": params, **bad})


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["clips", "leaves"])
def test_clip_equals_numpy(p, factor):
    grads = [Tensor(g) for g in arrays(1)]
    flat = np.concatenate([g.asnumpy().reshape(-1).astype(np.float64) for g in grads])
    want = np.linalg.norm(flat, p)
    norm = clip_grad_norm_(grads, want * factor, p)
    assert norm == pytest.approx(want, rel=1e-6)
    got = np.concatenate([g.asnumpy().reshape(-1) for g in grads])
    assert np.allclose(got, flat * min(1.0, factor), rtol=1e-5, atol=1e-7)


def test_clip_takes_pairs_skips_none_and_scales_a_shared_gradient_once():
    grad = Tensor(np.full(4, 3.0, np.float32))
    params = [Parameter(Tensor(np.ones(4, np.float32)), name=n) for n in "abc"]
    norm = clip_grad_norm_(zip(params, [grad, None, grad], strict=True), 1.0)
    assert norm == pytest.approx(math.sqrt(72))
    assert np.allclose(grad.asnumpy(), 3.0 / math.sqrt(72), rtol=1e-5)


@pytest.mark.parametrize("kind", ["transpose", "slice", "view", "whole", "gradient"])
def test_clip_scales_views_and_only_them(kind):
    base = Tensor(np.arange(12, dtype=np.float64).reshape(4, 3)) * 1
    kinds = {"transpose": lambda: base.T, "slice": lambda: base[1:3], "view": lambda: base.view(3, 4),
             "gradient": lambda: ms.grad(lambda x: (x.T * base).sum())(Tensor(np.arange(12.0).reshape(3, 4)))}
    grad = kinds.get(kind, lambda: base)()
    want = grad.asnumpy().copy()
    want *= 1 / (clip_grad_norm_([grad], 1.0) + 1e-6)  # which in float32 would be another number
    assert np.allclose(grad.asnumpy(), want, rtol=1e-14)
    assert np.allclose((grad * 1).asnumpy(), want, rtol=1e-14), "what ops read is scaled too"


def test_adamw_writes_through_whatever_holds_the_parameter(monkeypatch):
    value = arrays(3, ((6, 5),))[0]
    params = [Parameter(Tensor(value), name=n) for n in "ab"]
    AdamW(params[:1])([Tensor(value)])
    for module in (adamw, storage):
        monkeypatch.setattr(module, "local_view", lambda x: None)
    AdamW(params[1:])([Tensor(value)])
    assert np.array_equal((params[0] * 1).asnumpy(), (params[1] * 1).asnumpy())
    assert not np.array_equal(params[1].asnumpy(), value)
