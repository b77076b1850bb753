# SPDX-License-Identifier: Apache-2.0
"""A backward in two parts: bit for bit that in one, hooks once, and little held between; on ranks: tests/pipeline."""
from __future__ import annotations

import gc
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
from ms_dtensor.errors import OpRuleError
from ms_dtensor.internals.names import Function, InsertGradientOf
from ms_dtensor.pipeline import PipelineStage
from tests.operands import Built, filled, weight

pytestmark = pytest.mark.usefixtures("cpu")
RNG = np.random.default_rng(3)


def drawn(*shape: int) -> Tensor:
    return Tensor(RNG.normal(size=shape).astype(np.float32))


def own(product, *shape: int) -> nn.Cell:
    """A weight of its own, and how a product reads it."""
    return Built(lambda c, x: product(mint.tanh(x), c.w), w=weight(*shape))


class Tied(nn.Cell):
    """One weight looked up in and multiplied with, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen = nn.Embedding(8, 8), nn.Dense(8, 8)
        self.scale = Parameter(Tensor(np.zeros(8, np.float32)), name="scale")
        self.register_buffer("ids", Tensor([1, 2, 1, 5], ms.int32))
        for p in self.frozen.get_parameters():
            p.requires_grad = False

    def construct(self, x):
        x = x + self.table(self.ids) * self.scale
        return mint.matmul(mint.tanh(self.frozen(x)), self.table.embedding_table.swapaxes(0, 1))


def small(gradient):
    return ms.ops.clamp(gradient, -.01, .01)  # of a sum it is another than the sum of both


def hooked(w):
    y = w * 1.5
    y.register_hook(small)
    return y


CELLS = {  # a cell, and how many held products it has
    "Dense": (lambda: nn.Dense(8, 4), 1),
    "Dense without bias": (lambda: nn.Dense(8, 4, has_bias=False), 1),
    "Linear": (lambda: mint.nn.Linear(8, 4), 1),
    "Linear without bias": (lambda: mint.nn.Linear(8, 4, bias=False), 1),
    "matmul": (lambda: own(mint.matmul, 8, 4), 1),
    "@": (lambda: own(lambda x, w: x @ w, 8, 4), 1),
    "the weight first": (lambda: own(lambda x, w: mint.matmul(w, x.T), 4, 8), 1),
    "transposed": (lambda: own(lambda x, w: mint.matmul(x, w.T), 4, 8), 1),
    "three times": (lambda: own(lambda x, w: mint.matmul(mint.tanh(mint.matmul(mint.matmul(x, w), w)), w), 8, 8), 3),
    "bmm": (lambda: own(lambda x, w: mint.bmm(x.reshape((2, 2, 8)), w), 2, 8, 3), 1),
    "of weights alone": (lambda: own(lambda x, w: mint.matmul(x, mint.matmul(w, w)), 8, 8), 1),
    "also summed": (lambda: own(lambda x, w: mint.matmul(x, w.T) * (w * w).sum() + w.T.sum(), 4, 8), 1),
    "with a hook, also summed": (lambda: own(lambda x, w: mint.matmul(x, v := hooked(w)) + v.sum(), 8, 4), 0),
    "with a gradient's function, also summed": (
        lambda: own(lambda x, w: mint.matmul(x, v := InsertGradientOf(small)(w * 1.5)) + v.sum(), 8, 4), 0),
    "no product": (lambda: own(lambda x, w: x * w, 8), 0),
    "norm": (lambda: nn.SequentialCell(nn.LayerNorm((8,)), nn.Dense(8, 8), nn.ReLU(), nn.Dense(8, 4)), 2),
    "tied": (Tied, 1),
}


def stage_of(cell: nn.Cell, distributed: bool) -> PipelineStage:
    mesh = md.init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
    cell = filled(cell)
    return PipelineStage(md.distribute_module(cell, mesh["tp"]) if distributed else cell, 1, 2, mesh["pp"])


def given(stage: PipelineStage, x: Tensor, distributed: bool) -> Tensor:
    return md.distribute_tensor(x, stage.mesh.root["tp"], [md.Replicate()]) if distributed else x


def array(g) -> np.ndarray:
    return (g.full_tensor() if isinstance(g, md.DTensor) else g).asnumpy()


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("name", CELLS)
def test_two_parts_are_one(name, distributed):
    make, products = CELLS[name]
    stage = stage_of(make(), distributed)
    xs = [given(stage, drawn(4, 8), distributed) for _ in range(3)]
    params = stage.params()
    for _ in range(2):  # the second time calls are known
        whole = [stage.record((x,), {}, lambda y: (y ** 3).mean()) for x in xs]
        want = [one.backward(None, params) for one in whole]
        seen: list = []
        hooks = [p.register_hook(lambda g, seen=seen: seen.append(1)) for p in params]
        made = [stage.record((x,), {}, lambda y: (y ** 3).mean(), in_parts=True) for x in xs]
        dxs = {i: made[i].backward_inputs(None, params) for i in (2, 0, 1)}
        assert not seen and [len(one._store.products) for one in made] == [products] * 3
        grads = {i: made[i].backward_weights(params) for i in (1, 2, 0)}
        assert len(seen) == 3 * len(params), "a hook runs once, later"
        for hook in hooks:
            hook.remove()
        for i, (dx, dw) in enumerate(want):
            for got, one in zip((*dxs[i], *grads[i]), (*dx, *dw), strict=True):
                assert isinstance(got, md.DTensor) is distributed
                np.testing.assert_array_equal(array(got), array(one))
    assert all(p.requires_grad for p in stage.params()) and stage.params() == params, "parameters stand in their places"


class Place:
    """What a test saves in place of a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize(("layer", "saved_of", "taken_of"), [
    (nn.Dense, [], [(4, 4), (4, 8), (4, 8), (4, 8)]),  # of each product the activation and its result's gradient
    (mint.nn.Linear, [], [(4, 4), (4, 8), (4, 8), (4, 8)]),
    # one of no matrices has a graph of its own, which has the activation and the weight
    (lambda *of: own(lambda x, w: mint.bmm(x[None], w)[0], 1, *of), [(1, 4, 8), (1, 4, 8), (1, 8, 4), (1, 8, 8)], [])])
