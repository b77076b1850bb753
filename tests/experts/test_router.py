# SPDX-License-Identifier: Apache-2.0
"""The router, and the mixture on one device, against plain definitions; what does not fit is refused."""
import ctypes
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import ms_dtensor as md
from ms_dtensor.errors import ConfigError, DTensorError
from ms_dtensor.ops.local import moe as twins
from ms_dtensor.parallel import experts as module
from ms_dtensor.parallel.experts import ratio
from tests.experts.reference import expected, np_router, operands, random_choice

FORMS = {
    "Mixtral": {}, "not normalised (OLMoE)": {"normalise": False},
    "DeepSeek-V2": {"groups": 4, "group_limit": 2, "normalise": False, "scale": 16.0},
    "DeepSeek-V3": {"score": "sigmoid", "groups": 4, "group_limit": 2, "scale": 2.5, "bias": True},
    "sigmoid": {"score": "sigmoid", "normalise": False}, "bias": {"bias": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_choices_and_gradients_are_the_definitions(form):
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(size=(9, 8)) * 2, rng.normal(size=8) * 0.3
    how = dict(FORMS[form])
    of_numpy = how | ({"bias": bias} if how.get("bias") else {})
    router = md.Router(3, **(how | ({"bias": Tensor(bias)} if how.get("bias") else {})))
    want, picks = np_router(logits, 3, **of_numpy)
    weights, chosen = router(Tensor(logits))
    np.testing.assert_array_equal(chosen.asnumpy(), picks)
    np.testing.assert_allclose(weights.asnumpy(), want, rtol=1e-12)
    low, _ = router(Tensor(logits.astype(np.float32)))
    assert low.dtype == ms.float32 and chosen.dtype == ms.int32
    dout = rng.normal(size=want.shape)
    grad = ms.grad(lambda t: (router(t)[0] * Tensor(dout)).sum())(Tensor(logits)).asnumpy()
    eps = 1e-6
    for at in ((0, 0), (3, 5), (8, picks[8, 0]), (2, picks[2, 2])):
        moved = logits.copy()
        moved[at] += eps
        slope = ((np_router(moved, 3, **of_numpy)[0] - want) * dout).sum() / eps
        assert abs(slope - grad[at]) < 1e-4 * max(1, abs(slope)), at


def test_of_equal_scores_the_lower_expert_is_taken_and_of_equal_groups_the_lower_group():
    weights, chosen = md.Router(3)(Tensor(np.zeros((2, 64), np.float32)))
    assert chosen.asnumpy().tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights.asnumpy(), 1 / 3, rtol=1e-6)
    assert md.Router(2, groups=4, group_limit=2)(Tensor(np.zeros((1, 8), np.float32)))[1].asnumpy().tolist() == [[0, 1]]


def test_half_precision_is_routed_in_float32():
    logits = np.random.default_rng(2).normal(size=(5, 6)).astype(np.float16)
    weights, chosen = md.Router(2)(Tensor(logits))
    want, picks = np_router(logits, 2)
    assert weights.dtype == ms.float32
    np.testing.assert_allclose(weights.asnumpy(), want, rtol=1e-5)
    np.testing.assert_array_equal(chosen.asnumpy(), picks)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("of_bias", [False, True])
def test_one_score_that_is_nan_is_told_by_all_weights_of_its_token(score, of_bias):
    """It is sorted last and never chosen, and a CPU's softmax in float32 gives 0 for the experts beside it."""
    logits, bias = np.random.default_rng(11).normal(size=(3, 6)).astype(np.float32), np.zeros(6, np.float32)
    (bias[2:3] if of_bias else logits[1, 4:5]).fill(np.nan)
    weights, _ = md.Router(2, score=score, bias=Tensor(bias))(Tensor(logits))
    assert np.isnan(weights.asnumpy()).all(1).tolist() == ([True] * 3 if of_bias else [False, True, False])
    hidden = np.array([[1.0, -np.inf, 2.0]], np.float32)  # an expert that a model leaves out is no fault
    assert np.isfinite(md.Router(2, score=score)(Tensor(hidden))[0].asnumpy()).all()


def mixed(k, expert=1, chosen=np.int32, experts=np.float32, squeezed=False, **how):
    """`moe` of four experts, of which each token has chosen one and the same, k times."""
    shapes = (2, 3), (2,) if squeezed else (2, k), (4, 6, 3), (4, 3, 6), (4, 6, 3)
    x, weights, *ws = (Tensor(np.ones(s, t)) for s, t in zip(shapes, (np.float32,) * 2 + (experts,) * 3))
    return md.moe(x, weights, Tensor(np.full(shapes[1], expert, chosen)), *ws, **how)


@pytest.mark.parametrize("room", [2, np.int64(2), 2 ** 40])
def test_room_is_a_whole_number(room):
    assert mixed(1, room=room).asnumpy().any(1).tolist() == [True, True]


@pytest.mark.parametrize("expert", [4, -2])
def test_an_expert_that_there_is_not_is_refused(expert):
    with pytest.raises(DTensorError, match="4 choices"):
        mixed(2, expert)


@pytest.mark.parametrize("make, text", [
    (lambda: md.Router(9)(Tensor(np.ones((2, 8), np.float32))), "k with at most 8"),
    (lambda: md.Router(5, groups=2)(Tensor(np.ones((2, 8), np.float32))), "of the 4 in its groups"),
    (lambda: md.Router(2, groups=3)(Tensor(np.ones((2, 8), np.float32))), "8 experts do not fit"),
    (lambda: md.Router(2, groups=2, group_limit=3), "group_limit with at most 2"),
    (lambda: md.Router(2, score="tanh"), "'softmax' or 'sigmoid'"),
    (lambda: md.Router("2"), "k = '2'"),
    (lambda: md.Router(2, groups=2.0), "groups = 2.0"),
    (lambda: mixed(1, mesh="ep"), "'mesh' is 'ep'"),
    (lambda: mixed(1, shared=3), "'shared' is 3"),
    (lambda: md.Router(2)(Tensor(np.ones((2, 3, 8), np.float32))), "one row per token"),
    (lambda: md.update_expert_bias(Tensor([0.0, 0.0]), Tensor([1, 2, 3]), 0.1), "one count for each bias"),
    (lambda: md.expert_balance_loss(Tensor(np.ones((5, 2))), Tensor(np.zeros((5, 1), np.int32)), 2), "not sequences of 2"),
    (lambda: md.ExpertParallel(dedup="yes"), "'dedup' is 'yes'"),
    (lambda: md.Router(2, bias=Tensor(np.ones(3, np.float32)))(Tensor(np.ones((2, 8), np.float32))), "bias of [8]"),
    (lambda: md.update_expert_bias(Tensor([0.0, 0.0]), Tensor([0.6, 0.4]), 0.1), "a share of the load would be cut to 0"),
    (lambda: md.update_expert_bias(Tensor([0, 0]), Tensor([3, 1]), 0.1), "a bias of float32"),
    (lambda: md.expert_counts(Tensor([0, 1], ms.int32), 2), "not one row per token"),
    (lambda: md.expert_balance_loss(Tensor(np.ones((4, 2))), Tensor(np.zeros((4, 1), np.int32)), 0), "not sequences of 0"),
    (lambda: md.expert_balance_loss(Tensor(np.ones((4, 2))), Tensor(np.zeros(4, np.int32)), 2), "chosen [rows * t, k]"),
    (lambda: mixed(1, room=2.5), "room = 2.5"),
    (lambda: mixed(1, room=True), "room = True"),
    (lambda: mixed(1, squeezed=True), "chosen to [n, 1]"),
    (lambda: mixed(0), "1 <= k <= E"),
    (lambda: mixed(1, experts=np.float64), "x.astype(w1.dtype)"),
    (lambda: mixed(5), "k <= E"),
    (lambda: mixed(2, chosen=np.float32), "chosen.astype(ms.int32)")])
def test_what_does_not_fit_is_refused(make, text):
    with pytest.raises(ConfigError) as info:
        make()
    assert text in str(info.value)


def test_losses_are_their_definitions():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(12, 5))
    weights, chosen = np_router(logits, 2)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    want = np.mean([5 * sum((chosen[r:r + 4] == e).sum() / 4 * scores[r:r + 4, e].mean() for e in range(5))
                    for r in (0, 4, 8)])
    router = md.Router(2)
    got = md.expert_balance_loss(router.scores(Tensor(logits)), router(Tensor(logits))[1], 4)
    assert abs(float(got) - want) < 1e-12
    by_rows = np.mean([float(md.expert_balance_loss(router.scores(Tensor(part)), router(Tensor(part))[1], 4))
                       for part in np.split(logits, 3)])
    assert abs(by_rows - want) < 1e-12  # accumulation changes nothing
    z = float(md.router_z_loss(Tensor(logits)))
    assert abs(z - np.mean(np.log(np.exp(logits).sum(1)) ** 2)) < 1e-12


