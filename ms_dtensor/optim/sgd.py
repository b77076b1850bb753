# SPDX-License-Identifier: Apache-2.0
"""SGD with momentum on local shards: PyTorch's formula, no communication."""
from __future__ import annotations

import math

from .arrays import chunks, opened, precision, values, write, zeros
from .base import Optimizer, Params, Schedule


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`.

    Args:
        params: parameters, plain or DTensor, of any mix of layouts and meshes; or groups, dicts of "params" and any of
            the options below but `schedule`.
        lr: learning rate.
        momentum: decay of the running sum of gradients; 0 keeps no state.
        weight_decay: times the parameter, added to its gradient.
        nesterov: looks one step of the momentum ahead.
        schedule: factor of the learning rate by step; see `cosine`.

    Parameters of 16 bits have a float32 master weight, which the steps move.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import SGD
        >>> w = ms.Parameter(ms.Tensor([1.0, 2.0]), name="w")
        >>> b = ms.Parameter(ms.Tensor([1.0]), name="b")
        >>> optimizer = SGD([{"params": [w]}, {"params": [b], "lr": 0.5}], lr=0.1, momentum=0.9)
        >>> optimizer([w, b])
        >>> [round(v, 3) for v in (*w.asnumpy().tolist(), *b.asnumpy().tolist())]
        [0.9, 1.8, 0.5]
    """

    _BELOW = {"lr": math.inf, "momentum": 1.0, "weight_decay": math.inf}

    def __init__(self, params: Params, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
                 nesterov: bool = False, *, schedule: Schedule | None = None):
        super().__init__(params, schedule, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    def _new_state(self, i):
        if self._option(i, "momentum"):
            return {"momentum": zeros(self.params[i]._shape, precision(self.params[i]))}
        if self._option(i, "nesterov"):
            raise ValueError("For 'SGD', 'nesterov' needs a 'momentum' greater than 0.")
        return {}

    def _step(self, grads):
        for i, grad in grads.items():
            param, buffer = self.params[i], self._state[i].get("momentum")
            lr, mu, decay, nesterov = (self._lr(i), *(self._option(i, n) for n in ("momentum", "weight_decay", "nesterov")))
            with opened(param, self._masters[i]) as weight:
                for w, g, m in chunks(weight, values(grad, precision(param)), buffer):
                    update = g + w * decay if decay else g
                    if m is not None:
                        write(m, m * mu + update)
                        update = update + m * mu if nesterov else m
                    write(w, w - update * lr)