def test_between_the_parts_only_operands_of_products_are_held(layer, saved_of, taken_of, distributed):
    net = nn.SequentialCell(nn.LayerNorm((8,)), layer(8, 8), nn.ReLU(), layer(8, 4))
    stage, saved = stage_of(net, distributed), []
    x = given(stage, drawn(4, 8), distributed)

    def pack(x):
        place = Place(x)
        saved.append(weakref.ref(place))
        return place

    def living() -> list[tuple[int, ...]]:
        gc.collect()
        return sorted(tuple(ref().x._shape) for ref in saved if ref() is not None)

    def taken() -> list[tuple[int, ...]]:
        return sorted(tuple(x._shape) for late in made._store.products for x in getattr(late, "args", ())
                      if type(x) is Tensor)  # not a weight
    with ms.saved_tensors_hooks(pack, lambda place: place.x):
        made = stage.record((x,), {}, lambda y: (y ** 3).mean(), in_parts=True)
    assert len(living()) > 4 and not taken()
    made.backward_inputs(None, stage.params())
    assert living() == saved_of and taken() == taken_of
    made.backward_weights(stage.params())
    assert not living() and not taken()


def test_products_of_one_input_hold_it_once():
    """A view of it, which MindSpore's kernels copy, would be held by each of them."""
    both = Built(lambda c, x: c.a(x) * c.b(x), a=nn.Dense(8, 5), b=nn.Dense(8, 5))
    two = Built(lambda c, x: c.both(mint.tanh(x)), both=both)
    stage, saved = stage_of(two, False), []

    def pack(x):
        saved.append((tuple(x._shape), x.data_ptr()))
        return x
    with ms.saved_tensors_hooks(pack, lambda x: x):
        made = stage.record((drawn(4, 8),), {}, lambda y: (y ** 3).mean(), in_parts=True)
    assert len({at for shape, at in saved if shape == (4, 8)}) == 1, saved
    made.drop()


MATRICES = ["Dense without bias", "Linear", "Linear without bias", "matmul", "@", "transposed"]  # have no graph of their own


@pytest.mark.parametrize("name", MATRICES[:-1])  # MindSpore does not see that of a view's base
def test_a_weight_that_is_written_to_between_the_forward_and_its_backward_is_refused(name):
    stage = stage_of(CELLS[name][0](), False)
    made, params = stage.record((drawn(4, 8),), {}, None, in_parts=True), stage.params()
    params[0].copy_(drawn(*params[0].shape))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward_inputs(drawn(4, 4), params)
    made.drop()


def added(w):
    w += 0.5


WRITES = {"set_data": lambda w: w.set_data(w * 2), "assign_value": lambda w: w.assign_value(w * 2), "+=": added,
          "by index": lambda w: w.__setitem__((slice(None), 1), .25), "assign": lambda w: ms.ops.assign(w, w * 2),
          "by name": lambda w: w.set_data(w * len(w.name))}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("way", WRITES)
