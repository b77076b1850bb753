# SPDX-License-Identifier: Apache-2.0
"""GPT-2, written as for one device: learned positions, LayerNorm, fused qkv, GELU, tied head."""
import math

import numpy as np
from mindspore import Tensor, mint, nn, ops


class Attention(nn.Cell):
    def __init__(self, dim: int, heads: int, seq: int):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Dense(dim, 3 * dim)
        self.c_proj = nn.Dense(dim, dim)
        self.attn_dropout, self.resid_dropout = nn.Dropout(p=0.0), nn.Dropout(p=0.0)
        self.register_buffer("future", Tensor(np.triu(np.ones((seq, seq), bool), 1)))

    def construct(self, x):
        b, t, d = x.shape
        q, k, v = ops.split(self.c_attn(x), d, axis=2)
        q, k, v = (a.view(b, t, self.heads, d // self.heads).swapaxes(1, 2) for a in (q, k, v))
        score = ops.matmul(q, k.swapaxes(-1, -2)) / math.sqrt(k.shape[-1])
        score = score.masked_fill(self.future[:t, :t], float("-inf"))
        weight = self.attn_dropout(ops.softmax(score, axis=-1))
        out = ops.matmul(weight, v).swapaxes(1, 2).reshape(b, t, d)
        return self.resid_dropout(self.c_proj(out))


class Block(nn.Cell):
    def __init__(self, dim: int, heads: int, seq: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm((dim,), epsilon=1e-5), nn.LayerNorm((dim,), epsilon=1e-5)
        self.attn = Attention(dim, heads, seq)
        self.c_fc, self.c_proj, self.act = nn.Dense(dim, 4 * dim), nn.Dense(4 * dim, dim), nn.GELU()

    def construct(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.act(self.c_fc(self.ln_2(x))))


class GPT2(nn.Cell):
    """ids i32[b, t], labels i32[b, t] -> mean cross entropy."""

    def __init__(self, vocab: int = 17, seq: int = 6, dim: int = 12, heads: int = 4, layers: int = 2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.drop = nn.Dropout(p=0.0)
        self.h = nn.CellList([Block(dim, heads, seq) for _ in range(layers)])
        self.ln_f = nn.LayerNorm((dim,), epsilon=1e-5)
        self.register_buffer("positions", Tensor(np.arange(seq, dtype=np.int32)))

    def construct(self, ids, labels):
        x = self.drop(self.wte(ids) + self.wpe(self.positions[:ids.shape[1]]))
        for block in self.h:
            x = block(x)
        logits = mint.matmul(self.ln_f(x), self.wte.embedding_table.T)
        return ops.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
