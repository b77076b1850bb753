# SPDX-License-Identifier: Apache-2.0
"""What a forward writes into parameters in whose place whole tensors stand, `set_data` among it, so that it can be kept."""
from __future__ import annotations

import functools
import weakref

from mindspore import Tensor

from ..comm.packing import write
from ..dispatch.inplace import written_since
from ..dispatch.operands import local_alias
from ..internals.names import NoFallbackGuard, no_grad
from ..tensor.dtensor import DTensorParameter


class Written:
    """Watches the whole tensors of a unit, given by id of the parameter, which get a parameter's `set_data`.

    A parameter that is in its own place needs none of this.
    """

    def __init__(self, whole: dict[int, Tensor]):
        self._whole = {k: x for k, x in whole.items() if not isinstance(x, DTensorParameter)}
        self._given = set[int]()
        self._versions = {k: x._version for k, x in self._whole.items()}
        for k, x in self._whole.items():
            x.set_data = x.assign_value = functools.partial(self._take, k, weakref.ref(x))

    def _take(self, k: int, ref, data, slice_shape: bool = False):
        x = ref()
        value = DTensorParameter._own_shard(x, "set_data", data)
        with no_grad(), NoFallbackGuard():  # an array of what may be a view would be a copy
            local_alias(x).copy_(local_alias(value).astype(x.dtype))
        self._given.add(k)
        return x

    def keep(self, blocks, place: dict[int, tuple[int, int]]) -> None:
        """Other values reach the shards; `place` says in which block a parameter is, and where."""
        for k, x in self._whole.items():
            if not written_since(x, self._versions[k]) and k not in self._given:
                continue
            if k in place:
                blocks[place[k][0]].write_own(place[k][1])
            else:
                write(local_alias(x.inited_param), local_alias(x))
