# SPDX-License-Identifier: Apache-2.0
"""A vision transformer, written as for one device: convolution into patches, class token, pre-norm blocks, pooling."""
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops


class Attention(nn.Cell):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Dense(dim, 3 * dim), nn.Dense(dim, dim)

    def construct(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weight = ((q * self.scale) @ k.swapaxes(-2, -1)).softmax(-1)
        return self.proj((weight @ v).swapaxes(1, 2).reshape(b, t, d))


class Block(nn.Cell):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((dim,), epsilon=1e-6), nn.LayerNorm((dim,), epsilon=1e-6)
        self.attn = Attention(dim, heads)
        self.mlp = nn.SequentialCell(nn.Dense(dim, hidden), nn.GELU(approximate=False), nn.Dense(hidden, dim))

    def construct(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Cell):
    """images f32[b, 3, size, size], labels i32[b] -> mean cross entropy with label smoothing 0."""

    def __init__(self, size: int = 8, patch: int = 4, dim: int = 12, heads: int = 2, hidden: int = 22, layers: int = 2,
                 classes: int = 7, pool: str = "cls"):
        super().__init__()
        patches = (size // patch) ** 2
        self.patch_embed = nn.Conv2d(3, dim, patch, stride=patch, pad_mode="valid", has_bias=True)
        self.cls_token = Parameter(Tensor(np.zeros((1, 1, dim), np.float32)), name="cls_token")
        self.pos_embed = Parameter(Tensor(np.zeros((1, patches + 1, dim), np.float32)), name="pos_embed")
        self.blocks = nn.SequentialCell(*[Block(dim, heads, hidden) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((dim,), epsilon=1e-6), nn.Dense(dim, classes)
        self.pool = pool

    def construct(self, images, labels):
        x = self.patch_embed(images).flatten(start_dim=2).swapaxes(1, 2)
        cls = self.cls_token.broadcast_to((x.shape[0], -1, -1))
        x = mint.cat((cls, x), dim=1) + self.pos_embed
        x = self.norm(self.blocks(x))
        x = x[:, 0] if self.pool == "cls" else x[:, 1:].mean(1)
        return ops.cross_entropy(self.head(x), labels)
