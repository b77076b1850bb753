# SPDX-License-Identifier: Apache-2.0
"""What a case of ranks begins with: a mesh, placements, and tensors of which every rank has the same values."""
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

R, P, S = Replicate(), Partial(), Shard


def mesh_2d():
    """4 ranks as dp=2, tp=2."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def mesh_1d(n: int = 4, name: str = "tp"):
    """All ranks on one axis."""
    return init_device_mesh("cpu", (n,), mesh_dim_names=(name,))


def data(seed: int, *shape: int) -> Tensor:
    """The same asymmetric random tensor on every rank."""
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def placed(x, mesh, *placements) -> DTensor:
    """A tensor or an array, laid out from each rank's own equal copy: nothing is sent."""
    return distribute_tensor(x if isinstance(x, Tensor) else Tensor(np.array(x)), mesh, list(placements), src_data_rank=None)


class Built(nn.Cell):
    """A cell of these parts, cells and parameters by name; `fn` is its construct, and is given the cell."""

    def __init__(self, fn, **parts) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def construct(self, *inputs, **named):
        return self.fn(self, *inputs, **named)


def weight(*shape: int) -> Parameter:
    """A parameter that is still to be filled."""
    return Parameter(Tensor(np.zeros(shape, np.float32)))


def filled(cell: nn.Cell, seed: int = 0) -> nn.Cell:
    """Asymmetric values, the same on every rank; a norm's variances, which are none below nought, stay what they are."""
    for i, p in enumerate(cell.get_parameters()):
        if not p.name.endswith("variance"):
            p.set_data(Tensor(np.random.default_rng(seed + i).normal(0.4, 0.5, p.shape).astype(np.float32)).astype(p.dtype))
    return cell
