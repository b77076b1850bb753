# SPDX-License-Identifier: Apache-2.0
"""Each CPU decomposition against NumPy: values by the op's definition, gradients by finite differences of it."""
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_dtensor.ops.local import CPU
from tests.coverage.references import ATTENTION, REFERENCES
from tests.coverage.references_more import MOE, MORE, NO_GRADIENT

ATOL = 2e-5  # float32, of values of size one to ten
GRAD_ATOL = 5e-4

# No gradient to compare: constants, integers, or (statistics of fused attention) not differentiated by definition.
CONSTANT = frozenset(("FullLike", "ZerosLikeExt", "OnesLikeExt", "EmptyLike", "NewZeros", "NewOnes", "NewEmpty",
                      "NewFull", "CountNonZero", "ArgSort", "ArgMaxExt", "ArgMinExt", "OneHotExt", "Any", "AnyExt",
                      "ReduceAny", "DeprecatedReduceAny", "MoeComputeExpertTokens")) | NO_GRADIENT
REFERENCES = {**REFERENCES, **MORE, **MOE, **ATTENTION}
# Drawn from the library's own stream: tests/ops/test_random.py compares them across meshes and with their distributions.
DRAWN = frozenset(("Bernoulli", "BernoulliExt", "Dropout", "Dropout2D", "Dropout2dExt", "Dropout3D", "FuncDropoutExt",
                   "NormalFloatTensor", "NormalTensorFloat", "NormalTensorTensor", "RandIntLike", "RandLikeExt",
                   "RandnLike", "Multinomial", "MultinomialExt"))
# `test_fft.py` compares them with NumPy.
FFTS = frozenset(("HFFT", "HFFT2", "HFFTN", "IHFFT", "IHFFT2", "IHFFTN", "FFTShift", "IFFTShift"))
CASES = [pytest.param(name, i, id=f"{name}-{i}") for name, cases in REFERENCES.items() for i in range(len(cases))]


def test_every_decomposition_has_a_reference():
    assert set(CPU) == set(REFERENCES) | DRAWN | FFTS


def tensors(value):
    if isinstance(value, np.ndarray):
        return Tensor(value)
    return type(value)(tensors(v) for v in value) if isinstance(value, tuple | list) else value


def doubled(value):
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return value.astype(np.float64)
    return type(value)(doubled(v) for v in value) if isinstance(value, list) else value


def as_tuple(value):
    return tuple(value) if isinstance(value, tuple | list) else (value,)


@pytest.mark.parametrize(("name", "i"), CASES)
def test_value(name, i):
    args, reference = REFERENCES[name][i]
    got, wanted = as_tuple(CPU[name](*tensors(args))), as_tuple(reference(*map(doubled, args)))
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted):
        if w is not None:
            w = np.asarray(w)
            assert tuple(g.shape) == w.shape
            assert np.issubdtype(w.dtype, np.floating) == g.is_floating_point()
            np.testing.assert_allclose(g.asnumpy(), w, rtol=1e-5, atol=ATOL)


def differentiable(name, i):
    """Places of the arguments that have a gradient."""
    return tuple(k for k, v in enumerate(REFERENCES[name][i][0]) if isinstance(v, np.ndarray) and v.dtype == np.float32
                 and np.isfinite(v).all() and v.size)


@pytest.mark.parametrize(("name", "i"), [p for p in CASES if p.values[0] not in CONSTANT and differentiable(*p.values)])
def test_gradient(name, i):
    args, reference = REFERENCES[name][i]
    wrt = differentiable(name, i)
    rng = np.random.default_rng(i)
    outs = as_tuple(reference(*map(doubled, args)))
    weights = [None if w is None or not np.issubdtype(np.asarray(w).dtype, np.floating) else rng.normal(size=np.shape(w))
               for w in outs]

    def loss(*active):
        full = list(tensors(args))
        for k, x in zip(wrt, active):
            full[k] = x
        results = zip(as_tuple(CPU[name](*full)), weights)
        return sum((o * Tensor(np.asarray(w, np.float32))).sum() for o, w in results if w is not None)
    grads = as_tuple(ms.grad(loss, tuple(range(len(wrt))))(*(Tensor(args[k]) for k in wrt)))
    for k, g in zip(wrt, grads):
        assert tuple(g.shape) == args[k].shape
        for _ in range(3):  # derivatives along random directions
            direction = rng.normal(size=args[k].shape)
            ahead, behind = (_at(reference, args, weights, k, direction, step) for step in (1e-5, -1e-5))
            slope = (ahead - behind) / 2e-5
            allowed = GRAD_ATOL * max(1.0, np.abs(direction).sum(), abs(slope))
            assert abs(float((g.asnumpy() * direction).sum()) - slope) < allowed


def _at(reference, args, weights, k, direction, step) -> float:
    moved = list(map(doubled, args))
    moved[k] = moved[k] + step * direction
    return sum(float((np.asarray(o) * w).sum()) for o, w in zip(as_tuple(reference(*moved)), weights) if w is not None)


def test_padding_row_of_an_embedding_gets_no_gradient():
    ids, table = Tensor(np.array([0, 2, 2, 1], np.int32)), Tensor(np.ones((3, 2), np.float32))
    grad = ms.grad(lambda w: CPU["Embedding"](ids, w, 2).sum())(table)
    assert grad.asnumpy().tolist() == [[1, 1], [1, 1], [0, 0]]
