# SPDX-License-Identifier: Apache-2.0
"""Real ranks: a tensor cut part by part (`FusedShard`) is in its own order for every reader, op, move and new value."""
import copy

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor
import ms_dtensor as md
from ms_dtensor import (
    ColwiseParallel,
    FusedColwiseParallel,
    FusedShard,
    distribute_tensor,
    parallelize_module,
    replicate,
    value_and_grad,
)
from tests.operands import R, S, data
from tests.parallel.cases_plans import Attention
from tests.parallel.cases_styles import fill
from tests.support import array, check_against_one_device, counted, equal
from tests.tiers import sampled


def fused_weights_are_in_the_models_order_for_every_reader(world, grid):
    x = data(3, 8, 10)
    plain, net = fill(Attention()), fill(Attention())
    one = plain.qkv_proj.weight.asnumpy().copy()
    md.parallelize_module(net, grid["tp"], {"qkv_proj": FusedColwiseParallel((24, 12, 12), units=4, use_local_output=False),
                                         "o_proj": md.RowwiseParallel(use_local_output=False)})
    replicate(net, mesh=grid["dp"])
    w = net.qkv_proj.weight
    for what, got in {"full": w, "value": w.value(), "dict": net.parameters_dict()["qkv_proj.weight"], "times": w * 1,
                      "copy": copy.deepcopy(w), "moment": w.clone()}.items():
        equal(got, one, what)
        assert "f32[24+12+12@tp, 10]" in repr(got), what
    for index in (slice(0, 4), slice(20, 30), (slice(None), slice(2, 7)), slice(None, None, 5), 25, [47, 0, 24]):
        equal(w[index], one[index], str(index))
    for how in ([R, S(0)], [S(0), S(0)], [S(1), R], [S(1), FusedShard(0, (24, 12, 12))], [FusedShard(0, (12,) * 4), R]):
        equal(w.redistribute(placements=how), one, str(how))
        equal(distribute_tensor(Tensor(one), grid, how).redistribute(placements=w.placements), one, str(how))
    equal(w.sum(0), one.sum(0), "sum")
    equal(mint.cumsum(w, 0), one.cumsum(0), "cumsum")
    equal(mint.max(w, 0), (one.max(0), one.argmax(0)), "max")
    equal(mint.argmax(w, 0), one.argmax(0), "argmax")
    equal(w.reshape((4, 12, 10)), one.reshape(4, 12, 10), "reshape")
    equal(mint.nn.functional.embedding(distribute_tensor(Tensor([46, 3, 25]), grid), w), one[[46, 3, 25]], "lookup")
    new = data(9, 48, 10)
    w.set_data(distribute_tensor(new, grid, w.placements))
    equal(w, new)
    w.set_data(distribute_tensor(new * 2, grid, [R, S(0)]))
    equal(w, new * 2, "from another layout")
    plain.qkv_proj.weight.set_data(new * 2)
    equal(net(distribute_tensor(x, grid, {"dp": S(0)})), plain(x), "after set_data")
    with counted({}):
        w[20:30] = 0  # rows of q and of k, which no rank holds as a run
    assert w.placements[-1] == FusedShard(0, (24, 12, 12))
    equal(w, np.where((np.arange(48) // 10 == 2)[:, None], 0, new * 2), "rows")
    w.zero_()
    equal(w, np.zeros_like(one), "zeros")


_OTHER, _TALL = data(11, 8, 6), data(12, 6, 8)
OPS = {
    "scaled": lambda x, f: x * 3 - 1,
    "self": lambda x, f: x * x + x,
    "other": lambda x, f: x * f(_OTHER),
    "row": lambda x, f: x + f(_OTHER[:1]),
    "column": lambda x, f: x * f(_OTHER[:, :1]),
    "matmul": lambda x, f: x @ f(_TALL),
    "from the left": lambda x, f: f(_TALL) @ x,
    "linear": lambda x, f: mint.nn.functional.linear(f(_OTHER), x),
    "with itself": lambda x, f: x @ x.swapaxes(0, 1),
    "gram": lambda x, f: x.swapaxes(0, 1) @ x,
    "sum 0": lambda x, f: x.sum(0),
    "sum 1": lambda x, f: x.sum(1),
    "mean": lambda x, f: x.mean(),
    "var": lambda x, f: mint.var(x, 0),
    "softmax 0": lambda x, f: mint.softmax(x, 0),
    "softmax 1": lambda x, f: mint.softmax(x, 1),
    "max 0": lambda x, f: mint.amax(x, 0),
    "max of all": lambda x, f: x.max(),
    "first max": lambda x, f: mint.max(x, 0)[0],
    "cumsum": lambda x, f: mint.cumsum(x, 0),
    "cat 0": lambda x, f: mint.cat((x, x * 2), 0),
    "cat 1": lambda x, f: mint.cat((x, f(_OTHER)), 1),
    "chunk": lambda x, f: mint.chunk(x, 2, 0)[1],
    "view": lambda x, f: x.reshape((4, 12)),
    "flip": lambda x, f: mint.flip(x, (0,)),
    "roll": lambda x, f: mint.roll(x, 1, 0),
    "tril": lambda x, f: mint.tril(x),
    "index": lambda x, f: x[2:7:2],
    "rows": lambda x, f: x[[5, 0, 5]],
    "repeat": lambda x, f: mint.repeat_interleave(x, 2, 0),
    "tile": lambda x, f: mint.tile(x, (2, 1)),
    "norm": lambda x, f: mint.norm(x),
    "layer norm": lambda x, f: mint.nn.functional.layer_norm(x, (6,)),
    "sort": lambda x, f: mint.sort(x, dim=0)[0],
    "where": lambda x, f: mint.where(x > 0, x, x * 2),
    "outer": lambda x, f: x[:, None] * x[None],
    "gather": lambda x, f: mint.gather(x, 0, f(Tensor(np.array([[3, 1, 2, 0, 7, 5]])))),
    "lse": lambda x, f: mint.logsumexp(x, 0),
}


def ops_on_a_fused_shard_equal_one_device(world, grid):
    x = data(10, 8, 6)
    for shift, (name, op) in enumerate(OPS.items()):
        def scalar(t, f, op=op):
            out = op(t, f)
            return (out * mint.sin(out)).sum()

        def at(placed, scalar=scalar):
            return value_and_grad(lambda t: scalar(t, lambda a: distribute_tensor(a, grid)))(distribute_tensor(x, grid, placed))
        want = at(None)  # whole: a CPU has kernels for few of these, the library for all
        for how in sampled(([R, FusedShard(0, (4, 2, 2))], [S(1), FusedShard(0, (4, 2, 2))], [FusedShard(0, (6, 2)), S(1)],
                            [FusedShard(0, (5, 3)), R]), 4, shift):  # unlike shards: 3 + 2 rows, 2 + 1
            got = at(how)
            equal(got[0], want[0], f"{name} {how}")
            equal(got[1], want[1], f"{name} {how} gradient", rtol=1e-4)


_ROWS = np.array([9, 0, 10, 4])

WRITES = {
    "rows": (lambda t, v, at: t.__setitem__(slice(3, 11), v), (8, 5)),
    "a part": (lambda t, v, at: t.__setitem__(slice(6, 8), v), (2, 5)),
    "all": (lambda t, v, at: t.__setitem__(slice(None), v), (12, 5)),
    "one row for all": (lambda t, v, at: t.__setitem__(..., v), (5,)),
    "columns": (lambda t, v, at: t.__setitem__((slice(None), slice(1, 4)), v), (12, 3)),
    "a column": (lambda t, v, at: t.__setitem__((slice(None), 2), v), (12,)),
    "every third": (lambda t, v, at: t.__setitem__(slice(1, None, 3), v), (4, 5)),
    "row": (lambda t, v, at: t.__setitem__(-5, v), (5,)),
    "an element": (lambda t, v, at: t.__setitem__((7, 3), v), ()),
    "listed": (lambda t, v, at: t.__setitem__(_ROWS.tolist(), v), (4, 5)),
    "listed pairs": (lambda t, v, at: t.__setitem__((_ROWS.tolist(), [0, 1, 4, 4]), v), (4,)),
    "put": (lambda t, v, at: t.index_put((at,), v), (4, 5)),
    "put and added": (lambda t, v, at: t.index_put((at,), v, True), (4, 5)),
    "added": (lambda t, v, at: t.index_add(0, at, v), (4, 5)),
}


def writes_into_a_fused_shard_are_those_of_one_device(world, grid):
    """Each rank writes what it has of the rows, which are no run; of a value that is whole or cut as they are nothing moves."""
    x = data(10, 12, 5)
    at = distribute_tensor(Tensor(_ROWS), grid)
    for shift, (name, (write, shape)) in enumerate(WRITES.items()):
        def scalar(t, v, write=write):
            t = t * 1
            made = write(t, v, at)
            t = t if made is None else made
            return (t * mint.sin(t)).sum()
        values = Tensor(np.random.default_rng(shift).normal(size=shape).astype(np.float32))
        want = value_and_grad(scalar, (0, 1))(*(distribute_tensor(t, grid) for t in (x, values)))
        for how in sampled(([R, FusedShard(0, (6, 2, 4))], [S(1), FusedShard(0, (6, 2, 4))], [FusedShard(0, (8, 4))] * 2,
                            [FusedShard(0, (5, 7)), R]), 4, shift):  # the last: 3 + 4 rows, 2 + 3
            t, v = distribute_tensor(x, grid, how), distribute_tensor(values, grid)
            with counted() as count:
                write(t * 1, v, at)
            assert not count, (name, how, count)
            got = value_and_grad(scalar, (0, 1))(t, v)
            equal(got[0], want[0], f"{name} {how}")
            for what, a, b in zip(("target", "value"), got[1], want[1], strict=True):
                equal(a, b, f"{name} {how} gradient of the {what}", rtol=1e-4)
        if shape == (12, 5):  # a value that lies as the target does
            t, v = (distribute_tensor(a, grid, [R, FusedShard(0, (6, 2, 4))]) for a in (x, values))
            with counted({}):
                t[:] = v
            equal(t, values.asnumpy(), name)


def new_values_of_a_fused_shard_are_those_of_one_device(world, grid):
    how = [R, FusedShard(0, (6, 2, 4))]
    values = []
    for placed in (None, how):
        ms_dtensor.manual_seed(3)
        x = ms_dtensor.randn(12, 5, device_mesh=grid, placements=placed)
        ms_dtensor.init.xavier_uniform_(x)
        values += [array(x), array(ms_dtensor.arange(12, device_mesh=grid, placements=placed)),
                   array(ms_dtensor.eye(12, 3, device_mesh=grid, placements=placed)),
                   array(mint.nn.functional.dropout(x, 0.5)), array(ms_dtensor.rand_like(x))]
    for a, b in zip(values[:5], values[5:]):
        np.testing.assert_array_equal(a, b)
    x, whole = ms_dtensor.distribute_tensor(data(4, 12, 5), grid, how), data(4, 12, 5).asnumpy()
    chunks = x.__create_chunk_list__()
    for chunk in chunks:
        box = tuple(slice(at, at + n) for at, n in zip(*chunk))
        np.testing.assert_array_equal(x.__get_tensor_shard__(chunk).asnumpy(), whole[box])
    assert sum(c.sizes[0] for c in chunks) == 6 and len(chunks) == 3
    factor = distribute_tensor(Tensor(whole[:, :1]), grid)
    with counted() as count:
        g = ms.grad(lambda t: (t.redistribute(placements=[R, S(0)]) * factor).sum())(x)
    equal(g, np.broadcast_to(whole[:, :1], (12, 5)), "gradient of a move")
    assert g.placements == tuple(how) and count[("all_gather", "forward")] == 1, count


def a_model_cuts_its_fused_output_into_heads_itself(world, grid):
    """`qkv.reshape(b, n, 3, heads, dim)`, split and chunk of unlike parts: forward and backward, nothing moves."""
    x = data(4, 4, 3, 10)

    def heads(y):
        parts = y.reshape(4, 3, 3, 4, 2).permute((2, 0, 3, 1, 4))
        return parts[0], parts[1], parts[2]
    for parts, units, cut in (((8, 8, 8), 4, heads), ((8, 8, 8), 4, lambda y: mint.chunk(y, 3, -1)),
                              ((8, 8, 8), 2, lambda y: y.split(8, -1)),
                              ((16, 4, 4), 2, lambda y: mint.split(y, (16, 4, 4), -1))):
        for dense in (nn.Dense, mint.nn.Linear):
            plain, net = (fill(dense(10, 24)) for _ in range(2))

            def scalar(cell, t, cut=cut):
                q, k, v = cut(cell(t))
                return (q * mint.sin(q)).sum() + (k * v * v).sum() + (v * mint.cos(k)).sum()
            want = ms.value_and_grad(lambda t: scalar(plain, t), 0, plain.trainable_params())(x)
            FusedColwiseParallel(parts, units=units, use_local_output=False, split_output=False).apply(net, grid["tp"])
            replicate(net, mesh=grid["dp"])
            t = distribute_tensor(x, grid, {"dp": S(0)})
            with counted({}):
                local = scalar(net, t)
            assert cut(net(t))[1].to_local().shape[-1] == (2 if cut is heads else parts[1] // 2), parts
            equal(local, want[0], f"{parts}")
            with counted() as count:
                loss, (dx, grads) = value_and_grad(lambda t: scalar(net, t), 0, net.trainable_params())(t)
            equal(loss, want[0], f"{parts} loss")
            for what, a, b in (("x", dx, want[1][0]), *(("w", a, b) for a, b in zip(grads, want[1][1], strict=True))):
                equal(a, b, f"{parts} {what}", rtol=1e-4)
            assert count == {("all_reduce", "backward"): 2}, count  # of dx over tp, of gradients over dp


def a_fused_qkv_is_split_globally(world, line):
    """Peer: the weight is cut contiguously, so a rank's local output is all of q and half of k, unsaid."""
    x = data(11, 3, 8)
    weight, out = data(12, 24, 8), data(13, 8, 8)

    def attention(t, w, o):
        q, k, v = mint.split(mint.nn.functional.linear(t, w), 8, -1)
        return (mint.nn.functional.linear(mint.softmax(q * k, -1) * v, o) ** 2).sum()
    count = check_against_one_device(attention, [x, weight, out], [[R], [S(0)], [S(1)]], line, "fused qkv")
    assert sum(count.values()) > 1, "the split of a contiguous cut has to move data, and says so"
    assert "contiguous" in ColwiseParallel.__doc__ and "fused" in ColwiseParallel.__doc__
    layer = mint.nn.Linear(8, 24, bias=False)
    layer.weight.set_data(weight)
    local = parallelize_module(layer, line, ColwiseParallel())(x)
    equal(local, ops.matmul(x, weight.T).asnumpy()[:, 6 * world.rank:6 * world.rank + 6], "documented: a contiguous piece")
