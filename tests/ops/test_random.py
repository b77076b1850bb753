# SPDX-License-Identifier: Apache-2.0
"""One global stream: the same global tensor on every mesh, bit for bit; replicas agree; state is saved and replayed."""
import threading

import mindspore as ms
import mindspore.mint.nn.functional as F  # noqa: N812
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import Partial, Replicate, Shard
from ms_dtensor.comm import fake_world
from ms_dtensor.errors import ConfigError, LayoutError, OpRuleError
from ms_dtensor.ops import rng
from ms_dtensor.tensor import init

R, S = Replicate(), Shard
SHAPE = (5, 7)
MESHES = [((2,), [S(0)]), ((3,), [S(1)]), ((8,), [S(0)]), ((2, 2), [S(0), S(0)]), ((2, 2), [S(1), S(0)]),
          ((2, 2), [R, S(1)])]


def whole(make, mesh_shape, placements, seed=7):
    """The global array that the ranks of a mesh make, each in its own fake world; replicas must agree."""
    size, full, seen = int(np.prod(mesh_shape)), None, None
    for rank in range(size):
        with fake_world(size, rank):
            md.manual_seed(seed)
            mesh = md.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[:len(mesh_shape)])
            x = make(mesh, placements)
            local = x.to_local().asnumpy()
            if full is None:
                full, seen = np.zeros(x.shape, local.dtype), np.zeros(x.shape, bool)
            box = tuple(slice(lo, hi) for lo, hi in x.layout.local_box())
            assert np.array_equal(full[box][seen[box]], local[seen[box]])
            full[box], seen[box] = local, True
    assert seen.all()
    return full.astype(np.float64)


def _ones(mesh, placements):
    return md.ones(SHAPE, mesh, placements)


MAKERS = {
    "rand": lambda m, p: md.rand(*SHAPE, device_mesh=m, placements=p),
    "randn": lambda m, p: md.randn(SHAPE, m, p),
    "randn float16": lambda m, p: md.randn(SHAPE, m, p, dtype=ms.float16),
    "randn bfloat16": lambda m, p: md.randn(SHAPE, m, p, dtype=ms.bfloat16),
    "rand float64": lambda m, p: md.rand(SHAPE, m, p, dtype=ms.float64),
    "randint": lambda m, p: md.randint(0, 9, SHAPE, m, p),
    "randn_like": lambda m, p: md.randn_like(_ones(m, p)),
    "mint.rand_like, twice": lambda m, p: mint.rand_like(_ones(m, p)) * 2 + mint.rand_like(_ones(m, p)),
    "ops.randn_like": lambda m, p: ops.randn_like(_ones(m, p)),
    "F.dropout": lambda m, p: F.dropout(_ones(m, p), 0.5),
    "nn.Dropout": lambda m, p: nn.Dropout(p=0.5).set_train()(_ones(m, p)),
    "ops.bernoulli": lambda m, p: ops.bernoulli(_ones(m, p), 0.3),
    "x.normal_": lambda m, p: _ones(m, p).normal_(),
    "x.uniform_": lambda m, p: _ones(m, p).uniform_(-1, 2),
    "x.random_": lambda m, p: _ones(m, p).random_(0, 9),
    "x.bernoulli_": lambda m, p: _ones(m, p).bernoulli_(0.3),
    "x.exponential_": lambda m, p: _ones(m, p).exponential_(2.0),
    "normal_": lambda m, p: init.normal_(_ones(m, p), 1.0, 3.0),
    "trunc_normal_": lambda m, p: init.trunc_normal_(_ones(m, p)),
    "xavier_uniform_": lambda m, p: init.xavier_uniform_(_ones(m, p)),
    "kaiming_normal_": lambda m, p: init.kaiming_normal_(_ones(m, p), nonlinearity="relu"),
    "eye": lambda m, p: md.eye(*SHAPE, device_mesh=m, placements=p),
    "full": lambda m, p: md.full(SHAPE, 2.5, m, p),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_mesh_makes_the_same_global_tensor(name):
    reference = whole(MAKERS[name], (1,), [R])
    assert name in ("eye", "full") or len(np.unique(reference)) > 1
    for mesh_shape, placements in MESHES:
        assert np.array_equal(whole(MAKERS[name], mesh_shape, placements), reference), (mesh_shape, placements)


@pytest.mark.parametrize("box", [((0, 5), (0, 7)), ((2, 5), (3, 4)), ((1, 1), (0, 7)), ((4, 5), (0, 1))])
@pytest.mark.parametrize("draw", [rng.words, rng.uniform, rng.normal, rng.exponential])
def test_a_box_is_a_cut_of_the_whole(draw, box):
    key = rng.Key(3, 11)
    assert np.array_equal(draw(key, SHAPE, box), draw(key, SHAPE)[tuple(slice(*b) for b in box)])


def test_numbers_are_pinned():
    """A change of the stream is a change of every seeded run: it must be deliberate."""
    assert rng.words(rng.Key(0, 0), (2,)).tolist() == PINNED
    assert rng.uniform(rng.Key(1, 2), (2,)).tolist() != rng.uniform(rng.Key(1, 3), (2,)).tolist()


PINNED = [213000021201967259, 4455796210202625458]


def test_distributions_have_their_moments():
    key, n = rng.Key(5, 0), (400, 500)
    x = rng.normal(key, n)
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01 and abs((x**4).mean() - 3) < 0.1
    assert abs(rng.uniform(key, n).mean() - 0.5) < 0.005
    assert abs(rng.exponential(key, n).mean() - 1) < 0.01
    counts = np.bincount(rng.integers(key, n, 0, 7).reshape(-1), minlength=7)
    assert abs(counts / counts.sum() - 1 / 7).max() < 0.005
    neighbours = np.corrcoef(x[:, :-1].reshape(-1), x[:, 1:].reshape(-1))[0, 1]
    assert abs(neighbours) < 0.01


def test_state_is_saved_and_replayed():
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))
        md.manual_seed(3)
        md.rand(4, device_mesh=mesh)
        state = md.get_rng_state()
        first = md.rand(4, device_mesh=mesh).asnumpy()
        assert not np.array_equal(first, md.rand(4, device_mesh=mesh).asnumpy())
        md.set_rng_state(state)
        assert np.array_equal(first, md.rand(4, device_mesh=mesh).asnumpy())
    for bad in (-1, 1 << 64, 1.5, True, "7"):
        with pytest.raises(ConfigError):
            md.manual_seed(bad)
    with pytest.raises(ConfigError):
        md.set_rng_state({"seed": 1})


