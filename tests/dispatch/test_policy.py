# SPDX-License-Identifier: Apache-2.0
"""The redistribution policy has one door: every move that nobody wrote is refused, warned of, or neither.

One process plays a rank of a world of four.
"""
import contextvars
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DTensor, Partial, Shard, comm, distribute_tensor, local_map, redistribution_policy, value_and_grad
from ms_dtensor.dispatch import policy
from ms_dtensor.errors import ImplicitCommError
from tests.msrun import PATIENCE

R, P, S = md.Replicate(), Partial(), Shard
HERE = str(Path(__file__))
LINES = Path(HERE).read_text().splitlines()


def rows(mesh, n=8, dim=0) -> DTensor:
    whole = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
    return distribute_tensor(Tensor(whole), mesh, [S(dim)], src_data_rank=None)


def one_element(mesh) -> DTensor:
    return distribute_tensor(Tensor(np.ones((1, 1), np.float32)), mesh, [S(0)], src_data_rank=None)


class Rows(md.DFunction):
    in_placements, out_placements = ([S(0)],), [S(0)]
    forward, backward = staticmethod(lambda ctx, x: x * 2), staticmethod(lambda ctx, grad: grad * 2)


never = lambda *args: pytest.fail("the function ran")  # noqa: E731
CALLS = {
    "an operand": lambda m: rows(m) + rows(m, dim=1),
    "an op that is Python code": lambda m: ops.cat([rows(m), rows(m, dim=1)]),
    "a composed op": lambda m: mint.softmax(rows(m, dim=1), -1),
    "a cut whose gradient is gathered": lambda m: value_and_grad(lambda t: (t + rows(m)).sum(), 0)(
        distribute_tensor(Tensor(np.ones((8, 4), np.float32)), m, [R], src_data_rank=None)),
    "item of a summand": lambda m: rows(m).sum().item(),
    "item of a shard": lambda m: one_element(m).item(),
    "float": lambda m: float(rows(m).sum()),
    "int": lambda m: int(one_element(m)),
    "bool": lambda m: bool(one_element(m)),
    "format": lambda m: f"{rows(m).sum():.2f}",
    "max under autograd": lambda m: value_and_grad(lambda x: x.max(), 0)(rows(m)),
    "amin of some dims under autograd": lambda m: value_and_grad(lambda x: mint.amin(x, 0).sum(), 0)(rows(m)),
    "local_map moves an input": lambda m: local_map(never, [S(0)], ([S(0)],), redistribute_inputs=True)(rows(m, dim=1)),
    "local_map of uneven shards": lambda m: local_map(never, [S(0)], ([S(0)],))(rows(m, 7)),
    "local_map reduces a maximum": lambda m: value_and_grad(
        lambda x: local_map(never, [Partial("max")], ([S(0)],))(x).sum(), 0)(rows(m)),
    "a DFunction moves an input": lambda m: Rows.apply(rows(m, dim=1)),
    "a DFunction of uneven shards": lambda m: Rows.apply(rows(m, 7)),
    "set_data": lambda m: Parameter(rows(m), name="w").set_data(rows(m, dim=1)),
}
FIX = {"item": ".full_tensor().item()", "max under autograd": ".redistribute(placements=[Replicate()])",
       "amin": ".redistribute(placements=[Replicate()])", "an operand": ".redistribute(placements=[",
       "a cut": "insert .redistribute(placements=[Shard(0)])", "local_map moves": ".redistribute(placements=[Shard(0)])",
       "local_map of uneven shards": "out_shapes="}


def outcome(name: str, rank: int, policy: str):
    """(the error or None, what was communicated, warnings) of one call, twice from the same line."""
    error = None
    with comm.fake_world(4, rank), comm.record() as events, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with redistribution_policy(policy):
            for _ in range(2):
                try:
                    CALLS[name](mesh)
                except ImplicitCommError as e:
                    error = e
    return error, events, seen


@pytest.mark.parametrize("name", CALLS)
def test_explicit_refuses_before_anything_is_sent(name):
    texts = set()
    for rank in range(4):
        error, events, _ = outcome(name, rank, "explicit")
        assert error is not None, "not refused"
        assert error.attempt.startswith("For '") and error.operands and error.rule and error.fix, error
        assert not events, events
        texts.add(str(error))
    assert len(texts) == 1, texts
    for key, fix in FIX.items():
        assert not name.startswith(key) or any(fix in f for f in error.fix), error