def test_what_a_forward_writes_into_its_weight_is_there_and_stays(way, distributed):
    def construct(c, x):
        WRITES[way](c.w)
        return mint.matmul(mint.tanh(x), c.w)
    plain, net = (filled(Built(construct, w=weight(8, 4))) for _ in range(2))
    stage, x, dy = stage_of(net, distributed), drawn(4, 8), drawn(4, 4)
    want, (grad,) = ms.value_and_grad(lambda t: (plain(t) * dy).sum(), 0, [plain.w])(x)[1]
    made = stage.record((given(stage, x, distributed),), {}, None, in_parts=True)
    (got,), (w,) = made.backward([given(stage, dy, distributed)], stage.params())
    for a, b in ((got, want), (w, grad), (net.w, plain.w)):
        np.testing.assert_allclose(array(a), array(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("rows", [(4,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_products_of_what_is_recomputed(name, rows, trained, distributed):
    """What runs again is the same product with one graph, which must save as many tensors in the same order."""
    net = nn.SequentialCell(nn.Embedding(9, 8), CELLS[name][0](), nn.Tanh())
    net[0].embedding_table.requires_grad = trained  # or the product's input has no gradient
    stage = stage_of(net, distributed)
    x, dy = (given(stage, t, distributed) for t in (Tensor(RNG.integers(0, 9, rows), ms.int32), drawn(*rows, 4)))
    want = stage.record((x,), {}, None).backward([dy], stage.params())
    net.recompute()
    made = stage.record((x,), {}, None, in_parts=True)
    got = made.backward_inputs([dy], stage.params()), made.backward_weights(stage.params())
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_array_equal(array(a), array(b))


@pytest.mark.parametrize("name", MATRICES)
def test_no_rows_give_a_weight_no_gradient(name):
    """Of nothing to add up MindSpore's kernels write nothing, and what lay there would be a gradient."""
    stage = stage_of(CELLS[name][0](), False)
    params = stage.params()
    lain = [drawn(*p.shape) for p in params for _ in range(50)]
    made = stage.record((drawn(0, 8),), {}, None, in_parts=True)
    del lain
    (dx,), grads = made.backward([drawn(0, 4)], params)
    assert dx.shape == (0, 8)
    for p, dw in zip(params, grads, strict=True):
        assert dw.shape == p.shape and not dw.asnumpy().any()


def test_parts_come_once_and_in_order():
    stage = stage_of(nn.Dense(8, 4), False)
    made = stage.record((drawn(4, 8),), {}, None, in_parts=True)
    with pytest.raises(OpRuleError, match="nothing is held"):
        made.backward_weights(stage.params())
    made.backward_inputs(drawn(4, 4), stage.params())
    with pytest.raises(OpRuleError, match="nothing left of the forward"):
        made.backward_inputs(drawn(4, 4), stage.params())
    made.drop()
    with pytest.raises(OpRuleError, match="nothing is held"):
        made.backward_weights(stage.params())


def test_a_weight_that_is_reached_past_its_cell_has_its_gradient_too():
    """By a list of the user's own, say; no gate stands there."""
    net = nn.Dense(8, 4)
    stage, x = stage_of(net, False), drawn(4, 8)
    w = net.weight

    def loss(y):
        return (y ** 3).mean() + (w * w).sum()
    want = stage.record((x,), {}, loss).backward(None, stage.params())
    got = stage.record((x,), {}, loss, in_parts=True).backward(None, stage.params())
    for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_allclose(array(a), array(b), rtol=1e-6)


class Times(Function):
    """A product that notes whose gradients it is asked for."""

    asked: list[tuple] = []

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        Times.asked.append(ctx.needs_input_grad)
        x, w = ctx.saved_tensors
        return dy * w, dy * x


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_batch_has_no_gradient(in_parts):
    """It costs what nobody takes: of a first product over tp also an all-reduce."""
    mesh, x = md.init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), drawn(4, 8)
    got = {}
    for index in (0, 1):
        cell = filled(own(Times.apply, 8))
        stage = PipelineStage(cell, index, 2, mesh)
        dx, got[index] = stage.record((x,), {}, lambda y: (y ** 3).mean(), in_parts).backward(None, stage.params())
        assert len(dx) == index and Times.asked.pop() == (index == 1, True)
        y = mint.tanh(x)
        np.testing.assert_allclose(got[index][0].asnumpy(), (3 * (y * cell.w) ** 2 * y).sum(0).asnumpy() / 32, rtol=1e-5)


def test_what_raises_in_the_forward_leaves_parameters_in_their_places():
    net = nn.Dense(8, 4)
    stage, w = stage_of(net, False), net.weight

    def loss(y):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        stage.record((drawn(4, 8),), {}, loss, in_parts=True)
    with pytest.raises(ValueError):
        stage.record((drawn(4, 7),), {}, None, in_parts=True)
    assert net.weight is w and isinstance(net.weight, Parameter)
    same = stage.record((drawn(4, 8),), {}, None)
    assert len(same.backward(drawn(4, 4), stage.params())[1]) == 2
