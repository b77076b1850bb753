# SPDX-License-Identifier: Apache-2.0
"""Models for images, written as for one device: a vision transformer (convolution into patches, class token, pre-norm
blocks) and a small UNet (convolutions, group or batch norm, down, up, skip by concatenation).
"""
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


class ConvBlock(nn.Cell):
    def __init__(self, cin: int, cout: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, pad_mode="pad", padding=1, has_bias=True)
        self.conv2 = nn.Conv2d(cout, cout, 3, pad_mode="pad", padding=1, has_bias=False)
        self.norm1, self.norm2 = (nn.GroupNorm(2, cout) if norm == "group" else nn.BatchNorm2d(cout) for _ in range(2))
        self.act = nn.SiLU()

    def construct(self, x):
        return self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class UNet(nn.Cell):
    """x f32[b, 3, h, w], target f32[b, 2, h, w] -> mean squared error."""

    def __init__(self, width: int = 4, norm: str = "group", down: str = "conv"):
        super().__init__()
        self.enter, self.middle = ConvBlock(3, width, norm), ConvBlock(width, 2 * width, norm)
        self.down = nn.Conv2d(width, width, 3, stride=2, pad_mode="pad", padding=1) if down == "conv" else \
            nn.MaxPool2d(kernel_size=2, stride=2)
        self.up_conv = nn.Conv2d(2 * width, width, 1, has_bias=True)
        self.leave, self.out = ConvBlock(2 * width, width, norm), nn.Conv2d(width, 2, 1, has_bias=True)

    def construct(self, x, target):
        skip = self.enter(x)
        x = self.middle(self.down(skip))
        x = self.up_conv(mint.nn.functional.interpolate(x, size=skip.shape[2:], mode="nearest"))
        x = self.leave(ops.cat((x, skip), axis=1))
        return ops.mse_loss(self.out(x), target)
