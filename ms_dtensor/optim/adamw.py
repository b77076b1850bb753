# SPDX-License-Identifier: Apache-2.0
"""AdamW on local shards: PyTorch's formula, no dispatch, no communication.

Not a `mindspore.nn.Optimizer`: those differ in the formula (`nn.AdamWeightDecay` has no bias correction). The one
invariant: after a step every rank holds exactly the shard of what one device would hold, since the update is
elementwise and a gradient has its parameter's own layout. A parameter of 16 bits has a float32 master, which the steps
move: in bfloat16 1.0 - 3e-4 is 1.0, and a model would stand still.
"""
from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import gen_ops_prim

from ..comm.pretended import executing
from ..errors import ConfigError
from ..internals.names import NoFallbackGuard
from ..internals.target import ascend_kernels, on_cpu, target
from .arrays import chunks, local_view, opened, precision, values, write, zeros
from .base import Optimizer, Params, Schedule
from .offload import Swap, on_host

_LARGE = 1 << 16  # elements: up to here a call of the fused kernel (300 us) costs more than NumPy's passes


class AdamW(Optimizer):
    """Adam with bias correction and decoupled weight decay, as `torch.optim.AdamW`.

    Args:
        params: parameters, plain or DTensor, of any mix of layouts and meshes; or groups, dicts of "params" and any of
            the options below but `schedule`.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the corrected second moment.
        weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
        schedule: factor of the learning rate by step; see `cosine`.
        offload: moments and masters lie in the host's memory, and come to the device for their parameter's step, while
            others' are stepped; on Ascend. On a CPU they are there anyway.

    Moments are float32 (float64 for float64 parameters) and have the local shape of their parameter, and so have the float32
    master weights of parameters of 16 bits: a step moves the master and rounds it into the parameter. Where a parameter no
    longer is its master rounded (weights were loaded, an average was written), the master starts anew from it.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import AdamW
        >>> w = ms.Parameter(ms.Tensor([1.0, 2.0]), name="w")
        >>> optimizer = AdamW([w], lr=0.1, weight_decay=0.0)
        >>> loss, grads = ms.value_and_grad(lambda: (w * w).sum(), None, optimizer.params)()
        >>> optimizer(grads)
        >>> [round(v, 3) for v in w.asnumpy().tolist()]
        [0.9, 1.9]
    """

    _BELOW = {"lr": math.inf, "betas": 1.0, "eps": math.inf, "weight_decay": math.inf}

    def __init__(self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, schedule: Schedule | None = None, offload: bool = False):
        if not isinstance(offload, bool):
            raise ConfigError("For 'AdamW', 'offload' is no truth value.", repr(offload),
                              "It says whether states lie on the host.", "offload=True, or False")
        self._away, self._swap = offload and not on_cpu(), None
        if self._away and (target() != "Ascend" or executing() is not None):
            raise ConfigError("For 'AdamW', 'offload' is for Ascend.", "a dry run" if executing() else target(),
                              "Copies beside computation are documented for it alone, and a dry run does not see them.",
                              "offload=False")
        self._fused, self._kernel = ops.Adam(), gen_ops_prim.AdamW()
        self._counted: Any = None  # steps before this one, and the same on the device
        super().__init__(params, schedule, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        if self._away:
            with NoFallbackGuard():
                for i, master in enumerate(self._masters):
                    if master is not None:
                        self._masters[i] = on_host(master.shape, master.dtype).copy_(master)
                self._swap = Swap([state | ({} if master is None else {"master": master})
                                   for state, master in zip(self._state, self._masters, strict=True)])

    def _new_state(self, i):
        shape, dtype = self.params[i]._shape, precision(self.params[i])
        make = on_host if self._away else zeros
        return {"exp_avg": make(shape, dtype), "exp_avg_sq": make(shape, dtype)}

    def _tensors(self, i):
        if self._swap is not None:
            self._swap.synchronize()
        return super()._tensors(i)

    def _step(self, grads):
        if self._swap is not None:
            for i, state in self._swap.through([i for i in grads if math.prod(self.params[i]._shape)]):
                self._step_on_device(i, grads[i], state["exp_avg"], state["exp_avg_sq"], state.get("master"))
            return
        scalars: dict[tuple, tuple[Tensor, ...]] = {}  # of the fused kernel, made once for all of the same options
        for i, grad in grads.items():
            (b1, b2), eps, param = self._option(i, "betas"), self._option(i, "eps"), self.params[i]
            m, v = self._state[i]["exp_avg"], self._state[i]["exp_avg_sq"]
            if on_cpu() and m.size >= _LARGE and self._step_fused(i, grad, m, v, scalars):
                continue
            if not on_cpu():
                self._step_on_device(i, grad, m, v, self._masters[i])
                continue
            factors = self._factors(i, b1, b2)
            with opened(param, self._masters[i]) as weight:
                for arrays in chunks(weight, values(grad, precision(param)), m, v):
                    _step_host(arrays, (b1, b2), eps, factors)

    def _makes(self, i: int, grad: Tensor) -> int:
        """See `Optimizer._makes`."""
        large = math.prod(self.params[i]._shape) >= _LARGE
        return 3 if on_cpu() and large and self._is_fused(i, grad) else 0  # the kernel's results; it has written in place

    def _is_fused(self, i: int, grad: Tensor) -> bool:
        param = self.params[i]
        return param.dtype == ms.float32 and grad.dtype == ms.float32 and not Tensor.storage_offset(param)

    def _step_on_device(self, i: int, grad: Tensor, m: Tensor, v: Tensor, master: Tensor | None) -> None:
        param, (b1, b2), eps = self.params[i], self._option(i, "betas"), self._option(i, "eps")
        decay, size, root = self._factors(i, b1, b2)
        with opened(param, master) as weight:
            g = values(grad, precision(param))
            if ascend_kernels():
                # one kernel; it counts steps from 0, as `mint.optim.AdamW` tells it
                self._kernel(weight, m, v, v, g, self._steps_before(), float(self._lr(i)), float(b1), float(b2),
                             float(self._option(i, "weight_decay")), float(eps), False, False)
                return
            write(m, m * b1 + g * (1.0 - b1))
            write(v, v * b2 + g * g * (1.0 - b2))
            write(weight, weight * decay - m / (ops.sqrt(v) * root + eps) * size)

    def _steps_before(self) -> Tensor:
        """The steps before this one, on the device: a number that stays there, as each new one is copied from the host."""
        count: Any
        at, count = self._counted or (None, None)
        if at == self.step - 2:
            write(count, count + 1.0)
        elif at != self.step - 1:  # the first step, or states were loaded
            count = Tensor([self.step - 1], ms.float32)
        self._counted = self.step - 1, count
        return count

    def _factors(self, i: int, b1: float, b2: float) -> tuple[float, float, float]:
        """decay, step size over the first correction, 1 / root of the second correction"""
        lr = self._lr(i)
        return 1.0 - lr * self._option(i, "weight_decay"), lr / (1.0 - b1 ** self.step), (1.0 - b2 ** self.step) ** -0.5

    def _step_fused(self, i, grad, m, v, scalars) -> bool:
        """All in one kernel, three times as fast as NumPy's passes if large; False where it is not for these tensors.

        It subtracts lr * m / (sqrt(v) + eps), with lr corrected by the powers of betas (0 here: not at all) and eps not
        corrected. It works with betas in float32, so its 1 - beta2 is 5e-5 off: the correction must use the same ones.
        """
        param = self.params[i]
        value = local_view(param) if self._is_fused(i, grad) else None
        if value is None:
            return False
        key = self._lr(i), self._option(i, "betas"), self._option(i, "eps")
        if key not in scalars:
            b1, b2 = (float(np.float32(b)) for b in key[1])
            _, size, root = self._factors(i, b1, b2)
            scalars[key] = tuple(Tensor(x, ms.float32) for x in (0.0, 0.0, size / root, b1, b2, key[2] / root))
        value *= self._factors(i, *key[1])[0]
        self._fused(param, Tensor.from_numpy(m), Tensor.from_numpy(v), *scalars[key], grad)
        return True


def _step_host(arrays, betas, eps, factors) -> None:
    """The formula in as few passes and as little memory as NumPy allows."""
    (w, g, m, v), (b1, b2), (decay, size, root) = arrays, betas, factors
    a = g * (1.0 - b1)
    m *= b1
    m += a
    np.multiply(g, g, out=a)
    a *= 1.0 - b2
    v *= b2
    v += a
    np.sqrt(v, out=a)
    a *= root
    a += eps
    np.divide(m, a, out=a)
    a *= size
    w *= decay
    w -= a