def test_bias_moves_against_the_load_and_keeps_its_mean():
    counts = np.array([[5, 1, 0, 2], [2, 2, 2, 2]])
    bias = np.random.default_rng(4).normal(size=(2, 4)).astype(np.float32)
    got = md.update_expert_bias(Tensor(bias), Tensor(counts), rate=0.01).asnumpy()
    step = np.array([-0.01, 0.01, 0.01, 0.0])
    np.testing.assert_allclose(got - bias, [step - step.mean(), [0] * 4], atol=1e-7)
    np.testing.assert_allclose(got.mean(1), bias.mean(1), atol=1e-7)
    np.testing.assert_array_equal(md.expert_counts(Tensor([[0, 3], [0, -1]], ms.int32), 4).asnumpy(), [2, 0, 0, 1])


CHOICES = {"random": lambda rng: random_choice(rng, 11, 5, 2), "all of them": lambda rng: random_choice(rng, 11, 5, 5),
           "one expert": lambda rng: np.full((11, 1), 3, np.int32),
           "some dropped": lambda rng: np.where(rng.random((11, 3)) < 0.4, np.int32(-1), random_choice(rng, 11, 5, 3)),
           "all dropped": lambda rng: np.full((11, 2), -1, np.int32)}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("kernels", ["CPU", "device"])
