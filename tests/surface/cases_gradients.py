# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own gradients, hooks, training cells, loss scalers and recomputation on DTensors, on four ranks."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import ColwiseParallel, DTensor, RowwiseParallel, distribute_module, parallelize_module, replicate
from ms_dtensor.errors import ConfigError, LayoutError, MixedOperandError, OpRuleError
from tests.operands import Built, R, S, data, filled, mesh_1d, mesh_2d, placed
from tests.support import array, counted, equal, refusal, trains_as_one_device
from tests.tiers import sampled

LAYOUTS = ([S(0), R], [R, S(1)])  # of the input and of the weight, on (dp, tp)


def same_tree(got, want, what: str) -> None:
    """Structure and values; where one device has a gradient there is a DTensor."""
    if isinstance(want, tuple | list):
        assert isinstance(got, tuple | list) and len(got) == len(want), (what, got)
        for g, w in zip(got, want):
            same_tree(g, w, what)
    elif isinstance(want, Tensor):
        assert isinstance(got, DTensor), (what, type(got))
        equal(got, want, what)
    else:
        assert got == want, (what, got, want)


# -- gradients ------------------------------------------------------------------------------------------------------------
def every_gradient_of_mindspore_is_a_dtensor(world, grid):
    x, w, v = data(1, 6, 5), data(2, 5, 4), data(3, 4)

    def loss(x, y):
        return ((x @ params[0] + params[1]) ** 2 * (y * y).sum()).mean()

    def matrix(x, y):
        return x @ params[0] * y

    def forms(x, y, sens):
        return {
            "grad": ms.grad(loss)(x, y), "one of several": ms.grad(loss, (0,))(x, y), "both": ms.grad(loss, (1, 0))(x, y),
            "value_and_grad": ms.value_and_grad(loss, (0, 1), params)(x, y)[1],
            "weight": ms.grad(loss, None, params[0])(x, y), "weights": ms.grad(loss, 0, ParameterTuple(params))(x, y),
            "ids": ms.grad(loss, 0, params, return_ids=True)(x, y),
            "first": ops.GradOperation()(loss)(x, y), "all": ops.GradOperation(get_all=True)(loss)(x, y),
            "list": ops.GradOperation(get_by_list=True)(loss, ParameterTuple(params))(x, y),
            "all and list": ops.GradOperation(True, True)(loss, ParameterTuple(params))(x, y),
            "sens": ops.GradOperation(True, True, True)(matrix, ParameterTuple(params[:1]))(x, y, sens),
            "vjp": ms.vjp(matrix, x, y, weights=params[:1])[1](sens),
            "md": md.value_and_grad(loss)(x, y)[1], "md weights": md.grad(loss, None, params)(x, y),
        }
    sens, y = data(5, 6, 4), data(4, 6, 4)
    params = [Parameter(w, name="w"), Parameter(v, name="v")]
    want = forms(x, y, sens)
    params = [Parameter(placed(w, grid, *LAYOUTS[1]), name="w"), Parameter(placed(v, grid, R, R), name="v")]
    got = forms(placed(x, grid, *LAYOUTS[0]), placed(y, grid, R, S(0)), placed(sens, grid, R, R))
    for name in want:
        same_tree(got[name], want[name], name)
    assert got["weight"].layout is params[0].layout and got["grad"].placements == (S(0), R)
    for wrong in (sens, placed(data(5, 4, 6), grid, R, R)):
        message = refusal(lambda s=wrong: ms.vjp(lambda x: x * 2, placed(x, grid, *LAYOUTS[0]))[1](s), MixedOperandError)
        assert "'sens' does not fit" in message
    plain = refusal(lambda: ms.vjp(lambda x: x * 2, x)[1](placed(x, grid, R, R)), MixedOperandError)
    assert "output plain" in plain
    for get_all in (False, True):
        unlisted = refusal(lambda g=get_all: ops.GradOperation(g, True)(loss)(placed(x, grid, R, R), placed(y, grid, R, R)),
                           LayoutError)
        assert "without weights" in unlisted


def weights_that_were_listed_before_the_model_was_distributed(world):
    x = data(1, 6, 5)
    net = nn.Dense(5, 4)
    listed, weight = net.trainable_params(), array(net.weight)
    want = ms.grad(lambda t: (t @ Tensor(weight).T).sum() * 2, 0)(x)
    distribute_module(net, mesh_1d())
    dx = placed(x, mesh_1d(), S(0))
    gx, gw = ms.grad(lambda t: net(t).sum() * 2, 0, listed)(dx)
    equal(gw[0], np.tile(2 * array(x).sum(0), (4, 1)))
    assert gw[0].shape == (4, 5) and gx.shape == want.shape


