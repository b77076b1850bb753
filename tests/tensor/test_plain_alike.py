# SPDX-License-Identifier: Apache-2.0
"""A program gives on a DTensor what it gives on a plain tensor: augmented assignment, and the overloads of methods.

One process, a mesh of one rank, no chance: each call runs on both, and value, dtype, shape and structure are compared.
"""
import operator
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

import ms_dtensor as md

A = np.array([[3, 1, -2, 5], [2, 2, 0, -1], [4, -3, 1, 1]])
DTYPES = "float32 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64".split()

# of x, y alike and an index i; a method, not a function of `ops` or `mint`: on CPU those are other code
CALLS = """
x.all(); x.all(0); x.all(axis=0); x.amax(0); x.any(); x.any(1, True); x.argmax(); x.argmax(0); x.argmax(1, True)
x.argmax(axis=0); x.argmax(keepdim=True); x.argmax(keepdims=True); x.argmin(); x.argmin(1); x.argmin(1, True)
x.argmin(axis=0, keepdims=True); x.argmin(keepdim=True); x.argsort(); x.argsort(0, True); x.argsort(axis=0)
x.argsort(descending=True); x.bitwise_and(y); x.bitwise_and(1); x.bitwise_or(1); x.bitwise_xor(1); x & 1; x | True
x ^ y; x.count_nonzero(); x.count_nonzero(0); x.count_nonzero(dim=(0, 1)); x.count_nonzero(axis=0, keep_dims=True)
x.count_nonzero(axis=0, dtype=ms.float32); x.cumprod(0); x.cumsum(0); x.cumsum(-1); x.cumsum(axis=0); x.cumsum()
x.cumsum(0, ms.float32); x.cumsum(0, dtype=ms.float64); x.cumsum(0, dtype=x.dtype); x.diagonal(); x.frac(); x.max()
x.max(0); x.max(axis=0); x.mean(); x.mean(0); x.mean(axis=0); x.median(0); x.median(axis=0); x.median(0, True); x.min(1)
x.nansum(); x.nansum(0); x.nansum(axis=0); x.prod(); x.prod(0); x.sort(); x.sort(0, True); x.sort(axis=0)
x.sort(descending=True); x.std(); x.std(0); x.std(0, 1); x.std(axis=0); x.std(dim=0, keepdim=True); x.std(correction=1)
x.std(ddof=1); x.sum(); x.sum(0); x.sum(axis=0); x.topk(2); x.topk(2, 0); x.topk(2, -1, False); x.topk(2, None)
x.topk(k=2, dim=0); x.trace(); x.trace(1); x.T.var(); x.var(0); x.var(0, 1); x.var(axis=0); x.var(ddof=1); x.round()
x.floor(); x.trunc(); x.neg(); x.abs(); x.sign(); x.add(y); x.sub(2); x.mul(y); x.div(y); x.floor_divide(2)
x.remainder(2); x.pow(2); x.square(); x.where(x > 1, y); x.gather(i, 0); x.index_select(0, i); x.repeat(2); x.flip(0)
x.roll(1, 0); x.tril(); x.triu(1); x.maximum(y); x.clamp(0, 2); x.logical_not(); x[0].diag(); x.take(i); x.split(2)
x.chunk(2, 1); x.unbind(); x.isfinite(); x.exp(); x.log1p(); x.atan2(y); x[0].outer(y[1])
""".replace("\n", ";")

# what MindSpore 2.10 answers on CPU against its documentation: its kernel reads numbers as if they were booleans
DEFECTS = {"x.any(1, True)"}

MORE = {"int32": "; x[:, :3].addbmm(b, b)", "float32": "; x[:, :3].addbmm(b, b); x.copysign(-1.5); "
        "ms.ops.copysign(x, -2); ms.ops.copysign(x, ms.Tensor(-2.0))"}  # kernels of other dtypes are few


def _mesh():
    return md.init_device_mesh("cpu", (1,))


def _distributed(x):
    return md.distribute_tensor(x, _mesh(), [md.Replicate()])


def _sample(a, dtype: str):
    if dtype == "bool":
        return a > 0
    if dtype == "complex64":
        return (a + 1j * (a * a - 2)).astype(dtype)
    return (np.abs(a) if dtype.startswith("u") else a).astype(dtype)


def _told(x):
    if isinstance(x, md.DTensor):
        x = x.full_tensor()
    return [_told(v) for v in x] if isinstance(x, tuple | list) else (str(x.dtype), x.shape, x.asnumpy())


def _same(a, b) -> bool:
    if isinstance(a, list) or isinstance(b, list):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return a[:2] == b[:2] and np.allclose(a[2], b[2], rtol=1e-3 if a[0] == "Float16" else 1e-5, atol=1e-6, equal_nan=True)


