# SPDX-License-Identifier: Apache-2.0
"""What a cached dispatch costs, in counts that no other load changes: Python calls, and objects that stay behind.

A bound that fails means that the hot path has grown. Make it shorter again, or raise the bound on purpose, beside a
figure from scripts/bench/dispatch.py.
"""
from __future__ import annotations

import cProfile
import gc
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

import ms_dtensor as md
from ms_dtensor.debug import cache_info
from ms_dtensor.dispatch.dispatcher import clear_cache
from tests.msrun import PATIENCE

pytestmark = pytest.mark.usefixtures("cpu")
R, S = md.Replicate(), md.Shard


def laid(placement, axes=1):
    mesh = md.init_device_mesh("cpu", (1,) * axes)
    rng = np.random.default_rng(0)
    return md.distribute_tensor(Tensor(rng.standard_normal((4, 4)).astype(np.float32)), mesh,
                                [placement, *[R] * (axes - 1)], src_data_rank=None)


# (our functions entered by one cached call, tensor objects made: an alias per operand), the call.
# The functions are `dispatch` and `CachedCall.run`, `link` for a view, and what MindSpore or the call asks besides.
CALLS = {
    "add": (2, 2, lambda x, w, r: mint.add(x, x)),
    "mul scalar": (2, 1, lambda x, w, r: x * 2.0),
    "matmul": (2, 2, lambda x, w, r: mint.matmul(r, w)),
    "relu": (2, 1, lambda x, w, r: mint.nn.functional.relu(x)),
    "sum": (2, 1, lambda x, w, r: mint.sum(x)),
    "softmax": (3, 1, lambda x, w, r: mint.softmax(x, dim=1)),
    "transpose": (3, 1, lambda x, w, r: mint.transpose(x, 0, 1)),
    "view": (3, 1, lambda x, w, r: x.view(4, 2, 2)),
    "to_local": (3, 1, lambda x, w, r: x.to_local()),
    "redistribute to itself": (5, 0, lambda x, w, r: x.redistribute(placements=x.placements)),
    "from_local": (13, 1, lambda x, w, r: md.DTensor.from_local(PLAIN, x.device_mesh, x.placements)),
}
PLAIN = Tensor(np.ones((4, 4), np.float32))


def our_calls(fn) -> tuple[list[str], int]:
    """Names of the library's functions that one call enters, and how many tensor objects they make.

    Not with `sys.setprofile`: Python 3.10 puts a frame's variables into a dict for it, which is one more reference.
    """
    profile = cProfile.Profile()
    profile.runcall(fn)
    seen, made = [], 0
    for entry in profile.getstats():
        code = entry.code
        if isinstance(code, str):
            made += entry.callcount if "_make_subclass" in code else 0
        elif "/ms_dtensor/" in code.co_filename and not code.co_filename.endswith("keywords.py"):
            seen += [code.co_name] * entry.callcount
    return seen, made


@pytest.mark.parametrize("axes", [1, 4])
@pytest.mark.parametrize("name", CALLS)
def test_calls_and_objects_of_a_cached_dispatch(name, axes):
    calls, objects, fn = CALLS[name]
    x, w, r = laid(S(0), axes), laid(S(1), axes), laid(R, axes)
    fn(x, w, r)
    fn(x, w, r)
    seen, made = our_calls(lambda: fn(x, w, r))
    assert len(seen) <= calls, seen
    assert made <= objects


@pytest.mark.parametrize("name", CALLS)
def test_a_cached_dispatch_leaves_nothing_behind(name):
    *_, fn = CALLS[name]
    x, w, r = laid(S(0)), laid(S(1)), laid(R)
    for _ in range(100):
        fn(x, w, r)
    # MindSpore keeps some tens of kB, however many calls; what each call leaves is there in every round
    assert any(grown(fn, (x, w, r)) < 4000 * 16 for _ in range(3))


