# SPDX-License-Identifier: Apache-2.0
"""What the rank-side cases share: seeded data, comparison with one device, counting communication."""
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_dtensor import DTensor, comm, value_and_grad
from ms_dtensor.errors import OpRuleError
from tests.operands import data, mesh_1d, mesh_2d, placed  # noqa: F401
from tests.tiers import sampled

RTOL = 2e-5  # float32: sums of up to a few hundred terms, taken in another order


def array(x) -> np.ndarray:
    """Global values of anything."""
    if isinstance(x, DTensor):
        return x.full_tensor().asnumpy()
    return x.asnumpy() if isinstance(x, Tensor) else np.asarray(x)


def equal(got, wanted, what: str = "", rtol: float = RTOL) -> None:
    """Asserts equality relative to the largest element; of a list or tuple, of each and in that order."""
    if isinstance(got, tuple | list | Iterator):
        for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
            equal(g, w, f"{what} {getattr(w, 'name', i)}", rtol)
        return
    a, b = array(got), array(wanted)
    assert a.shape == b.shape, (what, a.shape, b.shape)
    scale = max(float(np.abs(b).max(initial=0)), 1e-6)
    worst = float(np.abs(a.astype(np.float64) - b).max(initial=0)) / scale
    assert worst <= rtol, f"{what}: off by {worst:.2e} of the largest element"


def equal_each(got, want, params, what: str = "", rtol: float = RTOL) -> None:
    """Each of them is the one wanted, and is called by its parameter, or by the word in its place."""
    for p, g, w in zip(params, got, want, strict=True):
        equal(g, w, f"{what}: {getattr(p, 'name', p)}", rtol)


def equal_values(net, plain, what: str = "value") -> None:
    """Every parameter has the value it has on one device."""
    equal_each(net.get_parameters(), plain.get_parameters(), net.get_parameters(), what)


def mean_square(net) -> Callable:
    return lambda x: (net(x) ** 2).mean()


def set_trained(trained: bool, *cells: nn.Cell) -> None:
    """All their parameters are trained, or none."""
    for p in (p for cell in cells for p in cell.get_parameters()):
        p.requires_grad = trained


def added(total, grads) -> list:
    """Gradients of one more micro-batch; of the first the total is None."""
    return list(grads) if total is None else [a + b for a, b in zip(total, grads, strict=True)]


def each_once(*makes: Callable[[], Any]) -> list:
    """What they return, of NumPy arrays and numbers: each is called on one rank, in turn, which tells the others.

    For what one device gives, as every rank would compute the same: with 4 ranks that is a third of a case of the recipe.
    """
    world = comm.current_world()
    mine = {i: make() for i, make in enumerate(makes) if i % world.size == world.rank}
    heard = {}
    for of_a_rank in comm.group(tuple(range(world.size))).all_gather_object(mine):
        heard |= of_a_rank
    return [heard[i] for i in range(len(makes))]


def shared_folder() -> Path:
    """A new one, the same on all ranks."""
    ranks = range(comm.current_world().size)
    return Path(comm.group(ranks).broadcast_object(tempfile.mkdtemp(dir=os.getcwd()), 0))


# At the first call of a style with a plain input that it takes as cut: ranks tell each other the extents.
TOLD = ("all_gather_object", "forward")


@contextmanager
def counted(wanted: dict[tuple[str, str], int] | None = None):
    """Counter of (op, phase) over the block, filled when it ends; and compared with the one wanted, if any."""
    count: Counter = Counter()
    with comm.record() as events:
        yield count
    count.update((e.op, e.phase) for e in events)
    assert wanted is None or count == wanted, count


_PLAIN: list = []  # the last answer of a cell on one device, before it what it was of


def of_plain(plain, rows, loss, make: Callable[[], Any]) -> Any:
    """`make()`, what a cell on one device gives, once for a cell asked again with the values and in the order it had.

    Args:
        loss: a function; of another one the answer is another.
    """
    values = [(p.requires_grad, p.asnumpy().tobytes()) for p in plain.get_parameters()]
    of = (plain, rows, loss), (getattr(plain, "order", None), values)
    if not (_PLAIN and all(a is b for a, b in zip(_PLAIN[0], of[0])) and _PLAIN[1] == of[1]):
        _PLAIN[:] = *of, make()
    return _PLAIN[2]


_KNOWN: list = []  # the last reference: its function, inputs and results


def _of_one_device(fn, tensors):
    """Value and gradients on plain tensors, computed once for a function that is asked in one layout after another."""
    if not (_KNOWN and _KNOWN[0] is fn and all(a is b for a, b in zip(_KNOWN[1], tensors, strict=True))):
        _KNOWN[:] = fn, tuple(tensors), ms.value_and_grad(fn, tuple(range(len(tensors))))(*tensors)
    return _KNOWN[2]


def check_against_one_device(fn, tensors, layouts, mesh, what: str = "") -> Counter:
    """Value and every gradient of `fn` on DTensors against plain tensors; returns the communication of the step."""
    wrt = tuple(range(len(tensors)))
    value, grads = _of_one_device(fn, tensors)
    inputs = [placed(t, mesh, *p) for t, p in zip(tensors, layouts)]
    with counted() as count:
        got, got_grads = value_and_grad(fn, wrt)(*inputs)
    equal(got, value, f"{what} value")
    equal(got_grads, grads, f"{what} gradient")
    return count


def equal_steps(got, want, params) -> None:
    """Loss and the gradient of each parameter, as `value_and_grad` gives them, are those wanted."""
    equal(got[0], want[0], "loss")
    for p, g, w in zip(params, got[1], want[1], strict=True):
        equal(g, w, p.name)


def trains_as_one_device(net, plain, x, dx) -> None:
    """Loss and every parameter's gradient of a distributed net on `dx` against the plain one on `x`."""
    want = ms.value_and_grad(lambda t: (plain(t) ** 2).mean(), None, plain.trainable_params())(x)
    got = value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(dx)
    equal_steps(got, want, net.trainable_params())


def refusal(fn, error=OpRuleError) -> str:
    """The message with which `fn` is refused."""
    try:
        fn()
    except error as e:
        return str(e)
    raise AssertionError("nothing was raised")


def same_on_all_ranks(world, text: str) -> str:
    """The text; asserts that all ranks hold the same."""
    texts = comm.group(tuple(range(world.size))).all_gather_object(text)
    assert len(set(texts)) == 1, texts
    return text


def refused_alike(world, fn, error=OpRuleError) -> str:
    """The message with which `fn` is refused on all ranks, before any communication."""
    with counted() as count:
        text = refusal(fn, error)
    assert not count, (text, count)
    return same_on_all_ranks(world, text)


def crossed(first: Iterable, second: Iterable, every: int) -> Iterator[tuple]:
    """All pairs; at push one of so many of `second` with each of `first`, beginning elsewhere each time."""
    for shift, one in enumerate(first):
        for other in sampled(second, every, shift):
            yield one, other


def each(rows: Iterable[Any]) -> Callable[[Callable], None]:
    """Runs the function below it at once, for each row: one that fails does not hide the next. Ranks must fail alike.

    Args:
        rows: tuples of arguments, or single ones that are no tuples.
    """
    def run(check: Callable) -> None:
        faults = []
        for row in rows:
            row = row if isinstance(row, tuple) else (row,)
            try:
                check(*row)
            except Exception as e:
                what = ", ".join(str(getattr(x, "__name__", x)) for x in row)
                faults.append(f"{what}: {type(e).__name__}: {' '.join(str(e).split())[:300]}")
        assert not faults, "\n" + "\n".join(faults)
    return run
