# SPDX-License-Identifier: Apache-2.0
"""Modes on real ranks: local results, warnings once per call site, refusals that move nothing."""
import warnings

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DTensor, SkipDTensorDispatch, comm, distribute_tensor, redistribution_policy, value_and_grad
from ms_dtensor.errors import ImplicitCommError
from tests.dist.operands import R, S, data
from tests.dist.support import counted, equal, refused_alike, same_on_all_ranks


def skip_shows_shards_and_communicates_nothing(world, line):
    x = distribute_tensor(data(1, 7, 4), line, [S(0)])
    local = x.to_local()
    rows = local.shape[0]
    with counted({}), SkipDTensorDispatch():
        for got, wanted in ((x * 2, local * 2), (x.sum(), local.sum()), (x[:1], local[:1]), (ops.stack([x, x]), [local] * 2),
                            (x @ Tensor(np.eye(4, dtype=np.float32)), local)):
            assert not isinstance(got, DTensor)
            equal(got, np.stack([w.asnumpy() for w in wanted]) if isinstance(wanted, list) else wanted)
        assert ops.zeros_like(x).shape == (rows, 4)
    assert x.sum().shape == () and isinstance(x.sum(), DTensor)


def gradients_pass_through_skip(world, line):
    p = Parameter(distribute_tensor(data(1, 8, 4), line, [S(0)]), name="p")

    def loss():
        with SkipDTensorDispatch():
            part = (p * p).sum()
        return DTensor.from_local(part.reshape((1,)), line, [S(0)]).sum()
    value, (g,) = value_and_grad(loss, None, [p])()
    equal(value, (data(1, 8, 4) ** 2).sum())
    equal(g, data(1, 8, 4) * 2)
    with SkipDTensorDispatch():  # the mode of the backward is not the mode of the forward
        g, = ms.grad(lambda: (p * 3).sum(), None, [p])()
    equal(g, np.full((8, 4), 3, np.float32))


def policies_warn_once_per_site_and_refuse_before_moving(world, line):
    x = distribute_tensor(data(1, 8, 4), line, [S(0)])
    y = distribute_tensor(data(2, 8, 4), line, [S(1)])
    with warnings.catch_warnings(record=True) as seen, redistribution_policy("warn"):
        warnings.simplefilter("always")
        for _ in range(3):
            x + y
        x + y
    assert len(seen) == 2 and all(w.filename == __file__ for w in seen), [(w.filename, w.lineno) for w in seen]
    with redistribution_policy("explicit"):
        assert ".redistribute(placements=" in refused_alike(world, lambda: x + y, ImplicitCommError)
        with redistribution_policy("auto"):
            pass
    with redistribution_policy("explicit"):
        equal(x + y.redistribute(placements=[S(0)]), data(1, 8, 4) + data(2, 8, 4))
        with redistribution_policy("auto"):
            equal(x + y, data(1, 8, 4) + data(2, 8, 4))


def whatever_communicates_by_itself_warns_once_and_gives_one_devices_values(world, line):
    plain, odd, w = data(1, 8, 4), data(2, 7, 4), data(3, 4)
    x, y, cols = (distribute_tensor(t, line, [p]) for t, p in ((plain, S(0)), (odd, S(0)), (plain, S(1))))
    rows = {moves: md.local_map(lambda a: a * 3, [S(0)], ([S(0)],), redistribute_inputs=moves) for moves in (False, True)}

    def weighted(t):
        return (mint.amax(t, 0) * (w if t is plain or not isinstance(t, DTensor) else dw)).sum()

    dw = distribute_tensor(w, line)
    value, grad = ms.value_and_grad(weighted)(plain)
    calls = [lambda: equal(np.float32(x.sum().item()), plain.sum()), lambda: equal(np.float32(float(x.sum())), plain.sum()),
             lambda: f"{x.sum():.2f}" == f"{float(plain.sum()):.2f}" or 1 / 0,
             lambda: equal(rows[True](cols), plain * 3), lambda: equal(rows[False](y), odd * 3),
             lambda: [equal(g, want) for g, want in zip(value_and_grad(weighted, 0)(x), (value, grad))]]
    for call in calls:
        with warnings.catch_warnings(record=True) as seen, redistribution_policy("warn"), comm.record() as events:
            warnings.simplefilter("always")
            call()
            call()
        assert len(seen) == 1 and seen[0].filename == __file__, [(str(v.message), v.filename) for v in seen]
        assert any(e.implicit for e in events)
        same_on_all_ranks(world, str(seen[0].message))
        with redistribution_policy("explicit"):
            refused_alike(world, call, ImplicitCommError)


def implicit_replication_has_one_devices_gradients(world, line):
    x, w = data(1, 8, 4), data(2, 4)
    p = Parameter(w, name="w")
    for place in (S(0), S(1), R):
        dx = distribute_tensor(x, line, [place])

        def loss(dx=dx):
            with md.implicit_replication():
                return (dx * p).sum()
        value, grads = ms.value_and_grad(loss, None, [p])()
        equal(value, (x * w).sum())
        equal(grads[0], x.sum(0), f"{place}")
        with md.implicit_replication():
            equal(mint.matmul(dx, w.reshape((4, 1))), x @ w.reshape((4, 1)))
