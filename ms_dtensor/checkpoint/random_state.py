# SPDX-License-Identifier: Apache-2.0
"""Where the streams of random numbers are, as a thing to save: this library's, MindSpore's and NumPy's global one."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np

from ..ops.rng import get_rng_state, set_rng_state


class RandomState:
    """Stands in a state for the random streams: they are read when it is saved, and set when it is loaded.

    Every rank has the same ones; a job that seeds MindSpore or NumPy by rank has no such state, and is told so.

    Example:
        >>> import tempfile, numpy as np, ms_dtensor as md
        >>> state = {"random": md.checkpoint.RandomState()}
        >>> folder = tempfile.mkdtemp() + "/one"
        >>> md.checkpoint.save(state, folder)
        >>> number = np.random.random()
        >>> _ = md.checkpoint.load(state, folder)
        >>> number == np.random.random()
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """The streams' states."""
        _, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
        return {"ms_dtensor": get_rng_state(), "mindspore": ms.get_rng_state(),
                "numpy": {"keys": np.array(keys), "at": at, "has_gauss": has_gauss, "gauss": gauss}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from such a state."""
        set_rng_state(state["ms_dtensor"])
        ms.set_rng_state(state["mindspore"])
        held = state["numpy"]
        np.random.set_state(("MT19937", held["keys"], held["at"], held["has_gauss"], held["gauss"]))