def a_forward_that_raised_leaves_no_recording(world):
    from mindspore.common.api import _pynative_executor
    x = placed(data(1, 8, 4), mesh_1d(), S(0))
    w = placed(data(2, 8, 4), mesh_1d(), S(0))
    net = distribute_module(nn.Dense(4, 2), mesh_1d()).set_grad()
    for call in (lambda: net(data(1, 8, 4)),
                 lambda: ms.grad(lambda t: t @ w)(x), lambda: ms.value_and_grad(lambda t: 1 / 0)(x),
                 lambda: ops.GradOperation()(lambda t: t.nonsense())(x), lambda: ms.vjp(lambda t: t @ w, x)):
        refusal(call, Exception)
        assert not _pynative_executor.grad_flag()
    equal(ms.grad(lambda t: (t * w).sum())(x), w)


def training_cells_and_optimizers(world):
    """`nn.SGD` and its like are compiled; element by element, they are right on shards."""
    x = data(1, 8, 6)
    made = (lambda p: nn.SGD(p, 0.1, momentum=0.9), lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=0.01),
            lambda p: nn.Adam(p, 0.01), lambda p: ms.experimental.optim.AdamW(p, 0.01),
            lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.1))
    for make in sampled(made, 3, 1):
        plain, net = _mlp(3), _mlp(3)
        parallelize_module(net, mesh_2d()["tp"], {"0": ColwiseParallel(use_local_output=False),
                                                  "2": RowwiseParallel(use_local_output=False)})
        replicate(net, mesh=mesh_2d()["dp"])
        for cell, given in ((plain, x), (net, placed(x, mesh_2d(), S(0), R))):
            step = nn.TrainOneStepCell(_Loss(cell), make(cell.trainable_params()))
            for _ in range(3):
                step(given)
        equal(net.get_parameters(), plain.get_parameters(), type(step.optimizer).__name__, 1e-4)
    net = distribute_module(_mlp(3), mesh_1d())
    grads = ms.grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(placed(x, mesh_1d(), S(0)))
    for norms, ours in ((nn.Lamb(net.trainable_params(), 0.1), "AdamW"), (nn.AdaFactor(net.trainable_params()), "Adafactor")):
        said = refusal(lambda n=norms: n(grads))
        assert "depends on others" in said and f"fix:  ms_dtensor.optim.{ours}" in said
    assert "grad_centralization" in refusal(lambda: nn.SGD(
        [{"params": net.trainable_params(), "grad_centralization": True}], 0.1)(grads))
    stale = _mlp(3)
    optimizer = nn.SGD(stale.trainable_params(), 0.1)
    distribute_module(stale, mesh_1d())
    step = nn.TrainOneStepCell(_Loss(stale), optimizer)
    for call, kind in ((lambda: optimizer(grads), OpRuleError), (lambda: step(placed(x, mesh_1d(), S(0))), ConfigError)):
        assert "after the model was distributed" in refusal(call, kind)


class _Loss(nn.Cell):
    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x):
        return (self.net(x) ** 2).mean()


def _mlp(seed: int) -> nn.Cell:
    return filled(nn.SequentialCell(nn.Dense(6, 8), nn.ReLU(), nn.Dense(8, 6)), seed)


def clipping_by_the_global_norm(world, grid, line):
    tensors = [data(1, 6, 5) * 3, data(2, 4), data(3, 8, 8), data(4, 3)]
    want = ops.clip_by_global_norm(tensors, 1.5)
    x = [placed(tensors[0], grid, S(0), S(1)), placed(tensors[1], grid, R, R), placed(tensors[2], line, S(1)), tensors[3]]
    with counted() as count:
        got = ops.clip_by_global_norm(x, 1.5)
    equal(got, want)
    assert [type(g) for g in got] == [DTensor] * 3 + [Tensor]
    assert sum(count.values()) <= 3 and {op for op, _ in count} == {"all_reduce"}, count
    equal(ops.clip_by_global_norm(x[:2], 1e6), tensors[:2], "small ones stay")


def a_flag_of_any_and_a_dim_of_one_element(world):
    x = data(1, 6, 5)

    def loss(t):
        return (t * (t > 0).any().astype(ms.float32) + t * (t > 9).any(0).astype(ms.float32)).sum()
    for placements in ([S(0)], [S(1)]):
        equal(ms.grad(loss)(placed(x, mesh_1d(), *placements)), ms.grad(loss)(x), str(placements))
    one = placed(data(2, 1, 3), mesh_1d(), S(0))
    want = array(data(2, 1, 3)) + 1
    assert one.add_(1.0) is one and one.placements == (S(0),)
    equal(one, want)
    with counted({}):
        equal_to = one * placed(data(3, 1, 3), mesh_1d(), R) + 1
    assert equal_to.placements == (S(0),)
    equal(equal_to, want * array(data(3, 1, 3)) + 1)