def grown(fn, args):
    """Bytes that stay after 4000 calls; at times also what another thread, which waits for ranks, just then has read."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4000):
            fn(*args)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_recording_adds_no_call_where_nothing_is_converted():
    x = laid(S(0))
    counts = []

    def loss(t):
        t.exp()
        counts.append(len(our_calls(lambda: t.exp())[0]))
        return t.sum()
    ms.grad(loss)(x)
    assert counts == [2]


def test_cache_info_counts_hits_and_misses_also_over_a_clearing():
    x = laid(S(0))
    clear_cache()
    start = cache_info()["dispatch"]
    assert start.size == 0
    for _ in range(5):
        x.tanh()
    middle = cache_info()["dispatch"]
    assert (middle.misses - start.misses, middle.hits - start.hits, middle.size) == (1, 4, 1)
    clear_cache()
    x.tanh()
    end = cache_info()["dispatch"]
    assert (end.misses - start.misses, end.hits - start.hits, end.size) == (2, 4, 1)
    assert all(info.size <= info.limit for info in cache_info().values())


def test_caches_are_bounded(monkeypatch):
    import ms_dtensor.dispatch.dispatcher as dispatch

    monkeypatch.setattr(dispatch, "_LIMIT", 8)
    x = laid(S(0))
    for k in range(40):
        x * float(k)
    assert cache_info()["dispatch"].size <= 8


def test_equal_numbers_of_different_types_are_different_calls():
    x = laid(S(0)).astype(ms.int32)
    assert str((x * 2).dtype) == "Int32" and str((x * 2.0).dtype) == "Float32"
    assert str((x * True).dtype) == "Int32" and str((x * 1.0).dtype) == "Float32"


def test_equal_texts_and_zeros_of_different_signs_are_different_calls():
    x = laid(S(0))
    assert np.signbit((x * 0.0 + 1.0).full_tensor().asnumpy()).sum() == 0
    assert not np.signbit((x.abs() * 0.0).full_tensor().asnumpy()).any()
    assert np.signbit((x.abs() * -0.0).full_tensor().asnumpy()).all()
    for kind in (np.float32, np.float16):
        assert (x.astype(ms.float64) * kind(0.1)).full_tensor().asnumpy()[0, 0] / x.full_tensor().asnumpy()[0, 0] == \
            pytest.approx(float(kind(0.1)), rel=1e-9), kind
    rows = [np.arange(2000) % 4, np.where(np.arange(2000) == 1000, 3, np.arange(2000) % 4)]  # one differs in the middle
    for picked in rows:
        assert np.array_equal(laid(R)[picked].full_tensor().asnumpy(), laid(R).full_tensor().asnumpy()[picked])


def test_an_attribute_changed_on_a_primitive_is_seen():
    from mindspore import ops

    x = laid(S(0))
    softmax = ops.Softmax(axis=0)
    first = softmax(x).full_tensor().asnumpy()
    other = ops.Softmax(axis=1)(x).full_tensor().asnumpy()
    assert np.allclose(first.sum(0), 1) and np.allclose(other.sum(1), 1)


@pytest.mark.parametrize("several", [False, True])
def test_a_result_that_somebody_else_holds_stays_a_plain_tensor(several):
    kept = []

    def keeping(x):
        kept[:] = [x * 2.0, x * 3.0] if several else [x * 2.0]
        return tuple(kept) if several else kept[0]
    x = laid(S(0))
    with md.register_rule("keeping", "S(0) -> S(0), S(0)" if several else "S(0) -> S(0)") as rule:
        own = rule(keeping)
        for _ in range(3):
            got = own(x)
            assert all(type(t) is Tensor for t in kept)
            assert all(type(t) is md.DTensor for t in (got if several else (got,)))


ASYNCHRONOUS = """
import sys
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint

mint.add(Tensor([1.0]), Tensor([1.0]))  # the runtime has started, asynchronous as it is by default
import ms_dtensor as md

