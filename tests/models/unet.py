# SPDX-License-Identifier: Apache-2.0
"""A small UNet, written as for one device: convolutions, group or batch norm, down, up, skip by concatenation."""
from mindspore import mint, nn, ops


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