# -- recomputation, replicas, ties --------------------------------------------------------------------------------------------
def replicas_over_styles_that_hand_out_local_tensors(world, grid):
    x = data(1, 8, 6)
    net = _mlp(3)
    parallelize_module(net, grid["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicate(net, mesh=grid["dp"])
    rows = Tensor(array(x)[4 * grid.get_coordinate()[0]:][:4])
    assert isinstance(net(rows), DTensor) and net(rows).shape == (8, 6)
    trains_as_one_device(net, _mlp(3), x, rows)
    one = parallelize_module(nn.Dense(6, 8), grid["tp"], ColwiseParallel())
    replicate(one, mesh=grid["dp"])
    assert one(rows).placements == (S(0), S(1)), "what a style hands out lies as the style says"
    parallelize_module(one, grid["tp"], md.PrepareModuleOutput(output_layouts=S(1), desired_output_layouts=R))
    assert one(rows).placements == (S(0), R), "also where the style comes after"

    net = Built(lambda c, x: c.inner(x) * 2, inner=_mlp(3))
    parallelize_module(net, grid["tp"], {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()})
    replicate(net, mesh=grid["dp"])
    assert "use_local_output=False" in refusal(lambda: net(rows), LayoutError)


def _tied() -> nn.Cell:
    net = filled(Built(lambda c, x: c.b(mint.nn.functional.relu(c.a(x))), a=nn.Dense(6, 6), b=nn.Dense(6, 6)))
    net.b.weight = net.a.weight
    return net


def ties_between_cells_that_are_distributed_one_by_one(world, grid):
    x = data(1, 8, 6)

    def columns(name, cell, mesh):
        for key, p in cell._params.items():
            cell._params[key] = Parameter(md.distribute_tensor(p, mesh, [S(0)]), name=p.name)
    ways = {
        "replicate": (grid["dp"], lambda cell: replicate(cell, mesh=grid["dp"])),
        "replicate without buckets": (grid["dp"], lambda cell: replicate(cell, mesh=grid["dp"], bucket_mb=0)),
        "distribute_module": (mesh_1d(), lambda cell: distribute_module(cell, mesh_1d())),
        "partition_fn": (mesh_1d(), lambda cell: distribute_module(cell, mesh_1d(), columns)),
        "styles": (mesh_1d(), lambda cell: parallelize_module(
            cell, mesh_1d(), ColwiseParallel(use_local_output=False, output_layouts=R))),
    }
    for name, (on, way) in ways.items():
        net, plain = _tied(), _tied()
        way(net.a)
        way(net.b)
        assert net.b.weight is net.a.weight and len(net.trainable_params()) == 3, name
        layout = S(0) if name != "styles" else R
        trains_as_one_device(net, plain, x, placed(x, on, layout))
        whole = _tied()  # in one call
        if name == "partition_fn":
            way(whole)
            assert whole.b.weight is whole.a.weight and whole.a.weight.placements == (S(0),)

    def either(name, cell, mesh):
        for key, p in cell._params.items():
            if p.ndim == 2:
                cell._params[key] = Parameter(md.distribute_tensor(array(p) if False else Tensor(array(p)), mesh, [
                    S(0 if name == "a" else 1)]), name=p.name)
    assert "shared by cells" in refusal(lambda: distribute_module(_tied(), mesh_1d(), either), LayoutError)


# -- compiled functions, and plain tensors ------------------------------------------------------------------------------------
@ms.jit
def _double(t):
    return t * 2


@ms.jit
def _first(ts):
    return ts[0] * 2


@ms.jit
def _entry(d):
    return d["a"] * 2


@ms.jit
def _named(t, *, k):
    return t * k


_net = nn.Dense(4, 4)
_weight = Parameter(Tensor(np.ones((4, 4), np.float32)), name="captured")


@ms.jit
def _through_a_cell(t):
    return _net(t)


@ms.jit
def _through_a_parameter(t):
    return t * _weight


@ms.jit
def _less(t):
    return ops.less(t, 1).astype(ms.float32) + mint.mul(t, t)


def compiled_functions_refuse_dtensors_wherever_they_hide(world, line):
    global _weight
    x, plain = placed(data(1, 8, 4), line, S(0)), data(1, 4, 4)
    equal(_through_a_cell(plain), _net(plain))
    equal(_through_a_parameter(plain), plain)
    distribute_module(_net, line)
    _weight = Parameter(placed(data(2, 4, 4), line, R), name="captured")
    inner = md.local_map(lambda t: _less(t), [S(0)])
    for _ in range(2):  # what was compiled with a DTensor is not remembered
        for call in (lambda: _double(x), lambda: _first((x,)), lambda: _first([x]), lambda: _first(ms.mutable((x,))),
                     lambda: _entry({"a": x}), lambda: _named(plain, k=x), lambda: ms.jit(_net)(plain),
                     lambda: _first((_net.weight,)), lambda: _through_a_cell(plain),
                     lambda: ms.grad(lambda t: _first((t,)).sum())(x)):
            assert "For 'ms.jit'" in refusal(call)
        equal(_double(plain), array(plain) * 2)
        equal(inner(x), (array(data(1, 8, 4)) < 1) + array(data(1, 8, 4)) ** 2)
    equal(x * 2, array(data(1, 8, 4)) * 2)
