# SPDX-License-Identifier: Apache-2.0
"""LoRA: frozen matrices with trained adapters beside them, y = W x + alpha / rank * B A x, as plain cells for one device.

Not here: anything parallel; `parallelize.py` cuts A and B as it cuts W. An adapted matrix keeps its name, so published
weights load into it and checkpoints of the whole model do. `merge` makes ordinary matrices again.
"""
from __future__ import annotations

import zlib

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_dtensor import DTensor

from .config import LoraConfig

ATTENTION, REST = ("wq", "wk", "wv", "wo"), ("w1", "w2", "w3")


class Adapted(nn.Dense):
    """A linear layer with its two adapters."""

    def __init__(self, base: nn.Dense, cfg: LoraConfig):
        super().__init__(base.in_channels, base.out_channels, has_bias=base.has_bias, weight_init="zeros", bias_init="zeros")
        self.weight = base.weight
        if base.has_bias:
            self.bias = base.bias
        self.lora_a = nn.Dense(base.in_channels, cfg.rank, has_bias=False, weight_init="zeros")
        self.lora_b = nn.Dense(cfg.rank, base.out_channels, has_bias=False, weight_init="zeros")
        self.scale = cfg.alpha / cfg.rank

    def construct(self, x):
        return super().construct(x) + self.lora_b(self.lora_a(x)) * self.scale


def adapted(model: nn.Cell):
    """Name and cell of each adapted matrix."""
    return [(name, cell) for name, cell in model.cells_and_names() if isinstance(cell, Adapted)]


def add(model: nn.Cell, cfg: LoraConfig, seed: int) -> None:
    """Freezes a Llama and puts adapters beside its matrices; before `parallelize`. It computes what it did before."""
    for param in model.get_parameters():
        param.requires_grad = False
    for layer in model.layers:
        for cell in (layer.attention, *([layer.feed_forward] if cfg.where == "all" and not layer.mixed else [])):
            for name in (*ATTENTION, *REST):
                if name in cell._cells:
                    setattr(cell, name, Adapted(cell._cells[name], cfg))
    for name, cell in adapted(model):
        for part in ("lora_a", "lora_b"):
            param = getattr(cell, part).weight
            param.name = f"{name}.{part}.weight"
        stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
        a = cell.lora_a.weight
        a.set_data(Tensor(stream.uniform(-1, 1, a.shape).astype(np.float32) * np.float32(a.shape[1] ** -0.5)))


class without_adapters:  # noqa: N801  a context manager
    """Inside, the parameters of a model, or of its stages, are those that it had before `add`."""

    def __init__(self, *models: nn.Cell):
        self._cells = [cell for model in models for _, cell in adapted(model)]

    def __enter__(self):
        self._kept = [(cell, {part: cell._cells.pop(part) for part in ("lora_a", "lora_b")}) for cell in self._cells]

    def __exit__(self, *error):
        for cell, parts in self._kept:
            cell._cells.update(parts)


def merge(model: nn.Cell) -> None:
    """Each W becomes W + alpha / rank * B A, in its layout, and the adapters become zeros: save it `without_adapters`."""
    for _, cell in adapted(model):
        w, a, b = cell.weight, cell.lora_a.weight, cell.lora_b.weight
        change = mint.matmul(b, a) * cell.scale
        if isinstance(w, DTensor):
            change = change.redistribute(w.device_mesh, w.placements)
        _set(w, w + change.astype(w.dtype))
        _set(b, b * 0)


def _set(param: Parameter, value: Tensor) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    param.set_data(ms.Tensor(local.asnumpy()).astype(param.dtype))
