# SPDX-License-Identifier: Apache-2.0
"""What hands a stage's tensor on where a cell is missing, and sees that nothing else is done with it there.

A model's `construct` runs on every stage, also what it does beside its cells. Between two cells of one stage that is the
model's business. Beside a missing cell it would be done once more, on each stage, and the numbers would be others: so there
the tensor has to be handed on as it is. On host its place in memory tells; on devices that would wait: only the order of the
cells is checked there.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Tensor, nn

from ..core.tree import leaves
from ..dispatch.operands import local_alias
from ..dispatch.patches.recomputed import recomputing
from ..errors import DTensorError, LayoutError
from ..internals.target import on_cpu
from ..parallel.layouts import around_construct
from ..parallel.module import ELSEWHERE

_HOOKS = "_ms_dtensor_chain"  # cell attribute: the hooks of the last `pipeline` call that kept it


class Absent(nn.Cell):
    """In the place of a cell of another stage: it returns its first argument and has no parameters.

    Args:
        path: of the cell that is missing.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.pipeline import Absent
        >>> Absent()(ms.Tensor([1.0]), "anything")
        Tensor(shape=[1], dtype=Float32, value= [ 1.00000000e+00])
    """

    def __init__(self, path: str = ""):
        super().__init__()
        self.path = path
        self.__dict__[ELSEWHERE] = True
        self.chain: Chain | None = None

    def __call__(self, *args, **kwargs):
        """As a cell's; without hooks by itself, as a stage calls all cells of a model and has few of them."""
        if self._forward_pre_hook or self._forward_hook:
            return super().__call__(*args, **kwargs)
        return self.construct(*args, **kwargs)

    def construct(self, x=None, *args, **kwargs):
        if self.chain is not None:
            self.chain.come(self.path, x, True)
            self.chain.go(self.path, x, True)
        return x


class Chain:
    """The cells of one stage's module, in the order in which they run.

    Args:
        module: the stage's.
        cells: by path, its own and those that stand for missing ones.
        stages: by path, which stage has it.
        first: whether it is the first stage.
    """

    def __init__(self, module: nn.Cell, cells: Iterable[tuple[str, nn.Cell]], stages: dict[str, int], first: bool):
        self.stages, self.first, self.last, self.absent, self.at = stages, first, None, False, ""
        self.missing: list[str] = []  # paths
        self.behind: list[tuple[str, nn.Cell]] = []  # that have no hook yet on what they return
        for path, cell in cells:
            if isinstance(cell, Absent):
                cell.chain = self
                self.missing.append(path)
                continue
            for old in cell.__dict__.pop(_HOOKS, ()):
                old.remove()
            cell.__dict__[_HOOKS] = [
                cell.register_forward_pre_hook(lambda c, args, path=path: self.come(path, args[0] if args else None, False))]
            self.behind.append((path, cell))
        around_construct(module, self._watched)

    def _hook_last(self) -> None:
        """At the first run: what styles and others do to a cell's output comes before."""
        for path, cell in self.behind:
            cell.__dict__[_HOOKS].append(
                cell.register_forward_hook(lambda c, args, out, path=path: self.go(path, out, False)))
        self.behind = []

    def _watched(self, given: Callable) -> Callable:
        """The module's `construct`, from what it is given to what it returns."""
        @functools.wraps(given)
        def construct(cell, *args, **kwargs):
            self._hook_last()
            self.last, self.absent, self.at = args[0] if args else None, not self.first, ""
            try:
                out = given(cell, *args, **kwargs)
            except Exception as error:
                if hasattr(error, "add_note") and not isinstance(error, DTensorError) and (  # those say what to do
                        self.missing or not self.first):
                    missing = ", ".join([*self.missing[:3], *(["..."] if self.missing[3:] else [])])
                    has = f"has not {missing}" if missing else "has all cells, and the one before it none"
                    error.add_note(f"this stage {has}: in the place of a cell of another stage its first "
                                   "argument is handed on, so several tensors go as one list or dict")
                raise
            if self.absent:
                self._same("", out)
            self.last = None
            return out
        return construct

    def come(self, path: str, x: Any, absent: bool) -> None:
        """A cell is called.

        Raises:
            LayoutError: behind one of a later stage, or with what the cell before has not handed on.
        """
        if self.at and self.stages[path] < self.stages[self.at] and not recomputing.get():
            raise LayoutError(f"For a pipeline, '{path}' is called behind '{self.at}', which is of a later stage.",
                              f"stages {self.stages[path]} and {self.stages[self.at]}",
                              "Cells run in the order in which the model has them, and each stage runs once.",
                              ("make cells in the order of their calls, one for each call", "cut elsewhere: split=[...]"))
        if (absent or self.absent) and not recomputing.get():
            self._same(path, x)

    def go(self, path: str, out: Any, absent: bool) -> None:
        """It has returned."""
        if not recomputing.get():
            self.last, self.absent, self.at = out, absent, path

    def _same(self, path: str, x: Any) -> None:
        """`path`: of the cell that is given it; "" if the stage returns it."""
        if x is self.last or not on_cpu():
            return
        one, two = (next(iter(leaves(y, Tensor)), None) for y in (self.last, x))
        if one is None or two is None or one.dtype != two.dtype or not one.size or not two.size:
            return
        if Tensor.data_ptr(local_alias(one)) != Tensor.data_ptr(local_alias(two)) or one.shape != two.shape:
            what = f"what '{path}' is given" if path else "what the stage returns"
            before = f"'{self.at}'" if self.at else "the stage before"
            raise LayoutError(f"For a pipeline, {what} is not what {before} handed on.",
                              f"{list(two.shape)} after {list(one.shape)}",
                              "What `construct` does beside a cell of another stage is done on each stage once more.",
                              ("put it into a cell: a scale after the embedding into that, a residual into a block",
                               "cut elsewhere: split=[...]"))