sys.path.insert(0, {tests!r})
from ms_dtensor.dispatch import dispatcher as dispatch
from test_dispatch_cost import our_calls

mesh = md.init_device_mesh("cpu", (1,))
rng = np.random.default_rng(0)
a, b = (Tensor(rng.standard_normal((4, 4)).astype(np.float32)) for _ in range(2))
x, w = (md.distribute_tensor(t, mesh, [md.Shard(0)], src_data_rank=None) for t in (a, b))
p = Parameter(md.distribute_tensor(b, mesh, [md.Replicate()], src_data_rank=None), name="p")


def chain(x, w):
    y = mint.nn.functional.relu(x * 2.0 + w)
    y, z = mint.split(y.view(4, 2, 2), 1, 1)
    return mint.softmax(mint.transpose(y - z, 0, 2), dim=1)


def loss(x):
    made.extend([our_calls(lambda: mint.matmul(x, p))[1], our_calls(lambda: mint.matmul(x, p))[1]])
    return (mint.matmul(x, p) * 0.5).exp().sum()


for _ in range(3):
    spread, summed = mint.std(x, dim=1), mint.cumsum(x, 1)
assert np.allclose(spread.full_tensor().asnumpy(), a.asnumpy().std(1, ddof=1), atol=1e-6)
assert np.allclose(summed.full_tensor().asnumpy(), a.asnumpy().cumsum(1), atol=1e-6)
python = [c for c in dispatch._cache.values() if c.plan.local.substitute is not None]
assert len(python) == 2 and all(c.short is not None and c.short.aliased for c in python)  # it asks operands for their shape
made = []
out = chain(x, w)
assert our_calls(lambda: chain(x, w))[1] == 0
assert np.allclose(out.full_tensor().asnumpy(), chain(a, b).asnumpy(), atol=1e-6)
gx, gp = md.grad(loss, 0, [p])(x)
assert made[1] == 0, made
plain = Parameter(b, name="q")
ga, gq = ms.grad(lambda t: (mint.matmul(t, plain) * 0.5).exp().sum(), 0, [plain])(a)
assert np.allclose(gx.full_tensor().asnumpy(), ga.asnumpy(), atol=1e-5)
assert np.allclose(gp[0].full_tensor().asnumpy(), gq[0].asnumpy(), atol=1e-5)
print("fine")
"""


def test_where_ops_are_issued_asynchronously_dispatch_waits_for_nothing():
    """Whoever makes another tensor object of one, waits for its data; so none is made."""
    code = ASYNCHRONOUS.format(tests=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_a_gradient_function_is_made_once():
    """MindSpore's own is made at each call, which takes longer than an op does."""
    from ms_dtensor.internals.names import composite
    x, plain = laid(S(0)), Tensor(np.ones((4, 4), np.float32))

    def square(t):
        return (t * t).sum()
    for gradient in (md.grad(square), md.value_and_grad(square), md.grad(lambda t: (square(t), t), has_aux=True)):
        for t in (x, plain):
            gradient(t)
            profile = cProfile.Profile()
            profile.runcall(gradient, t)
            assert composite._Grad.__init__.__code__ not in [entry.code for entry in profile.getstats()]


def test_a_gradient_function_made_once_is_mindspores():
    """Under no_grad it is refused as there, and patches that were put in place since are met."""
    from ms_dtensor.dispatch import patches
    from ms_dtensor.internals.names import no_grad
    plain = Tensor(np.arange(3, dtype=np.float32))
    gradient = md.grad(lambda t: (t * t).sum())
    patches.uninstall()
    try:
        assert gradient(plain).asnumpy().tolist() == [0, 2, 4]
    finally:
        patches.install()
    with no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        gradient(plain)
    x = laid(S(0))
    assert isinstance(gradient(x), md.DTensor)
    np.testing.assert_array_equal(gradient(x).full_tensor().asnumpy(), 2 * x.full_tensor().asnumpy())
