# SPDX-License-Identifier: Apache-2.0
"""What hyper_parallel's code asks of the framework below it: ranks, groups, collectives that autograd goes through."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from ... import comm
from ...comm.local_autograd import AllReduce, AllToAll
from ...comm.world import named_group, of_name
from ...errors import ConfigError, LayoutError


class Platform:
    """What hyper_parallel's code asks of the framework below it. What is not here raises when it is used.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import get_platform
        >>> get_platform().get_rank(), get_platform().get_world_size()
        (0, 1)
    """

    Tensor, Parameter, Module = ms.Tensor, ms.Parameter, nn.Cell

    def get_rank(self) -> int:
        """Global rank of this process; 0 before the process group runs."""
        world = comm.current_world()
        return 0 if world is None else world.rank

    def get_world_size(self) -> int:
        """Number of ranks; 1 before the process group runs."""
        world = comm.current_world()
        return 1 if world is None else world.size

    def create_group(self, rank_list: Sequence[int]) -> comm.Group:
        """The group of these ranks, which is the name of MindSpore's communicator, too."""
        return named_group(tuple(rank_list))

    def broadcast(self, x, src: int) -> None:
        """Gives `x`, a plain tensor or parameter, the values of rank `src`, on all ranks."""
        _check_plain("broadcast", x, "Its ranks agree already.", "distribute_tensor(t, mesh, placements)")
        if self.get_world_size() > 1:
            x.set_data(self.create_group(range(self.get_world_size())).broadcast(x, src))

    def all_gather_object(self, object_list: list, obj: Any, group: Any = None) -> None:
        """Fills `object_list` with the members' plain values, in group order."""
        found = of_name(group).all_gather_object(obj)
        if len(object_list) != len(found):
            raise ConfigError("For 'all_gather_object', the list does not have one place for each member.",
                              f"{len(object_list)} places, {len(found)} members", "", f"[None] * {len(found)}")
        object_list[:] = found

    def differentiable_all_reduce(self, x: ms.Tensor, op: str = "sum", group: Any = None) -> ms.Tensor:
        """All ranks' reduction of a plain tensor; its gradient is the all-reduce of the ranks' gradients.

        Args:
            x: this rank's.
            op: "sum" or "avg"; "max", "min" and "prod" where no gradient is asked for.
            group: a group, its name, or None for all ranks.
        """
        _check_plain("differentiable_all_reduce", x, "It is reduced by where it lies.", "x.redistribute(...)")
        return AllReduce.apply(x, of_name(group), op)

    def differentiable_all_to_all_single_async(self, x: ms.Tensor, input_splits: Sequence[int], output_splits: Sequence[int],
                                               group: Any = None) -> ms.Tensor:
        """Elements of dim 0 to each member and from each; its gradient goes the other way.

        Where collectives run beside computation, on a device, this returns once it has been issued.

        Args:
            x: this rank's.
            input_splits: how much of dim 0 goes to each member.
            output_splits: how much comes from each.
            group: a group, its name, or None for all ranks.
        """
        _check_plain("differentiable_all_to_all_single_async", x, "Its pieces are where its layout says.",
                     "x.redistribute(...)")
        return AllToAll.apply(x, of_name(group), list(input_splits), list(output_splits))

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        raise ConfigError(f"For 'get_platform', '{name}' is not offered.", "hyper_parallel.platform",
                          "ms_dtensor stands in for hyper_parallel here, and has no equal of it.",
                          ("comm.group(ranks) and its collectives", "mindspore.ops.communication"))


def _check_plain(who: str, x, rule: str, fix: str) -> None:
    if getattr(x, "_layout", None) is not None:
        raise LayoutError(f"For '{who}', a DTensor was given.", x._layout.describe(), rule, fix)


_platform = Platform()


def get_platform() -> Platform:
    """The framework below: MindSpore.

    Example:
        >>> import mindspore as ms, ms_dtensor as md
        >>> from ms_dtensor.compat.hyper_parallel import get_platform
        >>> mesh = md.init_device_mesh("cpu", (1,))
        >>> get_platform().differentiable_all_reduce(ms.Tensor([1.0, 2.0]), "sum", mesh.get_group()).asnumpy()
        array([1., 2.], dtype=float32)
    """
    return _platform