def test_the_mixture_is_every_token_through_every_expert(name, kernels, monkeypatch):
    """Of the device's form, with a CPU's double of the grouped product."""
    if kernels == "device":
        monkeypatch.setattr(module, "on_cpu", lambda: False)
        monkeypatch.setattr(module.auto_generate, "grouped_matmul_v4", twins.grouped_matmul_v4)
        monkeypatch.setattr(ops, "swiglu", lambda x, dim: (lambda a, b: a * ops.sigmoid(a) * b)(*ops.chunk(x, 2, dim)))
    rng = np.random.default_rng(5)
    chosen = CHOICES[name](rng)
    x, weights, dout, ws = operands(6, 11, 5, chosen.shape[1])
    want = expected(x, weights, chosen, dout, ws)
    args = [Tensor(a) for a in (x, weights, *ws)]

    def run(x, weights, *w):
        return md.moe(x, weights, Tensor(chosen), *w)
    got = [run(*args).asnumpy()] + [g.asnumpy() for g in ms.grad(
        lambda *a: (run(*a) * Tensor(dout)).sum(), (0, 1, 2, 3, 4))(*args)]
    for g, w, what in zip(got, want, ("y", "dx", "dweights", "dw1", "dw2", "dw3"), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12, err_msg=what)


def test_the_formula_for_bytes_counts_ranks_of_a_token():
    """The expected number of different ranks among a token's experts, by drawing."""
    rng = np.random.default_rng(7)
    for experts, k, ranks in ((64, 8, 8), (8, 2, 4), (16, 4, 2)):
        drawn = np.mean([len({*(rng.choice(experts, k, replace=False) * ranks // experts)}) for _ in range(4000)])
        assert math.isclose(ratio(experts, k, ranks, 10 ** 9), drawn / k, rel_tol=0.02)
    assert ratio(64, 8, 8, 4 * 256) <= 0.70


def test_loads_that_differ_leave_nothing_behind():
    """MindSpore's CPU backend keeps a kernel with scratch for each number of rows that it meets: 10 MB in these steps."""
    class Heap(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")]
    heap = ctypes.CDLL(None).mallinfo2
    heap.restype, rng = Heap, np.random.default_rng(8)
    x, weights, dout, ws = (np.asarray(a, np.float32) if not isinstance(a, list) else [w.astype(np.float32) for w in a]
                            for a in operands(9, 300, 3, 1, d=64, f=96))
    args = [Tensor(a) for a in (x, weights, *ws)]

    def step(first):
        chosen = Tensor(np.where(np.arange(300) < first, 0, 1 + rng.integers(0, 2, 300)).astype(np.int32)[:, None])
        ms.grad(lambda *a: (md.moe(a[0], a[1], chosen, *a[2:]) * Tensor(dout)).sum(), (0, 1, 2, 3, 4))(*args)
    for first in (1, 2, 3):
        step(first)
    before = heap().used
    for first in range(10, 210, 5):
        step(first)
    assert heap().used - before < 2 << 20, (heap().used - before) >> 20