def test_each_fake_world_and_thread_has_its_own_state():
    states = {}

    def rank(r):
        with fake_world(2, r):
            md.manual_seed(r)
            for _ in range(r + 1):
                rng.next_key()
            states[r] = md.get_rng_state()
    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    with fake_world(1):
        md.manual_seed(9)
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert md.get_rng_state() == {"seed": 9, "call": 0}
    assert states == {0: {"seed": 0, "call": 1}, 1: {"seed": 1, "call": 2}}


@pytest.mark.parametrize("dtype", [ms.float32, ms.bfloat16])  # bfloat16 is computed in float32 on CPU
def test_a_rank_with_an_empty_shard_draws_in_step(dtype):
    for rank in range(4):
        with fake_world(4, rank):
            md.manual_seed(1)
            mesh = md.init_device_mesh("cpu", (4,))
            F.dropout(md.ones((2, 3), mesh, [S(0)], dtype=dtype), 0.5)
            assert md.get_rng_state() == {"seed": 1, "call": 1}


def test_dropout_uses_the_same_mask_in_the_backward():
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))
        x = md.ones((20, 10), mesh, [S(0)])
        kept = []

        def loss(x):
            y = F.dropout(x, 0.5)
            kept.append(y.to_local().asnumpy().copy())
            return y.sum()
        _, grad = md.value_and_grad(loss, 0)(x)
        assert np.array_equal(grad.to_local().asnumpy(), kept[0]) and 0 < (kept[0] == 0).sum() < 200


@pytest.mark.parametrize("draw", [nn.Dropout(p=0.5), lambda x: x * ops.rand_like(x), lambda x: ops.dropout(x, 0.1)],
                         ids=["nn.Dropout", "rand", "ops.dropout"])
