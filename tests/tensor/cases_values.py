# SPDX-License-Identifier: Apache-2.0
"""Real ranks: a tensor's values, number, truth and copies are those of the whole one, or are refused on every rank.

Where a case's first line names a peer, it says what a well-known one answers in its place.
"""
import copy
import itertools
import operator
import pickle

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import DTensor, comm, debug, distribute_tensor, value_and_grad
from ms_dtensor.errors import CollectiveMismatch, LayoutError, MixedOperandError, OpRuleError
from tests.operands import P, R, S, data, mesh_1d, mesh_2d, placed
from tests.support import equal, refusal, same_on_all_ranks
from tests.tensor.cases_indexing import A, B
from tests.tiers import sampled


def counting(*shape: int) -> Tensor:
    """0, 1, 2, ... in a shape."""
    return Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


# -- values ---------------------------------------------------------------------------------------------------------
def item_float_and_int_of_a_partial(world):
    """Peer: each rank returns its own contribution (66 and 210 for 276)."""
    x = placed(counting(24), mesh_1d(), S(0))
    assert x.sum().placements == (P,), "the case is about partial values"
    assert x.sum().item() == 276 and float(x.sum()) == 276 and int(x.sum()) == 276
    assert x.max().item() == 23 and x.min().item() == 0 and x.mean().item() == 11.5
    equal(float((x * x).sum() ** 0.5), np.linalg.norm(np.arange(24)))
    equal(x.norm().item(), np.linalg.norm(np.arange(24)))


def bool_of_a_partial_decides_alike(world):
    """Peer: `bool((x > 20).any())` is False on one rank and True on another, so control flow diverges."""
    x = placed(counting(24), mesh_1d(), S(0))
    for truth, claim in ((True, (x > 20).any()), (True, (x < 1).any()), (False, (x > 0).all()), (True, (x >= 0).all()),
                         (False, (x > 99).any())):
        assert bool(claim) is truth
        same_on_all_ranks(world, "taken" if claim else "not taken")


def equality_asks_the_ranks_of_the_mesh(world):
    """Peer: `equal` all-reduces over the default group, not the mesh's, and waits for ranks that do not take part."""
    mesh = md.DeviceMesh("cpu", [0, 2], mesh_dim_names=("x",))
    if world.rank in mesh.rank_list:
        a = counting(5, 2)
        b = a.asnumpy().copy()
        b[4, 1] = -1  # differs in the last shard only
        with comm.record() as events:
            same, other = placed(a, mesh, S(0)), placed(Tensor(b), mesh, S(0))
            for fn in (lambda x, y: bool((x == y).all()), lambda x, y: bool(mint.equal(x, y))):
                assert fn(same, same) is True and fn(same, other) is False
        assert events and {e.group for e in events} == {(0, 2)}, events


# -- entering and leaving -------------------------------------------------------------------------------------------
def local_tensors_of_uneven_shards(world, line):
    """Peer: each rank believes in a global shape of its own."""
    rows = (3, 3, 2, 0)[world.rank]
    whole = data(6, 8, 4)  # 8 rows on 4 ranks are 2, 2, 2, 2
    mine = Tensor(whole.asnumpy()[:rows])
    for kwargs in ({"run_check": True}, {"run_check": True, "shape": (8, 4)}):
        same_on_all_ranks(world, refusal(lambda: DTensor.from_local(mine, line, [S(0)], **kwargs), LayoutError))
    nine = data(7, 9, 4)
    lo, hi = min(3 * world.rank, 9), min(3 * world.rank + 3, 9)
    good = DTensor.from_local(Tensor(nine.asnumpy()[lo:hi]), line, [S(0)], shape=(9, 4), run_check=True)
    equal(good, nine)
    unchecked = DTensor.from_local(mine, line, [S(0)])
    for use in (lambda t: t.full_tensor(), lambda t: t.redistribute(placements=[S(1)])):
        refusal(lambda: use(unchecked), CollectiveMismatch)


def layouts_that_differ(world, line):
    """Peer: each rank cuts by its own, and rows are taken together that are none of one tensor's."""
    odd = world.rank == 2
    for one, other in ((S(0), S(1)), (md.FusedShard(0, (8, 8)), md.FusedShard(0, (4, 12))), (S(0), md.FusedShard(0, (8, 8)))):
        how = other if odd else one
        refusal(lambda: distribute_tensor(data(8, 16, 16), line, [how]), CollectiveMismatch)
        refusal(lambda: md.fully_shard(nn.Dense(16, 16, has_bias=False), mesh=line, shard_placement_fn=lambda p: how),
                CollectiveMismatch)


