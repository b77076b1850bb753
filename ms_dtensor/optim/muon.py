# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices of any layout: the momentum, orthogonalised, is the step. Other parameters are AdamW's.

Orthogonalising needs the whole matrix. Each matrix is worked on by one rank of its mesh (see `owners.py`), also where all
of them have it whole: the work is large beside sending the result. Everything else is local.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from mindspore import Tensor

from .adamw import AdamW
from .arrays import Array, layout_of, opened, precision, total, values, write, xp, zeros
from .base import Optimizer, Params, Schedule
from .owners import assign, on_owners


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz steps, as `torch.optim.Muon` (Jordan et al. 2024).

    It steps parameters of two dims. Of embeddings and the output layer, which are better left to AdamW, make a group with
    "use_muon": False; parameters of another number of dims are left to it without being asked.

    Args:
        params: parameters, plain or DTensor, of any mix of layouts and meshes; or groups, dicts of "params" and any of
            the options below but `adamw` and `schedule`. With "use_muon": False a group has AdamW's options instead.
        lr: learning rate of matrices, before `adjust_lr_fn`.
        weight_decay: each step multiplies matrices by 1 - lr * weight_decay.
        momentum: decay of the running mean of gradients.
        nesterov: looks one step of the momentum ahead.
        ns_coefficients, ns_steps, eps: of the Newton-Schulz iteration; the last is the least norm it divides by.
        adjust_lr_fn: "original" (also None) scales steps by sqrt(max(1, rows / columns)), "match_rms_adamw" by
            0.2 * sqrt(max(rows, columns)), so that AdamW's learning rates fit.
        adamw: options of the AdamW that steps all others: lr, betas, eps, weight_decay.
        schedule: factor of all learning rates by step; see `cosine`.

    The iteration runs in float32 (PyTorch's in bfloat16). Communicates: two exchanges a step and mesh, of the shards of
    matrices that their worker lacks, and of the results.

    Example:
        >>> import mindspore as ms
        >>> from ms_dtensor.optim import Muon
        >>> w = ms.Parameter(ms.Tensor([[1.0, 0.0], [0.0, 1.0]]), name="w")
        >>> b = ms.Parameter(ms.Tensor([1.0, 1.0]), name="b")
        >>> optimizer = Muon([w, b], lr=0.1, weight_decay=0.0, ns_steps=10, adamw={"lr": 0.2, "weight_decay": 0.0})
        >>> optimizer([ms.Tensor([[2.0, 0.0], [0.0, 2.0]]), b])
        >>> [round(v, 1) for v in (*w.asnumpy().reshape(-1).tolist(), *b.asnumpy().tolist())]
        [0.9, 0.0, 0.0, 0.9, 0.8, 0.8]
    """

    _ALONE = False
    _BELOW = {"lr": math.inf, "weight_decay": math.inf, "momentum": 1.0, "eps": math.inf}
    _SCALES = {None: lambda m, n: max(1.0, m / n) ** 0.5, "original": lambda m, n: max(1.0, m / n) ** 0.5,
               "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5}

    def __init__(self, params: Params, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
                 eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: str | None = None, *,
                 adamw: Mapping[str, Any] | None = None, schedule: Schedule | None = None):
        self.adamw = dict(adamw or {})
        super().__init__(params, schedule, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                         ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)
        if adjust_lr_fn not in self._SCALES:
            raise ValueError(f"For 'Muon', 'adjust_lr_fn' = '{adjust_lr_fn}' is none of 'original' and 'match_rms_adamw'.")
        self._inner = []  # (AdamW, its group, indices of its parameters)
        for group in self.groups:
            indices = [i for i, g in enumerate(self._group_of) if g is group and not self._moves(i)]
            if indices:
                self._inner.append((AdamW([self.params[i] for i in indices], **self._adamw_options(group)), group, indices))
        matrices = [i for i in range(len(self.params)) if self._moves(i) and layout_of(self.params[i]) is not None]
        owners = assign([layout_of(self.params[i]) for i in matrices], lambda shape: math.prod(shape) * min(shape))
        self._owners = dict(zip(matrices, owners, strict=True))

    def state_dict(self) -> dict[str, dict[str, Tensor | int]]:
        """As of all optimizers; the parameters of the inner AdamW among the others."""
        out = super().state_dict()
        for inner, _, _ in self._inner:
            out.update(inner.state_dict())
        return out

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes over the values of a `state_dict` of the same parameters in the same layouts."""
        super().load_state_dict(state)
        for inner, _, _ in self._inner:
            inner.step = self.step

    def _moves(self, i):
        shape = self.params[i].shape
        return len(shape) == 2 and math.prod(shape) > 0 and self._group_of[i].get("use_muon", True)

    def _allowed(self, group, options):
        return {"use_muon", *(options if group.get("use_muon", True) else ("lr", "betas", "eps", "weight_decay"))}

    def _adamw_options(self, group) -> dict[str, Any]:
        of_group = {} if group.get("use_muon", True) else group
        return {**self.adamw, **{k: v for k, v in of_group.items() if k not in ("params", "use_muon")}}

    def _new_state(self, i):
        steps = self._option(i, "ns_steps")
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"For 'Muon', 'ns_steps' = {steps} is out of range: a whole number of at least 1.")
        return {"momentum": zeros(self.params[i]._shape, precision(self.params[i]))}

    def _step(self, grads):
        for inner, group, indices in self._inner:
            options = {"lr": 1e-3, **self._adamw_options(group)}
            for name, value in options.items():
                setattr(inner, name, value * self._factor if name == "lr" else value)
            inner([grads.get(i) for i in indices])
        updates = {i: self._momentum(i, grad) for i, grad in grads.items() if self._moves(i)}
        together: dict[tuple, list[int]] = {}
        for i, update in updates.items():
            layout = layout_of(self.params[i])
            if layout is None:
                updates[i] = self._orthogonalized(i, update)
            elif layout.mesh.get_coordinate() is not None:
                together.setdefault((layout.mesh, update.dtype), []).append(i)
        for (mesh, _), indices in together.items():
            items = [(layout_of(self.params[i]), self._owners[i], updates[i]) for i in indices]
            results = on_owners(mesh, items, [partial(self._orthogonalized, i) for i in indices])
            updates.update(zip(indices, results, strict=True))
        for i, update in updates.items():
            lr, scale = self._lr(i), self._SCALES[self._option(i, "adjust_lr_fn")](*self.params[i].shape)
            with opened(self.params[i], self._masters[i]) as weight:
                write(weight, weight * (1.0 - lr * self._option(i, "weight_decay")) - update * (lr * scale))

    def _momentum(self, i: int, grad) -> Array:
        """This rank's shard of what is to be orthogonalised."""
        state, mu, g = self._state[i]["momentum"], self._option(i, "momentum"), values(grad, precision(self.params[i]))
        write(state, state * mu + g * (1.0 - mu))
        return g * (1.0 - mu) + state * mu if self._option(i, "nesterov") else state

    def _orthogonalized(self, i: int, x: Array) -> Array:
        """x with its singular values brought near 1."""
        a, b, c = self._option(i, "ns_coefficients")
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / xp().clip(total(x * x) ** 0.5, self._option(i, "eps"), None)
        for _ in range(self._option(i, "ns_steps")):
            gram = x @ x.T
            x = x * a + (gram * b + (gram @ gram) * c) @ x
        return x.T if tall else x
