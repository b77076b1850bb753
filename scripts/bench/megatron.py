# SPDX-License-Identifier: Apache-2.0
"""The yardstick: the model zoo's Llama on two ranks as one would write it by hand, in plain MindSpore.

No DTensor here: parameters are cut with NumPy, the collectives of Megatron (f and g) stand where they belong, and the
vocabulary-parallel loss is spelled out. Same kernels, same collectives, same optimizer as the library's version.
"""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops
from mindspore.common._grad_function import _Function

from model_zoo.llama.at_once import compile_products
from model_zoo.llama.cpu import compile_attention
from model_zoo.llama.model import Llama, cross_entropy, init_weights
from ms_dtensor.optim import AdamW

GROUP = None  # the ranks; set by `Step`


class Enter(_Function):
    """f: identity; the gradient is summed."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return GROUP.all_reduce(grad, "sum")


class Leave(_Function):
    """g: sum; identity for the gradient."""

    @staticmethod
    def forward(ctx, x):
        return GROUP.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, grad):
        return grad


def _cut(param: Parameter, dim: int, rank: int, size: int) -> Parameter:
    piece = np.split(param.asnumpy(), size, dim)[rank].copy()
    return Parameter(Tensor(piece), name=param.name)


def _cut_model(model: Llama, rank: int, size: int) -> None:
    model.tok_embeddings._params["weight"] = _cut(model.tok_embeddings.weight, 0, rank, size)
    model.output._params["weight"] = _cut(model.output.weight, 0, rank, size)
    for layer in model.layers:
        attention, ffn = layer.attention, layer.feed_forward
        attention.heads //= size
        attention.kv_heads //= size
        for cell, dim in ((attention.wq, 0), (attention.wk, 0), (attention.wv, 0), (attention.wo, 1), (ffn.w1, 0),
                          (ffn.w3, 0), (ffn.w2, 1)):
            cell._params["weight"] = _cut(cell.weight, dim, rank, size)


class Step:
    """Forward, backward and update of one rank.

    Args:
        cfg: configuration; its degrees say "tp" or "dp".
        group: both ranks.
        rank: this one.
    """

    def __init__(self, cfg, group, rank: int):
        global GROUP
        GROUP = group
        self.cfg, self.rank, self.size = cfg, rank, len(group.ranks)
        self.model = Llama(cfg.model)
        init_weights(self.model, cfg.train.seed)
        if cfg.train.compile:
            compile_attention(self.model, cfg.model)
        self.tensor_parallel = cfg.parallel.tp > 1
        if cfg.train.compile and not self.tensor_parallel:
            compile_products(self.model)
        if self.tensor_parallel:
            _cut_model(self.model, rank, self.size)
        self.params = tuple(self.model.trainable_params())
        o = cfg.optim
        self.optimizer = AdamW(self.params, o.lr, o.betas, o.eps, o.weight_decay)
        self.run = ms.value_and_grad(self._tensor_parallel_loss if self.tensor_parallel else self._local_loss, None,
                                     self.params)

    def _local_loss(self, ids, labels):
        return cross_entropy(self.model(ids), labels) / self.size

    def _tensor_parallel_loss(self, ids, labels):
        model, rows = self.model, self.model.tok_embeddings.weight.shape[0]
        local = ids.reshape(-1) - self.rank * rows
        mine = mint.logical_and(local >= 0, local < rows)
        x = ops.gather(model.tok_embeddings.weight, local * mine.astype(local.dtype), 0)
        x = Leave.apply(x * mint.unsqueeze(mine.astype(x.dtype), -1))
        for layer in model.layers:
            x = x + Leave.apply(layer.attention(Enter.apply(layer.attention_norm(x)), ids.shape[1]))
            x = x + Leave.apply(layer.feed_forward(Enter.apply(layer.ffn_norm(x))))
        logits = model.output(Enter.apply(model.norm(x)))
        labels = labels.reshape(-1) - self.rank * rows
        mine = mint.unsqueeze(mint.logical_and(labels >= 0, labels < rows), -1)
        top = GROUP.all_reduce(mint.max(ops.stop_gradient(logits), -1, True)[0], "max")
        shifted = logits - ops.tile(top, (1, rows))
        picked = mint.gather(shifted, 1, mint.unsqueeze(labels, -1) * mine.astype(labels.dtype))
        sums = Leave.apply(mint.cat([mint.exp(shifted).sum(-1, keepdim=True), picked * mine.astype(picked.dtype)], -1))
        return (mint.log(sums[:, 0]) - sums[:, 1]).mean()

    def step(self, ids: np.ndarray, labels: np.ndarray) -> float:
        """One step on a global batch; returns the loss."""
        if not self.tensor_parallel:
            each = len(ids) // self.size
            mine = slice(self.rank * each, (self.rank + 1) * each)
            ids, labels = ids[mine], labels[mine]
        loss, grads = self.run(Tensor(ids), Tensor(labels))
        if not self.tensor_parallel:
            flat = GROUP.all_reduce(mint.cat([g.reshape(-1) for g in grads]), "sum")
            grads = [piece.reshape(g.shape) for piece, g in zip(mint.split(flat, [g.size for g in grads]), grads)]
            loss = GROUP.all_reduce(loss, "sum")
        self.optimizer(grads)
        return float(loss)
