# SPDX-License-Identifier: Apache-2.0
"""Methods that name their dim as MindSpore does, `axis=`: for many of them another op than the same call with `dim=`."""
from __future__ import annotations

from mindspore import ops

from .form import Form
from .forms_index import ROWS
from .samples import arrays, forms

X = (arrays((4, 3)), arrays((2, 5, 4)))
XB = (lambda rng: (rng.random((4, 3)) > 0.5,), lambda rng: (rng.random((2, 5, 4)) > 0.9,))
SMALL = (lambda rng: (rng.integers(-9, 9, (4, 3)).astype("int8"),),)

FORMS = [
    *[f for name in ("any", "all") for f in forms(XB, {
        f"x.{name}(axis=)": lambda x, name=name: getattr(x, name)(axis=0),
        f"x.{name}(axis=, keep_dims=)": lambda x, name=name: getattr(x, name)(axis=-1, keep_dims=True),
        f"x.{name}(dim=)": lambda x, name=name: getattr(x, name)(dim=0)})],
    *forms(X, {
        "x.nansum(axis=)": lambda x: x.nansum(axis=0), "x.count_nonzero(axis=)": lambda x: x.count_nonzero(axis=0),
        "x.count_nonzero(keep_dims=)": lambda x: x.count_nonzero(axis=-1, keep_dims=True),
        "ops.count_nonzero": ops.count_nonzero, "ops.count_nonzero(axis)": lambda x: ops.count_nonzero(x, 0, True),
        "x.median(axis=)": lambda x: x.median(axis=0), "x.cumsum(axis=)": lambda x: x.cumsum(axis=0),
        "x.cumsum()": lambda x: x.cumsum(), "x.sort(axis=)": lambda x: x.sort(axis=0, descending=True),
        "x.argsort(axis=)": lambda x: x.argsort(axis=0), "x.unsqueeze(dim=)": lambda x: x.unsqueeze(dim=1),
        "x.max(axis=, return_indices=)": lambda x: x.max(axis=0, return_indices=True), "x.max(keepdims=)": lambda x: x.max(keepdims=True),
        "x.min(axis=, return_indices=)": lambda x: x.min(axis=0, keepdims=True, return_indices=True),
        "x.argmax(keepdims=)": lambda x: x.argmax(keepdims=True), "x.split(axis=)": lambda x: x.split(2, axis=0),
        "x.split(split_size=)": lambda x: x.split(split_size=2, dim=-1), "x.chunk(axis=)": lambda x: x.chunk(2, axis=0),
        "x.narrow(axis=)": lambda x: x.narrow(axis=0, start=1, length=1)}),
    *forms(SMALL, {"x.nansum(axis=) of integers": lambda x: x.nansum(axis=0), "x.cumsum(axis=) of integers": lambda x: x.cumsum(axis=0)}),
    *forms((arrays((4, 3)), arrays((5, 2))), {"x.tile(dims=)": lambda x: x.tile(dims=(2, 1)), "x.tile(reps=)": lambda x: x.tile(reps=(1, 2)),
                                  "x.std(dim=)": lambda x: x.std(dim=0), "x.std()": lambda x: x.std()}),
    Form("x.gather(axis=)", lambda x, i: x.gather(axis=0, input_indices=i), ROWS),
    Form("x.take(indices=)", lambda x, i: x.take(indices=i, axis=0), ROWS),
    Form("x.index_select(axis=)", lambda x, i: x.index_select(axis=0, index=i), ROWS[:1] + ROWS[3:]),
]
