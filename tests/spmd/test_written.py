# SPDX-License-Identifier: Apache-2.0
"""In-place ops and writes by index: what a check accepts is right, for all that looks at the storage; enumerated.

Each program makes a tensor, looks at it by a view, writes into one of the two, and returns one of them or a sum. It is run
on NumPy arrays, of every rank and as one global program: their views and in-place ops are what MindSpore's are on a device.
On CPU MindSpore's arithmetic leaves the object as it was, and no check may rely on that.
"""
import itertools

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor import DFunction, Partial, Replicate, Shard, local_map
from ms_dtensor.comm import fake_world
from ms_dtensor.debug import checks, convert, reinterpret
from ms_dtensor.errors import OpRuleError
from tests.spmd.test_checked import line_of, lying, refused
from tests.tiers import sampled

R, P = Replicate(), Partial()
RANKS, SHAPE = 2, (4, 6)


@pytest.fixture
def mesh():
    with fake_world(RANKS):
        yield md.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))


NAMES = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def arithmetic(name, number):
    """`x.add_(number)` and the like, of a tensor or an array."""
    def run(x, *_):
        if isinstance(x, np.ndarray):
            NAMES[name](x, number, out=x)
        else:
            getattr(x, name + "_")(number)
    return run


def exp(x, *_):
    np.exp(x, out=x) if isinstance(x, np.ndarray) else x.exp_()


def copy(value):
    def run(x, *others):
        x.__setitem__(Ellipsis, value(x, *others)) if isinstance(x, np.ndarray) else x.copy_(value(x, *others))
    return run


def put(index, value):
    def run(x, *others):
        x[index] = value(x, *others) if callable(value) else value
    return run


def added(index):
    def run(x, *_):
        x[index] += 1.0
    return run


def doubled(index):
    def run(x, *_):
        x[index] *= 2.0
    return run


def like(x, other):
    """The first elements of another tensor, in the shape of `x`."""
    count = int(np.prod(x.shape))
    return other.reshape(-1)[:count].reshape(tuple(x.shape))


# what a program has: `x`, and `whole`, which is replicated; what it works on, a view of that, a write, and what it returns
MADE = {"the operand": lambda x, whole: x * 1.0, "a sum": lambda x, whole: x.sum(0), "other sum": lambda x, whole: x.sum(1),
        "what all have": lambda x, whole: whole * 1.0, "a square": lambda x, whole: (x * x).sum(0)}
VIEW = {"itself": lambda z: z, "a part": lambda z: z[1:3],
        "reshaped": lambda z: z.reshape(*z.shape, 1), "a row": lambda z: z[0:1]}
WRITE = {
    "a number is added": arithmetic("add", 1.0), "subtracted": arithmetic("sub", 1.0),
    "it is scaled": arithmetic("mul", 2.0), "halved": arithmetic("div", 2.0), "exp": exp,
    "whole is added": lambda x, y, w: arithmetic("add", like(x, w))(x),
    "whole scales": lambda x, y, w: arithmetic("mul", like(x, w))(x),
    "squared": lambda x, y, w: arithmetic("mul", x * 1.0)(x),
    "its own is added": lambda x, y, w: arithmetic("add", x * 1.0)(x),
    "the operand is added": lambda x, y, w: arithmetic("add", like(x, y))(x),
    "copied of itself": copy(lambda x, y, w: x * 2.0), "copied of whole": copy(lambda x, y, w: like(x, w)),
    "copied of the operand": copy(lambda x, y, w: like(x, y)),
    "a number is put": put(0, 5.0), "numbers are put": put(slice(0, 2), 5.0),
    "whole is put": put(0, lambda x, y, w: like(x[0], w)),
    "the operand is put": put(0, lambda x, y, w: like(x[0], y)),
    "its own is put": put(0, lambda x, y, w: x[1 % len(x)] * 1.0),
    "a list of rows is put": put([0], 5.0), "a mask is put": lambda x, y, w: put(x > 0, 5.0)(x),
    "a part plus a number": added(slice(0, 2)), "a part is doubled": doubled(slice(0, 2)),
}
GIVEN = {"the written": lambda base, view: view, "the base": lambda base, view: base,
         "its sum": lambda base, view: base.sum(0),
         "the view's sum": lambda base, view: view.sum(0)}


def program(made, view, write, from_base, given):
    """A function of `x` and `whole`, of tensors or of arrays."""
    def run(x, whole):
        base = MADE[made](x, whole)
        seen = VIEW[view](base)
        WRITE[write](base if from_base else seen, x, whole)
        return GIVEN[given](base, seen) * 1.0
    return run


def problem(run, laid, out, rng) -> str:
    """What is wrong with calling the ranks' results `out`; nothing, or no such program, is ""."""
    whole = rng.normal(size=SHAPE)
    if laid.is_shard():
        x = rng.normal(size=[n * RANKS if d == laid.dim else n for d, n in enumerate(SHAPE)])
        parts = np.split(x, RANKS, laid.dim)
    else:
        parts = [rng.normal(size=SHAPE) for _ in range(RANKS)] if laid.is_partial() else [rng.normal(size=SHAPE)] * RANKS
        x = sum(parts) if laid.is_partial() else parts[0]
    results = [run(part.copy(), whole.copy()) for part in parts]
    if out.is_replicate():
        return "" if all(np.allclose(results[0], r) for r in results) else "the ranks' results are not alike"
    try:
        want = run(x.copy(), whole.copy())
    except (ValueError, IndexError):
        return "there is no global program"
    return "" if np.shape(want) == np.shape(results[0]) and np.allclose(sum(results), want) else "is no summand"


