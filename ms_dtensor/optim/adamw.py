# SPDX-License-Identifier: Apache-2.0
"""AdamW on local shards: PyTorch's formula, no dispatch, no communication.

Not a `mindspore.nn.Optimizer`: those differ in the formula (`nn.AdamWeightDecay` has no bias correction). The one
invariant: after a step every rank holds exactly the shard of what one device would hold, since the update is
elementwise and a gradient has its parameter's own layout. A parameter of 16 bits has a float32 master, which the steps
move: in bfloat16 1.0 - 3e-4 is 1.0, and a model would stand still.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.ops.auto_generate import gen_ops_prim

from ..internals.names import NoFallbackGuard
from ..internals.target import ascend_kernels, on_cpu
from ._storage import CHUNK, local_array, local_view
from .base import check_current, check_gradient, tensors_of

_LARGE = 1 << 16  # elements: up to here a call of the fused kernel (300 us) costs more than NumPy's passes


class AdamW:
    """Adam with bias correction and decoupled weight decay, as `torch.optim.AdamW`.

    Args:
        params: parameters, plain or DTensor, of any mix of layouts and meshes.
        lr: learning rate; assign `optimizer.lr` between steps for a schedule.
        betas: decay of the first and second moment.
        eps: added to the root of the corrected second moment.
        weight_decay: each step multiplies parameters by 1 - lr * weight_decay.

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

    def __init__(self, params: Iterable[Parameter], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2):
        self.params = tuple(params)
        if not self.params:
            raise ValueError("For 'AdamW', 'params' is empty.")
        for name, value, high in (("lr", lr, None), ("eps", eps, None), ("weight_decay", weight_decay, None),
                                  ("betas[0]", betas[0], 1.0), ("betas[1]", betas[1], 1.0)):
            if value < 0 or (high is not None and value >= high):
                raise ValueError(f"For 'AdamW', '{name}' = {value} is out of range: at least 0"
                                 + (" and below 1." if high else "."))
        self.lr, self.betas, self.eps, self.weight_decay = lr, (float(betas[0]), float(betas[1])), eps, weight_decay
        self.step = 0
        self._host = on_cpu()
        self._fused = ops.Adam()
        self._moments = [self._new_moments(p) for p in self.params]
        self._masters = [self._new_master(p) for p in self.params]
        self._scratch: dict[np.dtype, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """One step with `grads` in the order of `params`; a None leaves its parameter alone.

        A gradient is the local tensor in its parameter's layout (as `mindspore.value_and_grad` returns it) or a
        DTensor of that layout.
        """
        if len(grads) != len(self.params):
            raise ValueError(f"For 'AdamW', there are {len(self.params)} parameters but {len(grads)} gradients.")
        check_current("AdamW", self.params)
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                check_gradient("AdamW", param, grad)
        self.step += 1
        large = self._host and any(m.size >= _LARGE for m, _ in self._moments)
        scalars = self._scalars() if large else ()
        for param, grad, (m, v), master in zip(self.params, grads, self._moments, self._masters, strict=True):
            if grad is None:
                continue
            if not self._host:
                self._step_device(param, grad, m, v, master)
            elif m.size < _LARGE or not self._step_fused(param, grad, m, v, scalars):
                self._step_host(param, grad, m, v, master)

    def state_dict(self) -> dict:
        """Step count, moments and masters by parameter name; local shards in the parameter's layout."""
        return {"step": self.step, "moments": {p.name: mv for p, mv in zip(self.params, self._moments, strict=True)},
                "masters": {p.name: w for p, w in zip(self.params, self._masters, strict=True) if w is not None}}

    def checkpoint_state(self) -> dict:
        """What `state_dict` tells, as tensors in their global layouts on the same storage: what `checkpoint` saves."""
        return {kind: tensors_of(self.params, held) if isinstance(held, dict) else held
                for kind, held in self.state_dict().items()}

    def load_checkpoint_state(self, state: Mapping) -> None:
        """Takes over the numbers of a `checkpoint_state` whose tensors have been written."""
        self.step = int(state["step"])

    def _new_moments(self, param):
        if self._host:
            size = local_array(param)
            kind = np.float64 if size.dtype == np.float64 else np.float32
            return np.zeros(size.size, kind), np.zeros(size.size, kind)
        with NoFallbackGuard():
            kind = ms.float64 if param.dtype == ms.float64 else ms.float32
            return tuple(Parameter(ops.zeros(param._shape, kind), requires_grad=False) for _ in "mv")

    def _new_master(self, param):
        if param.dtype not in (ms.float16, ms.bfloat16):
            return None
        if self._host:
            return local_array(param).astype(np.float32)
        with NoFallbackGuard():
            return Parameter(ops.stop_gradient(param).astype(ms.float32), requires_grad=False)

    def _factors(self, b1: float, b2: float) -> tuple[float, float, float]:
        """decay, step size over the first correction, 1 / root of the second correction"""
        return (1.0 - self.lr * self.weight_decay, self.lr / (1.0 - b1 ** self.step),
                (1.0 - b2 ** self.step) ** -0.5)

    def _scalars(self) -> tuple[Tensor, ...]:
        """What the kernel `Adam` is told so that it computes PyTorch's formula.

        It subtracts lr * m / (sqrt(v) + eps), with lr corrected by the powers of betas (0 here: not at all) and eps not
        corrected. It works with betas in float32, so its 1 - beta2 is 5e-5 off: the correction must use the same ones.
        """
        b1, b2 = (float(np.float32(b)) for b in self.betas)
        _, size, root = self._factors(b1, b2)
        return tuple(Tensor(x, ms.float32) for x in (0.0, 0.0, size / root, b1, b2, self.eps / root))

    def _step_fused(self, param, grad, m, v, scalars) -> bool:
        """All in one kernel, three times as fast as NumPy's passes if large; False where it is not for these tensors."""
        with NoFallbackGuard():
            if param.dtype != ms.float32 or grad.dtype != ms.float32 or Tensor.storage_offset(param):
                return False
            value = local_view(param)
            if value is None:
                return False
            value *= self._factors(*self.betas)[0]
            shape = param._shape
            self._fused(param, Tensor.from_numpy(m.reshape(shape)), Tensor.from_numpy(v.reshape(shape)), *scalars, grad)
        return True

    def _step_host(self, param, grad, m, v, master) -> None:
        (b1, b2), (decay, size, root) = self.betas, self._factors(*self.betas)
        shared, g = local_view(param), local_array(grad)
        value = local_array(param).copy() if shared is None else shared
        buf = self._scratch.setdefault(m.dtype, (np.empty(CHUNK, m.dtype), np.empty(CHUNK, m.dtype)))
        for lo in range(0, value.size, CHUNK):
            part = slice(lo, lo + CHUNK)
            p, mm, vv = value[part], m[part], v[part]
            a, b = buf[0][:p.size], buf[1][:p.size]
            np.copyto(b, g[part], casting="unsafe")
            mm *= b1
            np.multiply(b, 1.0 - b1, out=a)
            mm += a
            np.multiply(b, b, out=b)
            b *= 1.0 - b2
            vv *= b2
            vv += b
            np.sqrt(vv, out=b)
            b *= root
            b += self.eps
            np.divide(mm, b, out=b)
            b *= size
            if p.dtype == m.dtype:
                p *= decay
                p -= b
            else:
                w = master[part]
                np.copyto(w, p, where=w.astype(p.dtype) != p, casting="unsafe")
                w *= decay
                w -= b
                np.copyto(p, w, casting="unsafe")
        if shared is None:
            with NoFallbackGuard():
                ops.assign(param, Tensor(value.reshape(param._shape)))

    def _step_device(self, param, grad, m, v, master) -> None:
        """Nothing here asks the device for a value, so the host runs ahead of it."""
        with NoFallbackGuard():
            weight, g = (param if master is None else master), grad.astype(m.dtype)
            if master is not None:
                wide = param.astype(master.dtype)
                master.copy_(ops.select(master.astype(param.dtype).astype(master.dtype) == wide, master, wide))
            if ascend_kernels():
                # one kernel; it counts steps from 0, as `mint.optim.AdamW` tells it
                gen_ops_prim.AdamW()(weight, m, v, v, g, Tensor([self.step - 1], ms.float32), float(self.lr), *self.betas,
                                     float(self.weight_decay), float(self.eps), False, False)
            else:
                (b1, b2), (decay, size, root) = self.betas, self._factors(*self.betas)
                m.copy_(m * b1 + g * (1.0 - b1))
                v.copy_(v * b2 + g * g * (1.0 - b2))
                weight.copy_(weight * decay - m / (ops.sqrt(v) * root + self.eps) * size)
            if master is not None:
                param.copy_(master.astype(param.dtype))
