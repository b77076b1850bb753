# SPDX-License-Identifier: Apache-2.0
"""What only data tell, and a dry run is told or assumes: values that are asked for, experts that are chosen, messages.

The invariant: nothing that has no data has a value in silence; what was assumed is said.
"""
from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np
from mindspore import Tensor

from ...comm.packing import numpy_dtype
from ...comm.record import user_site
from ...dispatch.operands import dtype_name, local_alias
from ...errors import OpRuleError
from ...tensor.dtensor import DTensor
from .abstract import Ledger
from .asked import asked_by_user
from .unknown import Unknown, marked, shows_itself


class Told:
    """Of one dry run.

    Attributes:
        values: what the user says of data, see `dry_run`.
        assumed: what was taken for granted, in words.
        received, messages: of a pipeline's stage before, and for the next one.
        inside: functions under way that nobody sees into, and that run on what is not there.
    """

    ledger: Ledger

    def __init__(self, values: dict[str, Any], messages: dict[str, bytes]):
        self.values, self.assumed = values, dict[str, str]()
        self.received, self.messages = messages, dict[str, bytes]()
        self.inside = 0

    def value(self, x, who: str) -> np.ndarray:
        """What a tensor holds: one of the user's own that is there, else what they say of it.

        Raises:
            OpRuleError: nothing is said of this line.
        """
        if x.__class__ is not Unknown and prod(x._shape) > 1 and any(Tensor.stride(x)):
            return local_alias(x).asnumpy()
        site = user_site()
        place = f"{os.path.basename(site.rpartition(':')[0])}:{site.rpartition(':')[2]}"
        if place not in self.values:
            layout = getattr(x, "_layout", None)
            raise OpRuleError(f"For 'dry_run', '{who}' at {site} asks for a value.",
                              f"{dtype_name(x.dtype)}{list(x._shape)}" if layout is None else layout.describe(),
                              "A dry run has no data.",
                              (f"dry_run(..., values={{{place!r}: 1.0}}), what it is taken to be there",
                               "leave it out of the step that is run dry"))
        return np.asarray(self.values[place])

    def array(self, x, who: str) -> np.ndarray:
        """As `value`, as an array of its shape and dtype."""
        return np.broadcast_to(self.value(x, who), x._shape).astype(numpy_dtype(x.dtype))

    def is_asked(self, x) -> bool:
        """Whether the user asks a plain tensor for a value that it does not have."""
        if self.inside:
            return False
        if self.ledger.has(x):
            return asked_by_user()
        return x.__class__ is Unknown and asked_by_user() and not shows_itself(x)

    def taken_out(self, local: Tensor) -> Tensor:
        """A rank's part, or the whole, as it is handed to the user: a plain tensor, of whose values nobody knows."""
        if self.inside or not self.ledger.has(local) or not asked_by_user():
            return local
        if asked_by_user((DTensor.to_local,)):
            self.assumed[f"to_local at {user_site()}"] = "what is made of it is not seen; it reads as NaN, or is refused"
        return marked(local)

    def choices(self, shape: tuple[int, int]) -> np.ndarray:
        """[n, k]: the experts that this rank's tokens choose; without `values["experts"]` one after another."""
        count = self.values.get("experts")
        if count is None:
            raise OpRuleError(f"For 'dry_run', the choices of experts at {user_site()} are not known.", f"i32{list(shape)}",
                              "A dry run has no data.",
                              ('dry_run(..., values={"experts": 64}), to take them as chosen equally often',
                               'values={"experts": array}, of this rank\'s tokens [n, k]'))
        if not isinstance(count, int):
            return np.asarray(count).reshape(shape)
        self.assumed["experts"] = f"each of {count} is chosen equally often, and alike on all ranks"
        return (np.arange(shape[0] * shape[1]) % count).reshape(shape).astype(np.int32)

    def message(self, name: str) -> bytes:
        """What the stage before says of what it sends."""
        if name not in self.received:
            raise OpRuleError("For 'dry_run', what the stage before sends is not known.", name,
                              "The first message says of which shape and layout the others are.",
                              "with dry_run(..., rank=r, messages=before.messages): where `before` is the dry run of a rank "
                              "of the stage before")
        return self.received[name]
