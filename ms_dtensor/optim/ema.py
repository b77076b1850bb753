# SPDX-License-Identifier: Apache-2.0
"""A running mean of parameters, shard by shard: it has their layouts, so nothing is communicated."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspore import Parameter, Tensor

from ..internals.names import NoFallbackGuard
from ..internals.target import on_cpu
from .arrays import chunks, layout_of, local_array, precision, values, write, zeros
from .base import check_current, check_names, check_params, restore, state_tensor


class EMA:
    """Exponential moving average of parameters, in float32 (float64 of float64).

    Args:
        params: parameters, plain or DTensor, of any mix of layouts and meshes. The average starts at their values.
        decay: share of the old average in each `update`.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import EMA
        >>> w = ms.Parameter(ms.Tensor([1.0]), name="w")
        >>> ema = EMA([w], decay=0.75)
        >>> _ = w.set_data(ms.Tensor([3.0]))
        >>> ema.update()
        >>> with ema.swapped():
        ...     w.asnumpy().tolist()
        [1.5]
        >>> w.asnumpy().tolist()
        [3.0]
    """

    def __init__(self, params: Iterable[Parameter], decay: float = 0.999):
        if not 0 <= decay < 1:
            raise ValueError(f"For 'EMA', 'decay' = {decay} is out of range: at least 0 and below 1.")
        self.params, self.decay = tuple(params), decay
        check_params("EMA", self.params)
        self._swapped = False
        with NoFallbackGuard():
            self._averages = [zeros(p._shape, precision(p)) for p in self.params]
            for param, average in zip(self.params, self._averages, strict=True):
                write(average, values(param, precision(param)))

    def update(self) -> None:
        """Takes the parameters' values in; to be called after each step."""
        self._check("update")
        with NoFallbackGuard():
            for param, average in zip(self.params, self._averages, strict=True):
                for a, p in chunks(average, values(param, precision(param))):
                    write(a, a * self.decay + p * (1.0 - self.decay))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the parameters have the averages' values; their own are kept and come back, bit by bit."""
        self._check("swapped")
        with NoFallbackGuard():
            own = [local_array(p).copy() if on_cpu() else Tensor.copy(p) for p in self.params]
            self._write(self._averages)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            with NoFallbackGuard():
                self._write(own)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Of each parameter by name its "average": a tensor in the parameter's layout, not a copy."""
        check_names("EMA", self.params)
        return {p.name: {"average": state_tensor(a, layout_of(p))} for p, a in zip(self.params, self._averages, strict=True)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over the values of a `state_dict` of the same parameters in the same layouts."""
        restore("EMA", self.state_dict(), state)

    def _write(self, arrays) -> None:
        for param, array in zip(self.params, arrays, strict=True):
            write(param, array)

    def _check(self, what: str) -> None:
        check_current("EMA", self.params)
        if self._swapped:
            raise RuntimeError(f"For 'EMA.{what}', the parameters hold the averages: leave 'swapped' first.")