# -- communication and gradients ------------------------------------------------------------------------------------


def values_are_global_or_refused(world):
    x = placed(A, mesh_1d(), S(0))
    assert len(x) == 5 and x.ndim == 2 and tuple(x.shape) == (5, 6) and x.numel() == 30 and x.nbytes == 120
    assert x.stride() == (6, 1), x.stride()
    assert x.strides == (24, 4) and x.itemsize == 4 and x.dtype == ms.float32
    assert [float(r.sum().item()) for r in x] and len(list(x)) == 5
    equal(mint.stack(list(x)), A)
    assert abs(x[2, 3].item() - A[2, 3]) < 1e-6 and abs(float(x.sum()) - A.sum()) < 1e-4
    one = placed(np.array([3], np.int32), mesh_1d(), S(0))  # held by one rank only
    assert one.item() == 3 and int(one) == 3 and bool(one) and list(range(4))[one[0]] == 3
    for read in (lambda: x.asnumpy(), lambda: x.numpy(), lambda: np.asarray(x), lambda: np.array(x), lambda: x.tolist(),
                 lambda: x.get_bytes(), lambda: x.item(), lambda: bool(x), lambda: float(x), lambda: Tensor(x),
                 lambda: ms.tensor(x)):
        refusal(read, (OpRuleError, TypeError))
    for swallow in (lambda: np.add(x, x), lambda: np.sin(x), lambda: np.ones((5, 6), np.float32) * x,
                    lambda: np.ones((5, 6), np.float32) + x):
        refusal(swallow, (TypeError, OpRuleError))
    equal(np.float32(2) * x, 2 * A)
    equal(x * np.float32(2), 2 * A)
    equal(x.T, A.T)
    assert "f32[5@tp, 6]" in repr(x) == str(x) == f"{x}" and f"{x.sum():.2f}" == f"{A.sum():.2f}"
    assert hash(x) == id(x) and x in [x] and {x: 1}[x] == 1
    equal(x == x, A == A)
    equal((x > 0) & (x < 1), (A > 0) & (A < 1))
    equal(sum([x, x, x]), 3 * A)
    equal(x.fill(2.5), 0 * A + 2.5)
    assert not (x.data is not x)


def plain_operands_raise_in_every_position(world):
    x, plain = placed(A, mesh_1d(), S(0)), Tensor(B)
    param = Parameter(Tensor(B), name="p")
    for other in (plain, param):
        for mix in (lambda t: t + x, lambda t: x + t, lambda t: t * x, lambda t: t - x, lambda t: t / x,
        lambda t: t ** x,
                    lambda t: t // x, lambda t: t % x, lambda t: t @ x.T, lambda t: t == x, lambda t: t < x,
                    lambda t: t.add(x),
                    lambda t: t.add(other=x), lambda t: t.masked_fill(x > 0, 0.0), lambda t: mint.add(t, other=x),
                    lambda t: mint.add(input=t, other=x), lambda t: mint.add(input=x, other=t),
                    lambda t: mint.where(condition=x > 0, input=t, other=x),
                    lambda t: ops.stack((t, x)), lambda t: ops.addn([t, x]), lambda t: mint.cat([t, x]),
                    lambda t: ops.add(t, x),
                    lambda t: t.copy_(x), lambda t: t.add_(x)):
            refusal(lambda m=mix, t=other: m(t), MixedOperandError)
    equal(plain, B)
    equal(param, B)
    equal(x, A)


def keyword_operands_work(world):
    """MindSpore: "Input has no __fallback__ attribute!"."""
    x, y = placed(A, mesh_1d(), S(0)), placed(B, mesh_1d(), S(1))
    equal(mint.add(input=x, other=y), A + B)
    equal(mint.add(other=y, input=x, alpha=2), A + 2 * B)
    equal(mint.sub(input=x, other=y), A - B)
    equal(mint.mul(input=x, other=y), A * B)
    equal(mint.div(input=x, other=y), A / B)
    equal(mint.where(condition=x > 0, input=x, other=y), np.where(A > 0, A, B))
    equal(mint.max(input=x), A.max())
    equal(mint.max(input=x, dim=1)[0], A.max(1))
    equal(mint.clamp(input=x, min=0), A.clip(0))
    equal(mint.eq(input=x, other=x), A == A)
    equal(x.add(other=y), A + B)
    equal(mint.add(x, other=y), A + B)
    equal(mint.reshape(input=x, shape=(6, 5)), A.reshape(6, 5))
    equal(mint.cat(tensors=(x, y), dim=1), np.concatenate([A, B], 1))
    value, g = value_and_grad(lambda t: mint.mul(input=t, other=t).sum(), 0)(x)
    equal(value, (A * A).sum())
    equal(g, 2 * A)