def _run(call: str, dtype: str, place):
    arguments = {"x": _sample(A, dtype), "y": _sample(A[::-1] * 2 - 1, dtype), "i": np.array([1, 0], np.int64),
                 "b": _sample(np.stack([A[:, 1:]] * 3), dtype)}
    try:
        return _told(eval(call, {"ms": ms, **{k: place(Tensor(v)) for k, v in arguments.items()}}))
    except Exception as e:
        return e


@pytest.mark.parametrize("dtype", DTYPES)
def test_methods_take_the_form_they_take_on_a_plain_tensor(dtype):
    wrong = []
    for call in filter(None, map(str.strip, (CALLS + MORE.get(dtype, "")).split(";"))):
        plain = _run(call, dtype, lambda x: x)
        if isinstance(plain, Exception) or (call in DEFECTS and dtype != "bool"):
            continue
        got = _run(call, dtype, _distributed)
        if isinstance(got, Exception) or not _same(plain, got):
            wrong.append(f"{call} of {dtype}: {re.sub(chr(10), ' ', f'{plain} / {got!r}')[:400]}")
    assert not wrong, "\n".join(wrong)


def test_methods_that_are_a_defect_on_cpu_answer_as_documented():
    x, whole = _distributed(Tensor(A.astype(np.float32))), A.astype(np.float32)
    assert x.median().shape == () and x.median().item() == 1.0  # MindSpore: that of each row, and where
    assert x.diag(0).asnumpy().tolist() == np.diag(whole).tolist()  # a matrix of matrices
    for dtype in DTYPES:
        a = _sample(A - A[0], dtype)
        assert _distributed(Tensor(a)).any(1).asnumpy().tolist() == (a != 0).any(1).tolist()


def test_a_method_and_the_function_of_its_name_are_two_ops():
    x = _distributed(Tensor(A.astype(np.int32)))
    assert str(ms.mint.cumsum(x, 0, dtype=None).dtype) == "Int64" and str(x.cumsum(0, dtype=None).dtype) == "Int32"
    assert str(x.sort(0, False)[1].dtype) == "Int32" and str(ms.mint.sort(x, dim=0)[1].dtype) == "Int64"
    z = _distributed(Tensor(_sample(A, "complex64")))
    assert np.allclose(ms.mint.cumsum(z, 0).asnumpy(), np.cumsum(_sample(A, "complex64"), 0))


AUGMENTED = [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
             operator.ipow]


@pytest.mark.parametrize("assign", AUGMENTED, ids=lambda f: f.__name__)
def test_augmented_assignment_makes_a_new_tensor_on_cpu(assign):
    def bound(place, dtype, other):
        x = place(Tensor(_sample(A, dtype)))
        first = x
        x = assign(x, place(Tensor(other)) if isinstance(other, np.ndarray) else other)
        return _told((x, first))
    for dtype in ("float32", "int32", "float16"):
        for other in (2, 2.5, (np.abs(A) + 1).astype(np.float32), (np.abs(A[:1]) + 1).astype(np.int32)):
            plain, got = (bound(place, dtype, other) for place in (lambda x: x, _distributed))
            assert _same(plain, got), (dtype, other, plain, got)
            assert np.array_equal(got[1][2], _sample(A, dtype))


def test_other_forms_of_augmented_assignment():
    def view(x):
        row = x[0:1]
        row += 1
        for r in x:
            r *= 2
        return x

    def part(x):
        x[1:, 1:3] += 1
        return x

    def square(x):
        first = x
        x @= x.T
        return x, first

    def logical(x):
        x = x > 1
        first = x
        x &= x < 4
        return x, first
    for program in (view, part, square, logical):
        plain, got = (_told(program(place(Tensor(A.astype(np.float32))))) for place in (lambda x: x, _distributed))
        assert _same(plain, got), (program, plain, got)


def test_a_parameter_is_left_alone():
    for place in (lambda x: x, _distributed):
        w = Parameter(place(Tensor(A.astype(np.float32))), name="w")
        first = w
        w += 1
        assert not isinstance(w, Parameter) and np.array_equal(first.asnumpy(), A) and np.array_equal(w.asnumpy(), A + 1)


def test_gradients_of_a_residual():
    def loss(x):
        h = x * 1
        residual = h
        h += x * x
        h *= residual
        h -= 2 * residual
        h /= residual + 9
        return (h * residual).sum()
    x = Tensor(A.astype(np.float32))
    plain, got = ms.value_and_grad(loss)(x), md.value_and_grad(loss)(_distributed(x))
    for p, g in zip(plain, got):
        assert np.allclose(p.asnumpy(), g.full_tensor().asnumpy(), rtol=1e-5), (p, g)
