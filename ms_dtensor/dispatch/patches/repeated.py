# SPDX-License-Identifier: Apache-2.0
"""Whether a recomputed cell gave the same the second time, asked of some numbers of each result.

MindSpore 2.10 cannot draw again what `nn.Dropout`, `ops.rand` and their like have drawn on a CPU: their state is in kernels.
Not here: DTensors, which draw from the library's stream, and devices, whose results would be waited for.
"""
from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, float16, float32, float64

from ...comm.pretended import executing
from ...core.tree import leaves
from ...errors import OpRuleError
from ...internals.target import on_cpu


def sample(out: Any) -> list[np.ndarray]:
    """Up to 64 numbers or so of each result that is a plain tensor."""
    if executing() is not None or not on_cpu():
        return []
    arrays = [x.asnumpy().reshape(-1) for x in leaves(out, Tensor)
              if getattr(x, "_layout", None) is None and x.dtype in (float16, float32, float64)]
    return [array[::array.size // 64 or 1].astype(np.float64) for array in arrays]


def check_repeated(name: str, first: list[np.ndarray], out: Any) -> None:
    """Raises unless `out` is what the sample is of; sums may have come in another order.

    Raises:
        OpRuleError: it is not.
    """
    if first and any(map(_unlike, first, sample(out))):
        raise OpRuleError(f"For 'checkpoint_wrapper', {name} gave other numbers when it ran again.", "",
                          "What is recomputed has to be the same. On a CPU MindSpore draws random numbers of plain tensors "
                          "(nn.Dropout, ops.rand) anew; and matrices that a function writes have moved.",
                          ("replicate(model, mesh=mesh), on a mesh of one rank if need be: DTensors draw the same again",
                           "checkpoint_wrapper(cell) in place of a function, where it writes parameters",
                           "leave what draws or writes out of what is recomputed"))


def _unlike(a: np.ndarray, b: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):  # NaN is unlike nothing
        return bool((np.abs(a - b) > 1e-3 * np.abs(a[np.isfinite(a)]).max(initial=0)).any())
