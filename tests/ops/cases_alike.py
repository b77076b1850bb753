# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what a rank returns does not depend on what its shard holds.

Uneven and empty shards (5, 3, 2 or 1 rows on four ranks), ties, integers, booleans, rows of -inf and dims without
elements: the type, structure and dtype of results, the errors, and the numbers are one device's, on every rank.
"""
import mindspore as ms
import mindspore.mint.nn.functional as F  # noqa: N812
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_dtensor import DTensor, value_and_grad
from ms_dtensor.errors import DTensorError
from tests.operands import R, S, data, mesh_1d, mesh_2d, placed
from tests.support import array, check_against_one_device, counted, equal, refused_alike, same_on_all_ranks
from tests.tiers import sampled

INF = float("inf")


def kind(x) -> str:
    """What sort of thing `x` is, without its values."""
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({', '.join(map(kind, x))})"
    return f"{type(x).__name__} {list(x.shape)} {x.dtype} {x._layout.dtype if isinstance(x, DTensor) else ''}"


def as_one_device(world, fn, arrays, placements, mesh=None, what="") -> None:
    """Kind and values of `fn` on DTensors, on every rank, against one device."""
    mesh = mesh or mesh_1d()
    wanted = fn(*map(Tensor, arrays))
    try:
        got = fn(*(placed(a, mesh, *p) for a, p in zip(arrays, placements)))
    except DTensorError as e:  # no rule for this form
        same_on_all_ranks(world, f"{what}: {e}")
        return
    same_on_all_ranks(world, f"{what}: {kind(got)}")
    assert isinstance(got, tuple | list) == isinstance(wanted, tuple | list), (what, kind(got), kind(wanted))
    many = isinstance(wanted, tuple | list)
    for g, w in zip(got if many else [got], wanted if many else [wanted], strict=True):
        assert g.dtype == w.dtype and tuple(g.shape) == tuple(w.shape), (what, kind(got), kind(wanted))
        a, b = array(g), w.asnumpy()
        rtol = 2e-3 if b.dtype == np.float16 else 2e-5
        assert np.allclose(a, b, rtol=rtol, atol=1e-6, equal_nan=True), (what, a, b)


# -- gradients of split -----------------------------------------------------------------------------------------------
AFTER = {
    "transposed": lambda p: mint.transpose(p, 0, 1) ** 2,
    "an integer": lambda p: p[1] ** 2,
    "a strided slice": lambda p: p[:, ::2] ** 2,
    "as it is": lambda p: p * p,
}


def pieces_then_an_index_or_a_transpose(world):
    forms = {"mint.split": lambda x: mint.split(x, 4, 1), "sizes": lambda x: mint.split(x, [4, 8], 1),
             "ops.split": lambda x: ops.split(x, 4, 1), "x.split": lambda x: x.split(4, 1),
             "chunk": lambda x: mint.chunk(x, 3, 1), "tensor_split": lambda x: ops.tensor_split(x, 3, 1)}
    weight = data(2, 5, 12)
    for shift, (name, fn) in enumerate(forms.items()):
        for after, then in sampled(AFTER.items(), 7, shift):
            def loss(x, fn=fn, then=then):  # one device by another way: indexing in NumPy's meaning
                return sum((then(p)).sum() * (k + 1) for k, p in enumerate(fn(x)))

            def gold(x, name=name, then=then):
                bounds = [(0, 4), (4, 12)] if name == "sizes" else [(0, 4), (4, 8), (8, 12)]
                return sum((then(x[:, a:b] * 1)).sum() * (k + 1) for k, (a, b) in enumerate(bounds))
            wanted = ms.grad(gold)(weight)
            for placement in (R, S(0), S(1)):
                value, grad = value_and_grad(loss, 0)(placed(weight, mesh_1d(), placement))
                equal(value, gold(weight), f"{name} {after} {placement}")
                equal(grad, wanted, f"{name} {after} {placement} gradient")


# -- ties -------------------------------------------------------------------------------------------------------------
EXTREMES = {
    "max()": lambda x: mint.max(x), "min()": lambda x: mint.min(x), "x.max()": lambda x: x.max(),
    "amax": lambda x: mint.amax(x, 0), "amin": lambda x: mint.amin(x, 0), "amax all": lambda x: mint.amax(x, (0, 1)),
    "amax kept": lambda x: mint.amax(x, 0, True), "amin 1": lambda x: mint.amin(x, 1), "ops.amax": lambda x: ops.amax(x, 0),
    "ReduceMax": lambda x: ops.ReduceMax()(x, 0), "ReduceMin": lambda x: ops.ReduceMin(True)(x, (0, 1)),
    "max(dim)": lambda x: mint.max(x, 0)[0], "ops.min": lambda x: ops.min(x, 0)[0], "x.max(axis)": lambda x: x.max(axis=0),
    "x.min(axis)": lambda x: x.min(axis=1, keepdims=True), "x.max(axes)": lambda x: x.max(axis=(0, 1)),
    "aminmax": lambda x: ops.aminmax(x, axis=0)[1], "ptp": lambda x: x.ptp(0),
}
NORMS = {"norm inf": lambda x: mint.norm(x, INF, 0), "norm -inf": lambda x: mint.norm(x, -INF),
         "vector_norm inf": lambda x: mint.linalg.vector_norm(x, INF, 1)}


def ties_uneven_over_shards(world):
    one = np.float32([5, 5, 5, 1, 0, 0, 0, 0]).reshape(8, 1)
    rng = np.random.default_rng(0)
    many = rng.integers(0, 3, (7, 5)).astype(np.float32)
    few = rng.integers(0, 2, (2, 3)).astype(np.float32)
    for turn, (mesh, layouts) in enumerate(((mesh_1d(), ([S(0)], [S(1)])), (mesh_2d(), ([S(0), S(1)], [S(0), S(0)])))):
        for shift, x in enumerate(sampled((one, many, few), 2)):
            for name, fn in sampled(EXTREMES.items(), 9, 2 * turn + shift):
                def loss(x, fn=fn):
                    out = fn(x)
                    return (out * (out + 3)).sum()
                for placements in layouts:
                    check_against_one_device(loss, [Tensor(x)], [placements], mesh, f"{name} {x.shape} {placements}")
            for name, fn in sampled(NORMS.items(), 3, turn + shift):  # no kernel on one device
                wanted = value_and_grad(lambda x, fn=fn: (fn(x) ** 2).sum(), 0)(placed(x, mesh, *[R] * mesh.ndim))
                for placements in layouts:
                    got = value_and_grad(lambda x, fn=fn: (fn(x) ** 2).sum(), 0)(placed(x, mesh, *placements))
                    equal(got, wanted, f"{name} {x.shape} {placements} gradient")


def ties_cost_one_more_all_reduce_in_the_backward(world):
    dx = placed(np.float32([5, 5, 5, 1, 0, 0, 0, 0]), mesh_1d(), S(0))
    with counted() as count:
        _, grad = value_and_grad(mint.max, 0)(dx)
    equal(grad, np.float32([1, 1, 1, 0, 0, 0, 0, 0]) / 3)
    assert dict(count) == {("all_reduce", "forward"): 1, ("all_reduce", "backward"): 1}, count


# -- integers, booleans, complex numbers ------------------------------------------------------------------------------
def promotion_of_two_operands(world):
    rng = np.random.default_rng(2)
    kinds = ("bool", "uint8", "int32", "int64", "float16", "float32")
    calls = {"add": mint.add, "mul": mint.mul, "div": mint.div, "pow": mint.pow, "maximum": mint.maximum}
    for i, a in enumerate(kinds):
        for j, b in enumerate(kinds):
            x, y = (rng.integers(1, 3, (2, 3)).astype(d) for d in (a, b))
            for name, fn in sampled(calls.items(), 5, i + j):
                what = f"{name} of {a}, {b}"
                try:
                    fn(Tensor(x), Tensor(y))
                except (RuntimeError, TypeError, ValueError):
                    continue
                as_one_device(world, fn, [x, y], [[S(0)], [S(0)]], what=what)


# -- rows of -inf -----------------------------------------------------------------------------------------------------
def softmax_of_minus_infinities(world):
    low = np.random.default_rng(3).normal(size=(4, 6)).astype(np.float32)
    low[0, :2] = -INF  # all that one shard holds
    low[1, 2:] = -INF
    low[3] = -INF  # the last row: after one, MindSpore's kernel leaves its results uninitialised
    x = Tensor(low)
    for name, fn in {"mint": lambda x: mint.softmax(x, -1), "ops": lambda x: ops.softmax(x, 1), "nn": nn.Softmax(),
                     "log": lambda x: ops.log_softmax(x, -1)}.items():
        for mesh, placements in sampled(((mesh_1d(), [S(1)]), (mesh_2d(), [S(0), S(1)]), (mesh_1d(), [S(0)])), 2):
            out = fn(placed(x, mesh, *placements))
            assert np.array_equal(np.isnan(array(out)), np.isnan(fn(x).asnumpy())), (name, placements)
            finite = np.isfinite(fn(x).asnumpy())
            equal(array(out)[finite], fn(x).asnumpy()[finite], f"{name} {placements}")

            def loss(x, fn=fn):
                out = fn(x)
                return (mint.where(out > -INF, out, ops.zeros_like(out)) ** 2).sum()
            check_against_one_device(loss, [x[:3]], [placements], mesh, f"{name} {placements}")

    def whole(x):
        return (mint.softmax(x, -1) ** 2).sum()
    check_against_one_device(whole, [x], [[S(1)]], mesh_1d(), "with the row")
    for dtype, dim in ((np.float64, 1), (np.float16, 1), (np.float32, 0)):  # elsewhere the kernel gives NaN
        y = (low if dim else low.T.copy()).astype(dtype)
        out = mint.softmax(placed(y, mesh_1d(), S(dim)), dim)
        assert np.array_equal(np.isnan(array(out)), np.isnan(mint.softmax(Tensor(y), dim).asnumpy())), (dtype, dim)


# -- dims without elements --------------------------------------------------------------------------------------------
def nothing(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def contractions_of_length_zero(world):
    ones = np.ones((3, 4), np.float32)
    bias = np.float32([1, 2, 3, 4])
    calls = {
        "matmul": (mint.matmul, [nothing(3, 0), nothing(0, 4)], np.zeros((3, 4))),
        "vectors": (mint.matmul, [nothing(0), nothing(0)], np.zeros(())),
        "bmm": (mint.bmm, [nothing(2, 3, 0), nothing(2, 0, 4)], np.zeros((2, 3, 4))),
        "MatMul": (ops.MatMul(), [nothing(3, 0), nothing(0, 4)], np.zeros((3, 4))),
        "linear": (F.linear, [nothing(3, 0), nothing(4, 0), bias], np.tile(bias, (3, 1))),
        "linear without bias": (F.linear, [nothing(3, 0), nothing(4, 0)], np.zeros((3, 4))),
        "addmm": (mint.addmm, [ones, nothing(3, 0), nothing(0, 4)], ones),
        "einsum": (lambda a, b: mint.einsum("ij,jk->ik", a, b), [nothing(3, 0), nothing(0, 4)], np.zeros((3, 4))),
    }
    for name, (fn, arrays, wanted) in calls.items():
        for d in range(2):
            Tensor(np.full((3, 4), 7.5, np.float32)) * 3  # something to find in uninitialised memory
            xs = [placed(a, mesh_1d(), S(d) if i < 2 and d < a.ndim else R) for i, a in enumerate(arrays)]
            out = fn(*xs)
            same_on_all_ranks(world, f"{name}: {kind(out)}")
            assert np.array_equal(array(out), wanted), (name, array(out))
            value, grads = value_and_grad(lambda *xs, fn=fn: (fn(*xs) * 2).sum(), tuple(range(len(xs))))(*xs)
            assert [g.shape for g in grads] == [x.shape for x in xs]
            if len(xs) == 3:
                which = 0 if name == "addmm" else 2
                assert np.array_equal(array(grads[which]), np.full(arrays[which].shape, 2.0 if name == "addmm" else 6.0))


def reductions_of_nothing(world):
    nan = np.nan
    calls = {
        "sum": (mint.sum, 0), "sum 0": (lambda x: mint.sum(x, 0), [0, 0, 0]), "ops.sum": (lambda x: ops.sum(x, 0), [0, 0, 0]),
        "mean": (mint.mean, nan), "mean 0": (lambda x: mint.mean(x, 0), [nan] * 3), "x.mean": (lambda x: x.mean(axis=0), [nan] * 3),
        "prod": (mint.prod, 1), "prod 0": (lambda x: mint.prod(x, 0), [1, 1, 1]), "any": (lambda x: mint.any(x == 0), False),
        "any 0": (lambda x: mint.any(x == 0, 0), [False] * 3), "all": (lambda x: mint.all(x == 1), True),
        "nansum": (lambda x: mint.nansum(x, 0), [0, 0, 0]), "var": (lambda x: mint.var(x, 0), [nan] * 3),
        "std": (mint.std, nan), "norm": (lambda x: mint.norm(x, 2, 0), [0, 0, 0]), "norm 1": (lambda x: mint.norm(x, 1), 0),
        "logsumexp": (lambda x: mint.logsumexp(x, 0), [-INF] * 3), "count_nonzero": (mint.count_nonzero, 0),
        "mse": (lambda x: F.mse_loss(x, x), nan), "mse sum": (lambda x: F.mse_loss(x, x, "sum"), 0), "l1": (F.l1_loss, nan),
        "bce": (lambda x: F.binary_cross_entropy(x, x, reduction="sum"), 0),
        "rows": (lambda x: mint.sum(x, 1), []),
    }
    for name, (fn, wanted) in calls.items():
        for placement in (R, S(0), S(1)):
            mint.add(Tensor(np.full((3,), 7.5, np.float32)), 3.0)
            x = placed(nothing(0, 3), mesh_1d(), placement)
            out = fn(x) if name != "l1" else fn(x, x)
            same_on_all_ranks(world, f"{name}: {kind(out)}")
            assert np.array_equal(array(out), np.array(wanted, array(out).dtype), equal_nan="float" in str(array(out).dtype)), \
                (name, placement, array(out))
    integers = placed(nothing(0, 3, dtype=np.int32), mesh_1d(), S(1))
    assert array(mint.sum(integers, 0)).tolist() == [0, 0, 0] and mint.sum(integers, 0).dtype == ms.int64
    for name, fn in {"max": mint.max, "amax": lambda x: mint.amax(x, 0), "max(dim)": lambda x: mint.max(x, 0),
                     "min": mint.min, "argmax": lambda x: mint.argmax(x, 0), "ReduceMin": lambda x: ops.ReduceMin()(x, 0),
                     "median": lambda x: mint.median(x, 0)}.items():
        for placement in (R, S(0), S(1)):
            try:
                said = kind(fn(placed(nothing(0, 3), mesh_1d(), placement)))
            except (ValueError, RuntimeError) as e:
                said = type(e).__name__
            assert said.endswith("Error"), f"{name} of nothing is {said}"
            same_on_all_ranks(world, f"{name}: {said}")


# -- what kind of thing -----------------------------------------------------------------------------------------------
def one_result_is_a_tuple_still(world):
    x = np.arange(6, dtype=np.float32).reshape(1, 6)
    forms = {
        "mint.split": lambda x: mint.split(x, 6, 1), "sizes": lambda x: mint.split(x, [6], 1), "ops.split": lambda x: ops.split(x, 6, 1),
        "x.split": lambda x: x.split(6, 1), "mint.chunk": lambda x: mint.chunk(x, 1, 1), "ops.chunk": lambda x: ops.chunk(x, 1, 1),
        "ops.unbind": lambda x: ops.unbind(x.reshape(1, 6), 0), "unstack": lambda x: ops.unstack(x, 0),
        "mint.unbind": lambda x: mint.unbind(x, 0), "x.unbind": lambda x: x.unbind(0),
        "tensor_split": lambda x: ops.tensor_split(x, 1, 1), "hsplit": lambda x: ops.hsplit(x, 1), "vsplit": lambda x: ops.vsplit(x, 1),
        "meshgrid": lambda x: ops.meshgrid(x[0], indexing="ij"), "Split": lambda x: ops.Split(1, 1)(x),
    }
    for name, fn in forms.items():
        try:
            wanted = fn(Tensor(x))
        except (RuntimeError, TypeError):  # no kernel: unbind as a view
            wanted = (Tensor(x[0]),)
        for placement in (S(0), S(1)):
            got = fn(placed(x, mesh_1d(), placement))
            same_on_all_ranks(world, f"{name}: {kind(got)}")
            assert isinstance(got, tuple | list) and len(got) == 1, f"{name} {placement}: {kind(got)}"
            equal(got[0], wanted[0], name)


WHOLE = {
    "[:]": lambda x: x[:], "[...]": lambda x: x[...], "narrow": lambda x: mint.narrow(x, 0, 0, 2), "to": lambda x: x.to(ms.float32),
    "flatten": lambda x: mint.flatten(x, 0, 0), "dropout": lambda x: F.dropout(x, 0.5, False), "contiguous": lambda x: x.contiguous(),
    "type_as": lambda x: x.type_as(x), "reshape": lambda x: x.reshape(2, 3), "squeeze": lambda x: mint.squeeze(x, 0),
    "expand": lambda x: mint.broadcast_to(x, (2, 3)), "stop": lambda x: ops.stop_gradient(x) + x, "floor": lambda x: mint.floor(x) + x,
    "zeros_like": lambda x: mint.zeros_like(x) + x, "full_like": lambda x: ops.full_like(x, 2.0) * x,
    "ones": lambda x: x.new_ones((2, 3)) * x, "greater": lambda x: (x > 0).astype(ms.float32) * x, "identity": ops.Identity(),
    "roll": lambda x: mint.roll(x, 0, 1), "pad": lambda x: F.pad(x, (0, 0)), "tile": lambda x: x.tile((1, 1)),
    "detached": lambda x: mint.where(x > 0, x, ops.stop_gradient(x * 2)),
}


def nodes_are_made_on_all_ranks_or_none(world):
    x, w = np.random.default_rng(5).normal(size=(2, 3)).astype(np.float32), data(6, 2, 3)
    for shift, (name, fn) in enumerate(sampled(WHOLE.items(), 2)):
        for placements in sampled(([S(0)], [S(1)]), 2, shift):
            def loss(x, w, fn=fn):
                y = fn(x)
                return ((y * w).sum(0) * (y + w).sum(0)).sum() + y.sum() * mint.matmul(y, mint.transpose(w, 0, 1)).sum()
            wanted = value_and_grad(loss, (0, 1))(placed(x, mesh_1d(), R), placed(w, mesh_1d(), R))
            got = value_and_grad(loss, (0, 1))(placed(x, mesh_1d(), *placements), placed(w, mesh_1d(), R))
            equal((got[0], *got[1]), (wanted[0], *wanted[1]), f"{name} {placements}")
        seen = []

        def looked(x, fn=fn, seen=seen):
            y = fn(x)
            seen.append((y._is_leaf, y._requires_grad))
            return (y * 1).sum()
        value_and_grad(looked, 0)(placed(x, mesh_1d(), S(0)))
        same_on_all_ranks(world, f"{name}: {seen}")


def a_kernels_refusal_is_everyones(world):
    x = placed(np.ones((2, 3)), mesh_1d(), S(0))
    rows = {"lerp of float64": lambda: mint.lerp(x, x, 0.5), "softmax of integers": lambda: mint.softmax(x.astype(ms.int32), 1),
            "softmax over the cut dim": lambda: mint.softmax(x.astype(ms.int32), 0),
            "mean of booleans": lambda: mint.mean(x > 0, 1), "amax of booleans": lambda: mint.amax(x > 0, 0),
            "exp of int32": lambda: mint.exp(x.astype(ms.int32)), "matmul of unlike dtypes":
            lambda: mint.matmul(x, mint.transpose(x.astype(ms.float32), 0, 1))}
    for name, call in rows.items():
        with counted() as count:
            try:
                said = kind(call())
            except Exception as e:  # noqa: BLE001
                said = type(e).__name__
        same_on_all_ranks(world, f"{name}: {said}")
        same_on_all_ranks(world, f"{name}: {dict(count)}")


# -- bfloat16, strides ------------------------------------------------------------------------------------------------
def bfloat16_results_have_the_dtype_asked_for(world):
    low = placed(data(1, 5, 8), mesh_1d(), S(0)).astype(ms.bfloat16)
    wide = placed(data(2, 5, 8), mesh_1d(), S(0))
    calls = {
        "type_as": (lambda: wide.type_as(low), ms.bfloat16), "type_as wide": (lambda: low.type_as(wide), ms.float32),
        "expand_as": (lambda: low.expand_as(wide), ms.bfloat16), "expand_as wide": (lambda: wide.expand_as(low), ms.float32),
        "sum": (lambda: mint.sum(low, 0, dtype=ms.float32), ms.float32), "x.sum": (lambda: low.sum(0, dtype=ms.float32), ms.float32),
        "sum narrow": (lambda: mint.sum(wide, 0, dtype=ms.bfloat16), ms.bfloat16),
        "mean": (lambda: mint.mean(low, 0, dtype=ms.float32), ms.float32),
        "cumsum": (lambda: mint.cumsum(low, 0, dtype=ms.float32), ms.float32),
        "log_softmax": (lambda: F.log_softmax(low, 1, dtype=ms.float32), ms.float32),
        "log_softmax cut": (lambda: F.log_softmax(low, 0, dtype=ms.float32), ms.float32),
        "vector_norm": (lambda: mint.linalg.vector_norm(low, 2, 0, dtype=ms.float32), ms.float32),
        "vector_norm whole": (lambda: mint.linalg.vector_norm(low, 2, 1, dtype=ms.float32), ms.float32),
        "prod": (lambda: mint.prod(low, 1, dtype=ms.float32), ms.float32), "add": (lambda: low + wide, ms.float32),
        "view_as": (lambda: low.view_as(wide), ms.bfloat16), "amax": (lambda: mint.amax(low, 0), ms.bfloat16),
        "softmax cut": (lambda: mint.softmax(low, 0), ms.bfloat16), "argmax": (lambda: mint.argmax(low, 1), ms.int64),
    }
    for name, (call, wanted) in calls.items():
        out = call()
        assert out.dtype == wanted == out.to_local().dtype, f"{name}: {out.dtype}"
        assert out._layout.dtype == str(wanted).lower(), (name, out._layout)
        same_on_all_ranks(world, f"{name}: {kind(out)}")
    equal(calls["sum"][0](), array(low.astype(ms.float32)).sum(0), "added up in float32")


def strides_of_views_are_refused(world):
    x = placed(data(1, 5, 8), mesh_1d(), S(0))
    assert x.stride() == (8, 1) and (x + 1).stride(0) == 8 and mint.transpose(x, 0, 1).clone().stride() == (5, 1)
    for name, view in {"transpose": mint.transpose(x, 0, 1), "slice": x[:, 2:], "expand": mint.broadcast_to(x[None], (2, 5, 8)),
                       "narrow": mint.narrow(x, 0, 0, 2)}.items():
        assert refused_alike(world, view.stride).startswith("For 'stride'"), name