def accepted(run, mesh, laid, out) -> bool | None:
    """Whether a check takes it; None: MindSpore has no such program, or no kernel for it here."""
    shape = [n * RANKS if laid.is_shard() and d == laid.dim else n for d, n in enumerate(SHAPE)]
    x, whole = (lying(mesh, s, {"tp": p}) for s, p in ((tuple(shape), laid), (SHAPE, R)))
    x, whole = ops.stop_gradient(x), ops.stop_gradient(whole)
    try:
        local_map(run, [out], ([laid], [R]), check=True)(x, whole)
    except OpRuleError as refusal:
        assert refusal.rule and refusal.operands and refusal.fix
        return False
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    return True


LAID = (Shard(0), Shard(1), P, R)


@pytest.mark.parametrize("laid", LAID, ids=repr)
def test_writes_that_a_check_accepts_are_right(mesh, laid):
    wrong, right, taken = [], 0, 0
    # 13: coprime to how many ways there are to write and to give; another slice for each layout
    for key in sampled(list(itertools.product(MADE, VIEW, WRITE, (False, True), GIVEN)), 13, 3 * LAID.index(laid)):
        run = program(*key)
        for out in (P, R):
            try:
                fault = problem(run, laid, out, np.random.default_rng(0))
            except (ValueError, IndexError):
                continue  # nor of local arrays
            said = accepted(run, mesh, laid, out)
            right, taken = right + (not fault and said is not None), taken + bool(said)
            if said and fault:
                wrong.append(f"{key} of {laid!r} called {out!r}: {fault}")
    assert not wrong, (len(wrong), wrong[:5])
    assert taken > 20, (right, taken)


# -- what must pass, and what must not -----------------------------------------------------------------------------------
def sum_then(write):
    def run(x, whole):
        z = x.sum(0)
        write(z, x, whole)
        return z
    return run


def test_an_in_place_op_is_what_its_twin_is(mesh):
    x, whole = lying(mesh, (8, 6), {"tp": Shard(0)}), lying(mesh, (4, 6), {})
    for name in ("it is scaled", "halved", "its own is added", "copied of itself"):
        assert local_map(sum_then(WRITE[name]), [P], check=True)(x, whole).placements == (P,), name
    for name in ("a number is added", "exp", "squared", "whole is added", "a number is put", "a part plus a number"):
        said = refused(lambda name=name: local_map(sum_then(WRITE[name]), [P], check=True)(x, whole), "no summand since")
        assert "Partial" in said, name
        assert local_map(lambda x, w, name=name: sum_then(WRITE[name])(x, w)[None], [Shard(0)], check=True)(x, whole).shape

    def add(x):
        z = x.sum(0)
        z.add_(1.0)
        return z

    class Adds(DFunction):
        in_placements, out_placements = ([Shard(0)],), [P]
        forward = staticmethod(lambda ctx, x: add(x))
        backward = staticmethod(lambda ctx, grad: mint.ones((4, 6)) * grad)
    with checks(types=True):
        refused(lambda: Adds.apply(x), line_of(add, "add_"))


def test_who_looks_at_the_storage_is_told(mesh):
    x, whole = lying(mesh, (8, 6), {"tp": Shard(0)}), lying(mesh, (6,), {})

    def known_otherwise(x):
        z = x.sum(0)
        reinterpret(z, "tp", "V").add_(1.0)
        return z
    refused(lambda: local_map(known_otherwise, [P], check=True)(x), "no op has made it a summand")

    def part_of_what_all_have(x, whole):
        part = convert(whole, "tp", "V")
        part.mul_(2.0)
        return whole
    refused(lambda: local_map(part_of_what_all_have, [R], ([Shard(0)], [R]), check=True)(x, whole), "the storage of what is")

    def numbers(x, whole):
        made = Tensor(np.zeros(6, np.float32))
        made[:] = x[0]
        return whole + made
    refused(lambda: local_map(numbers, [R], check=True)(x, whole), "writes what is varying", line_of(numbers, "made[:]"))

    def collected(x):
        z = ops.stop_gradient(x.sum(0))
        mesh.get_group("tp").all_reduce_(z).wait()
        return z
    refused(lambda: local_map(collected, [P], check=True)(x), "and is replicated")


def test_a_constant_that_takes_what_has_a_gradient_has_one(mesh):
    whole = lying(mesh, (6,), {})

    def kept(w):
        z = mint.zeros((6,))
        z[:] = w
        return z
    run = local_map(lambda w: kept(convert(w, "tp", "R")), [R], ([R],), in_grad_placements=([R],), check=True)
    refused(lambda: run(whole), "which is invariant, and is replicated")


def test_ways_that_types_do_not_follow(mesh):
    x, whole = lying(mesh, (8, 6), {"tp": Shard(0)}), lying(mesh, (6,), {})

    def replaced(x, whole):
        z = whole * 1
        z.assign_value(x[0])
        return z
    refused(lambda: local_map(replaced, [R], check=True)(x, whole), "assign_value()", line_of(replaced, "assign_value"))

    def behind(x):
        z = x.sum(0)
        z.asnumpy()[0] = 5
        return z
    with pytest.raises(ValueError, match="read-only"):
        local_map(behind, [P], check=True)(x)
    picked = lambda x, n: n[x[0] > 1] * 1  # noqa: E731
    numbers = lying(mesh, (6,), {}, np.int32)
    refused(lambda: local_map(picked, [R], check=True)(x, numbers), "and is varying")
    assert local_map(lambda n: n[n > 0] * 1, [R], check=True)(numbers).shape