def test_what_plain_tensors_draw_anew_is_not_recomputed(draw):
    """MindSpore cannot draw it again on a CPU; the gradient would be of another mask than the loss."""
    class Cell(nn.Cell):
        def __init__(self, draw):
            super().__init__()
            self.draw, self.up = draw, nn.Dense(7, 7)

        def construct(self, x):
            return self.draw(self.up(x))
    x = Tensor(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
    for draws in (draw, ops.tanh):
        net = md.checkpoint_wrapper(Cell(draws).set_train())

        def step(net=net):
            return ms.grad(lambda x: (net(x) ** 2).sum())(x)
        if draws is ops.tanh:
            assert step().asnumpy().any()
        else:
            with pytest.raises(OpRuleError, match="Cell gave other numbers when it ran again"):
                step()


def test_a_matrix_that_a_recomputed_function_writes_is_not_what_it_was():
    w = Parameter(Tensor(np.eye(7, dtype=np.float32)), requires_grad=False)

    def function(x):
        ops.assign(w, w * 0.5)
        return ops.tanh(ops.matmul(x, w))
    md.checkpoint_wrapper(nn.Dense(1, 1))  # from here on `ms.recompute` is the library's
    x = Tensor(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
    with pytest.raises(OpRuleError, match="checkpoint_wrapper\\(cell\\) in place of a function"):
        ms.grad(lambda x: ms.recompute(function, x, use_reentrant=False).sum())(x)


def test_recomputation_draws_the_same_mask():
    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(p=0.5)
            self.masks = []

        def construct(self, x):
            y = self.dropout(x)
            self.masks.append(y.to_local().asnumpy().copy())
            return (y * y).sum()
    with fake_world(1):
        mesh = md.init_device_mesh("cpu", (1,))
        block = Block()
        block.set_train()
        x = md.ones((20, 10), mesh, [S(0)])
        _, grad = md.value_and_grad(lambda x: ms.recompute(block, x) + F.dropout(x, 0.5).sum() * 0, 0)(x)
        assert len(block.masks) == 2 and np.array_equal(*block.masks)
        assert np.array_equal(grad.to_local().asnumpy(), 4 * block.masks[0])
        assert md.get_rng_state()["call"] == 2  # the replay does not count


def test_factories_parse_and_refuse():
    with fake_world(2, 1):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert md.zeros((4, 4), mesh, [S(0)]).local_shape == (2, 4)
        assert md.ones(4, 4, device_mesh=mesh).local_shape == (4, 4)
        assert md.full((), 3, device_mesh=mesh).dtype == ms.int64
        assert md.full((2,), True, mesh, ("tp",)).dtype == ms.bool_
        assert md.arange(2, 13, 3, device_mesh=mesh, placements=[S(0)]).to_local().asnumpy().tolist() == [8, 11]
        assert np.allclose(md.linspace(0, 1, 5, device_mesh=mesh, placements=[S(0)]).to_local().asnumpy(), [0.75, 1])
        assert md.empty(0, 3, device_mesh=mesh, placements=[S(0)]).local_shape == (0, 3)
        own = md.init_device_mesh("cpu", (2,), mesh_dim_names=("of_this_test",))  # no equal one was made before
        with own:
            assert md.zeros(2).device_mesh is own
        for call in (lambda: md.zeros(-1, device_mesh=mesh), lambda: md.zeros((2,), mesh, [S(0)], 1),
                     lambda: md.rand((2,), mesh, [Partial()]), lambda: md.zeros_like(ms.Tensor([1.0])),
                     lambda: md.zeros((2.5,), mesh), lambda: init.normal_(ms.Tensor([1.0]))):
            with pytest.raises(LayoutError):
                call()
    two = [S(0), S(0)]
    with fake_world(4, 1):
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = md.DTensor.from_local(ms.ops.ones((2, 1)), mesh, [S(0), S(0)], shape=(8, 1))
        assert md.ones_like(x).layout is x.layout and list(x.placements) == two


REFUSED = {  # what no distribution has, or no tensor can be, wherever numbers are drawn
    "randint(5, 5)": lambda x, on: md.randint(5, 5, (4,), **on),
    "randint(words)": lambda x, on: md.randint("a", 5, (4,), **on),
    "randint(too large)": lambda x, on: md.randint(0, 2**70, (4,), **on),
    "randint(fractions)": lambda x, on: md.randint(0.5, 2.5, (4,), **on),
    "randint(dtype)": lambda x, on: md.randint(0, 5, (4,), dtype="nonsense", **on),
    "rand(size)": lambda x, on: md.rand(-1, **on), "rand(dtype)": lambda x, on: md.rand(4, dtype="nonsense", **on),
    "randn(dtype)": lambda x, on: md.randn(4, dtype=ms.string, **on),
    "rand(mesh)": lambda x, on: md.rand(4, device_mesh=3),
    "randn(placement)": lambda x, on: md.randn(4, device_mesh=on["device_mesh"], placements=[S(5)]),
    "rand_like(dtype)": lambda x, on: md.rand_like(x, dtype="nonsense"),
    "randn_like(plain)": lambda x, on: md.randn_like(Tensor([1.0])), "uniform_": lambda x, on: init.uniform_(x, "a", 3),
    "normal_": lambda x, on: init.normal_(x, 0.0, "a"), "trunc_normal_": lambda x, on: init.trunc_normal_(x, a="a"),
    "constant_": lambda x, on: init.constant_(x, "a"), "xavier_uniform_": lambda x, on: init.xavier_uniform_(x[0]),
    "kaiming_normal_": lambda x, on: init.kaiming_normal_(x, mode="a"), "F.dropout": lambda x, on: F.dropout(x, 2.0),
    "F.dropout(words)": lambda x, on: F.dropout(x, "a"),
    "F.dropout(inplace)": lambda x, on: F.dropout(x, 0.5, True, True),
    "F.dropout2d": lambda x, on: F.dropout2d(x, -1.0), "ops.dropout": lambda x, on: ops.dropout(x, 1.5),
    "ops.Dropout": lambda x, on: ops.Dropout(1.5)(x),
    "mint.rand_like": lambda x, on: mint.rand_like(x, dtype="nonsense"),
    "mint.randn_like": lambda x, on: mint.randn_like(x, dtype=ms.string),
    "mint.randint_like": lambda x, on: mint.randint_like(x, 7, 7),
    "mint.randint_like(too large)": lambda x, on: mint.randint_like(x, 0, 2**70),
    "ops.randint_like": lambda x, on: ops.randint_like(x, 9, 7), "ops.bernoulli": lambda x, on: ops.bernoulli(x, 2.0),
    "ops.bernoulli(sizes)": lambda x, on: ops.bernoulli(x, mint.cat([x, x])),
    "mint.normal": lambda x, on: mint.normal(x, -1.0),
    "mint.normal(sizes)": lambda x, on: mint.normal(x, mint.cat([x, x])),
    "mint.multinomial": lambda x, on: mint.multinomial(x, 9),
    "mint.multinomial(none)": lambda x, on: mint.multinomial(x, -1, True),
    "ops.multinomial": lambda x, on: ops.multinomial(x, 0), "x.normal_": lambda x, on: x.normal_(0.0, -1.0),
    "x.uniform_": lambda x, on: x.uniform_(3.0, 1.0), "x.random_": lambda x, on: x.random_(5, 5),
    "x.exponential_": lambda x, on: x.exponential_(-1.0), "x.bernoulli_": lambda x, on: x.bernoulli_(2.0),
    "x.bernoulli_(sizes)": lambda x, on: x.bernoulli_(mint.cat([x, x])),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("rank", (0, 2, 3), ids=("with data", "empty", "outside"))
def test_a_refused_call_draws_nothing(name, rank):
    """All ranks go on with the same numbers, whatever they hold of the tensor."""
    with fake_world(4, rank):
        md.manual_seed(7)
        mesh = md.DeviceMesh("cpu", [0, 1, 2])
        on = {"device_mesh": mesh, "placements": [S(0)]}
        x = md.ones((2, 3), **on)
        held = x.to_local().asnumpy().copy()
        before = md.get_rng_state()
        with pytest.raises(Exception) as told:
            REFUSED[name](x, on)
        assert told.type is not AssertionError and md.get_rng_state() == before
        assert np.array_equal(x.to_local().asnumpy(), held)
        after = md.randn(5, device_mesh=mesh)
        md.manual_seed(7)
        assert np.array_equal(after.to_local().asnumpy(), md.randn(5, device_mesh=mesh).to_local().asnumpy())