def lists_of_tensors_are_seen(world):
    """MindSpore: `ops.stack([x, y])` and `AddN` give the local tensors' stack, plain."""
    x, y = placed(A, mesh_1d(), S(0)), placed(B, mesh_1d(), S(1))
    for got, want in ((ops.stack((x, y), 1), np.stack([A, B], 1)), (ops.Stack(0)([x, y]), np.stack([A, B])),
                      (mint.stack([x, y], -1), np.stack([A, B], -1)), (ops.addn((x, y)), A + B),
                      (ops.AddN()([x, y, x]), 2 * A + B),
                      (ops.hstack((x, y)), np.hstack([A, B])), (ops.vstack((x, y)), np.vstack([A, B])),
                      (ops.full_like(x, 2.0), 0 * A + 2), (ops.zeros_like(x), 0 * A)):
        assert isinstance(got, DTensor)
        equal(got, want)


def copies_and_pickles(world, grid):
    x = placed(A, grid, S(0), S(1))
    w = Parameter(placed(A, grid, S(0), R), name="w", requires_grad=False)
    for one in (x, w):
        for again in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert isinstance(again, DTensor) and again.layout is one.layout
            equal(again, A)
    for again in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert isinstance(again, Parameter) and again.name == "w" and not again.requires_grad
        again.zero_()
        equal(w, A, "a deep copy has storage of its own")
    state = copy.deepcopy({"x": x, "list": [x, w]})
    assert state["x"] is state["list"][0], "deepcopy keeps identities"
    equal(state["list"][1], A)


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


def a_cast_to_its_own_dtype_shares_a_tensor_and_copies_a_view(world):
    views = {"itself": lambda t: t, "computed": lambda t: t * 2, "narrow": lambda t: mint.narrow(t, 1, 0, 2),
             "rows": lambda t: t[:], "turned": lambda t: mint.transpose(t, 0, 1), "split": lambda t: mint.split(t, [3], 0)[0],
             "cast": lambda t: t.astype(t.dtype)}
    casts = {"astype": lambda t: t.astype(t.dtype), "to": lambda t: t.to(t.dtype), "cast": lambda t: ops.cast(t, t.dtype)}
    meshes = (mesh_1d(), [S(0)]), (mesh_1d(), [R]), (mesh_2d(), [S(0), S(1)])
    for dtype in (np.float32, np.int64):
        values = np.random.default_rng(3).integers(-9, 9, (3, 2)).astype(dtype)  # one rank's shard is empty
        for (mesh, how), (kind, view), (name, cast) in sampled(itertools.product(
                meshes, views.items(), casts.items()), 2, dtype is np.int64):
            def tensors(x, view=view, cast=cast):
                v = view(x)
                c = cast(v)
                c[0, :] = 50
                return x, v, c
            want = tensors(Tensor(values))
            try:
                got = tensors(distribute_tensor(Tensor(values), mesh, how))
            except OpRuleError as e:  # what is a view on one device, and a copy of shards here
                assert "a copy here" in str(e) and (kind == "split" or name == "cast"), (kind, name, e)
                continue
            equal(got, want, f"{kind} {name} {dtype}")


def an_index_of_everything_hands_the_tensor_back_where_one_device_does(world):
    values = np.random.default_rng(4).normal(size=(3, 2)).astype(np.float32)
    plain, x = Tensor(values), distribute_tensor(Tensor(values), mesh_1d(), [S(0)])
    for index in (..., (...,), (), (slice(None),), (slice(0, 3), ...), (slice(None), slice(-2, None)), slice(None), slice(0, 9),
                  (slice(0, 2),), (..., slice(1, 2)), None, (None, ...), (slice(None, None, -1),) * 0):
        assert (plain[index] is plain) == (x[index] is x), index
        equal(x[index], plain[index], str(index))
