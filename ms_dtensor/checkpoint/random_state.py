# SPDX-License-Identifier: Apache-2.0
"""Where the streams of random numbers are, as a thing to save: this library's, MindSpore's and NumPy's global one."""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np

from ..errors import CheckpointError
from ..internals.names import seeds
from ..ops.rng import get_rng_state, set_rng_state

DIFFER = "ms.set_seed(n) on all ranks, before anything is drawn: it seeds NumPy's stream, too; or np.random.seed(n)"


class RandomState:
    """Stands in a state for the random streams: they are read when it is saved, and set when it is loaded.

    The streams are this library's (DTensors), NumPy's global one, and MindSpore's: its generator (`mint`), and the seeds
    from which `ops.randn`, `ops.dropout` and their like take numbers of plain tensors. There are such seeds only after
    `ms.set_seed`; without it MindSpore asks the system for each draw, and nothing can go on. Nor can the streams of plain
    `nn.Dropout` and of primitives (`ops.Dropout`), which are in MindSpore's kernels and cannot be read.

    Every rank has the same streams. NumPy's differs between processes unless it is seeded: call `ms.set_seed(n)`, which
    seeds it, or `np.random.seed(n)`, with one n on all ranks; a save where they differ is refused.

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
        drawn = sorted([name, seed, at] for (name, seed), at in seeds._KERNEL_SEED.items())
        return {"ms_dtensor": get_rng_state(), "mindspore": ms.get_rng_state(),
                "seeds": json.dumps({"global": ms.get_seed(), "drawn": drawn}),
                "numpy": {"keys": np.array(keys), "at": at, "has_gauss": has_gauss, "gauss": gauss}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from such a state."""
        try:
            told = json.loads(state["seeds"])
            first, drawn = told["global"], {(str(name), int(seed)): int(at) for name, seed, at in told["drawn"]}
            first = None if first is None else int(first)
        except (TypeError, ValueError, KeyError, RecursionError) as e:
            raise CheckpointError(f"For 'RandomState', the seeds are {str(state.get('seeds'))[:80]!r}.", str(e)) from e
        seeds._GLOBAL_SEED = first
        seeds._KERNEL_SEED.clear()
        seeds._KERNEL_SEED.update(drawn)
        set_rng_state(state["ms_dtensor"])
        ms.set_rng_state(state["mindspore"])
        held = state["numpy"]
        np.random.set_state(("MT19937", held["keys"], held["at"], held["has_gauss"], held["gauss"]))
