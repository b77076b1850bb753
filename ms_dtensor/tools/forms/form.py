# SPDX-License-Identifier: Apache-2.0
"""One public call form, as data: how users spell it, how to call it, and sample arguments of several shapes.

The corpus (`forms_<family>.py`, each a list `FORMS`) is what "covered" means: `python -m ms_dtensor verify` proves every
rule behind every form, `docs/tools/make_op_coverage.py` prints it, and the tests of a family run a slice of it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Args = Callable[[np.random.Generator], tuple]


@dataclass(frozen=True)
class Form:
    """A public call form.

    Args:
        name: the spelling users write: "mint.add", "x.sum(dim)", "nn.Dense".
        fn: called with the arguments; `Tensor`s where `args` gives NumPy arrays.
        args: generator -> arguments (arrays and static values), or a tuple of such functions, one per shape variant.
        raises: the error that a DTensor call must raise; such a form has no cases to verify.
        note: a reason or limit, for the reader of the coverage table.
        travels: a value that ranks send each other decides a shape: pretended ranks cannot be asked whether they agree.
    """

    name: str
    fn: Callable[..., Any]
    args: Args | tuple[Args, ...]
    raises: type[Exception] | None = None
    note: str = ""
    travels: bool = False

    def variants(self) -> list[tuple]:
        """The sample arguments, one tuple per shape variant; the same in every run and for every form that shares them."""
        makers = self.args if isinstance(self.args, tuple) else (self.args,)
        return [tuple(make(np.random.default_rng(i))) for i, make in enumerate(makers)]