EAGER = [name for name in CALLS if not name.startswith(("local_map of", "local_map reduces", "local_map moves",
                                                         "a DFunction of"))]


@pytest.mark.parametrize("name", EAGER)
def test_warn_tells_once_per_call_site_and_names_the_users_line(name):
    error, events, seen = outcome(name, 1, "warn")
    assert error is None and all(e.implicit for e in events if e.phase == "forward") and events
    assert len(seen) == 1, [str(w.message) for w in seen]
    assert seen[0].filename == HERE and f'"{name}"' in "".join(LINES[seen[0].lineno - 2:seen[0].lineno])
    assert "is 'warn'" in str(seen[0].message)


@pytest.mark.parametrize("name", CALLS)
def test_auto_says_nothing(name):
    if name in EAGER:
        error, _, seen = outcome(name, 2, "auto")
        assert error is None and not seen


def four(rank=0):
    return comm.fake_world(4, rank), lambda: md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def test_what_moves_nothing_is_free_under_explicit():
    world, mesh = four()
    with world, comm.record() as events, redistribution_policy("explicit"):
        m = mesh()
        x = rows(m)
        assert x.full_tensor().shape == (8, 4) and len(events) == 1
        total = x.sum()
        assert isinstance(total.full_tensor().item(), float) and isinstance(total.reduce_partial().item(), float)
        local_map(lambda a: a * 2, [S(0)], ([S(0)],))(x)
        local_map(lambda a: a * 2, [S(0)], ([S(0)],), out_shapes=lambda s: (s,))(rows(m, 7))
        local_map(lambda a: a.sum(), None, ([S(0)],))(rows(m, 7))
        value_and_grad(lambda t: t.redistribute(placements=[R]).max(), 0)(x)
        assert isinstance(x.max(), DTensor)  # outside autograd a maximum may stay partial
        value_and_grad(lambda t: DTensor.from_local(t.to_local(), m, [Partial("max")]).reduce_partial().sum(), 0)(x)
    assert not any(e.implicit for e in events), [e for e in events if e.implicit]
    with comm.fake_world(4), redistribution_policy("explicit"):
        assert rows(md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))).sum().item()  # one rank: nothing to send


def test_the_block_of_loss_parallel_asks_at_the_same_door():
    world, mesh = four()
    with world, comm.record() as events, md.loss_parallel():
        x = rows(mesh(), 64, dim=1)
        for gathers in (lambda: mint.sort(x, dim=1),
                        lambda: local_map(never, [S(0)], ([S(0)],), redistribute_inputs=True)(x)):
            with pytest.raises(ImplicitCommError, match=r"inside loss_parallel\(\)"):
                gathers()
        assert not events
        logits = distribute_tensor(Tensor(np.ones((6, 12), np.float32)), x.device_mesh, [S(1)], src_data_rank=None)
        with warnings.catch_warnings(record=True) as seen, redistribution_policy("warn"):
            warnings.simplefilter("always")
            for _ in range(2):  # the loss's sums are the block's purpose; one call of several ops is one call site
                assert ops.cross_entropy(logits, Tensor(np.arange(6))).shape == ()
                assert mint.softmax(logits, -1).shape == (6, 12)
        assert len(seen) == 1 and {w.filename for w in seen} == {HERE}, [str(w.message) for w in seen]


def test_a_warning_that_is_an_error_is_one_every_time():
    world, mesh = four()
    with world, warnings.catch_warnings(), redistribution_policy("warn"):
        warnings.simplefilter("error")
        total = rows(mesh()).sum()
        for _ in range(3):
            with comm.record() as events, pytest.raises(UserWarning, match="item"):
                total.item()
            assert not events


def test_threads_warn_once_together_and_each_world_anew():
    def work():
        barrier.wait(PATIENCE)
        with redistribution_policy("warn"):
            for _ in range(50):
                policy.check("add", "it moves", "", ())

    for _ in range(2):
        with comm.fake_world(4), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            barrier = threading.Barrier(8)
            threads = [threading.Thread(target=contextvars.copy_context().run, args=(work,)) for _ in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        assert len(seen) == 1, len(seen)


def test_own_rules_ask_too():
    world, mesh = four()
    with world, comm.record() as events, md.register_rule("own_top", "S(0) -> P(max)", shapes="m n -> n") as rule:
        top = rule(never)
        with redistribution_policy("explicit"), pytest.raises(ImplicitCommError, match="own_top"):
            value_and_grad(lambda t: top(t).sum(), 0)(rows(mesh()))
    assert not events
