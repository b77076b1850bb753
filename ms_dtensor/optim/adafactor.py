# SPDX-License-Identifier: Apache-2.0
"""Adafactor (Shazeer & Stern 2018) on any layout: a matrix keeps one second moment per row and one per column.

Means of rows, columns and whole parameters are sums over local shards and then over the ranks that cut them: two
all-reduces a step and mesh axis that cuts something, whatever the number of parameters. All else is local.
"""
from __future__ import annotations

import math

from .arrays import Array, layout_of, opened, precision, total, values, write, xp, zeros
from .base import Optimizer, Params, Schedule
from .reduce import axes_of, sum_over_ranks


class Adafactor(Optimizer):
    """Adafactor with factored second moments, update clipping and parameter scaling.

    A parameter of two dims or more is a stack of matrices [..., rows, columns]; of each, rows + columns numbers are kept.
    Names are `torch.optim.Adafactor`'s, formulas the paper's: `eps[0]` is added to squared gradients (torch bounds the
    estimate by it instead), so `eps[0]` is 1e-30 and not the dtype's resolution.

    Args:
        params: parameters, plain or DTensor, of any mix of layouts and meshes; or groups, dicts of "params" and any of
            the options below but `schedule`.
        lr: bound of the relative step size min(lr, 1 / sqrt(step)).
        beta2_decay: the second moments decay by 1 - step ** beta2_decay.
        eps: added to squared gradients; least root mean square of a parameter that scales its step.
        d: an update's root mean square is clipped to this.
        weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
        schedule: factor of `lr` by step; see `cosine`.

    Communicates: two all-reduces per mesh axis that cuts a parameter, of a row and a column per matrix, and of a number per
    parameter.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import Adafactor
        >>> w = ms.Parameter(ms.Tensor([[1.0, 2.0], [2.0, 1.0]]), name="w")
        >>> optimizer = Adafactor([w], lr=0.1)
        >>> optimizer([ms.Tensor([[1.0, 4.0], [1.0, 4.0]])])
        >>> [round(v, 3) for v in w.asnumpy().reshape(-1).tolist()]
        [0.842, 1.842, 1.842, 0.842]
    """

    _ALONE = False
    _BELOW = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf}
    _LACKS = {"rows": (-1,), "columns": (-2,), "mean": (-1, -2)}

    def __init__(self, params: Params, lr: float = 1e-2, beta2_decay: float = -0.8, eps: tuple[float, float] = (1e-30, 1e-3),
                 d: float = 1.0, weight_decay: float = 0.0, *, schedule: Schedule | None = None):
        super().__init__(params, schedule, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay)

    def _new_state(self, i):
        if not self._option(i, "d") > 0:
            raise ValueError(f"For 'Adafactor', 'd' = {self._option(i, 'd')} is out of range: greater than 0.")
        power = self._option(i, "beta2_decay")
        if not power <= 0:
            raise ValueError(f"For 'Adafactor', 'beta2_decay' = {power} is out of range: at most 0.")
        param = self.params[i]
        shape, dtype = param._shape, precision(param)
        if len(shape) < 2:
            return {"variance": zeros(shape, dtype)}
        # the mean of all rows' moments is kept, so that none of the sums must wait for another
        return {"rows": zeros(shape[:-1], dtype), "columns": zeros((*shape[:-2], shape[-1]), dtype),
                "mean": zeros(shape[:-2], dtype)}

    def _step(self, grads):
        sums = self._summed({i: self._squares(i, grad) for i, grad in grads.items()})
        for i, grad in grads.items():
            self._move_moments(i, grad, sums[i])
        sizes = self._summed({i: [(total(self._update(i, grad) ** 2), self._all_dims(i))] for i, grad in grads.items()})
        for i, grad in grads.items():
            param, count = self.params[i], max(math.prod(self.params[i].shape), 1)
            _, least = self._option(i, "eps")
            rms = (sums[i][-1] / count) ** 0.5, (sizes[i][0] / count) ** 0.5
            lr = self._lr(i)
            scale = min(lr, self.step ** -0.5) * xp().clip(rms[0], least, None)
            scale = scale / xp().clip(rms[1] / self._option(i, "d"), 1.0, None)
            with opened(param, self._masters[i]) as weight:
                write(weight, weight * (1.0 - lr * self._option(i, "weight_decay")) - self._update(i, grad) * scale)

    def _squares(self, i: int, grad) -> list[tuple[Array, tuple[int, ...]]]:
        """This rank's sums of squares, each with the dims of the parameter that it sums over: the parameter's own last."""
        with opened(self.params[i], self._masters[i]) as weight:
            own = (total(weight * weight), self._all_dims(i))
        if self.params[i].ndim < 2:
            return [own]
        squares = self._squared(i, grad)
        rows = total(squares, -1)
        return [(rows, (-1,)), (total(squares, -2), (-2,)), (total(rows, -1), (-1, -2)), own]

    def _squared(self, i: int, grad) -> Array:
        return values(grad, precision(self.params[i])) ** 2 + self._option(i, "eps")[0]

    def _move_moments(self, i: int, grad, sums: list[Array]) -> None:
        state, share = self._state[i], self.step ** self._option(i, "beta2_decay")
        if "variance" in state:
            new = {"variance": self._squared(i, grad)}
        else:
            m, n = (max(size, 1) for size in self.params[i].shape[-2:])
            new = {"rows": sums[0] / n, "columns": sums[1] / m, "mean": sums[2] / (m * n)}
        for kind, value in new.items():
            write(state[kind], state[kind] + (value - state[kind]) * share)

    def _update(self, i: int, grad) -> Array:
        """The gradient over the root of the estimated second moment, which is rows x columns / mean."""
        g, state = values(grad, precision(self.params[i])), self._state[i]
        if "variance" in state:
            return g / state["variance"] ** 0.5
        rows, columns, mean = state["rows"], state["columns"], state["mean"]
        if not math.prod(g.shape):
            return g
        rows = rows / mean.reshape((*mean.shape, 1))  # first, as the product of two small numbers may be 0
        return g / rows.reshape((*rows.shape, 1)) ** 0.5 / columns.reshape((*mean.shape, 1, columns.shape[-1])) ** 0.5

    def _all_dims(self, i: int) -> tuple[int, ...]:
        return tuple(range(self.params[i].ndim))

    def _summed(self, parts: dict[int, list[tuple[Array, tuple[int, ...]]]]) -> dict[int, list[Array]]:
        """The sums over all ranks."""
        flat = []
        for i, sums in parts.items():
            layout = layout_of(self.params[i])
            flat += [(layout, axes_of(layout, *dims), array) for array, dims in sums]
        done = iter(sum_over_ranks(flat))
        return {i: [next(done) for _ in sums] for i, sums in parts.items()}
