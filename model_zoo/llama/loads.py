# SPDX-License-Identifier: Apache-2.0
"""What a run tells of its experts: each one's load, dropped choices, bytes on the way to them, and who gets nothing.

Loads are results of a step, the same on every rank; what is counted here begins anew with a run, and changes none of its
numbers. NumPy only.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .config import Config


class Loads:
    """Loads of the experts, step after step.

    Args:
        cfg: of the run; `cfg.model.experts` is not None.

    Example:
        >>> import numpy as np
        >>> from model_zoo.llama.config import Config, ExpertsConfig, MetricsConfig, ModelConfig, TrainConfig
        >>> from model_zoo.llama.loads import Loads
        >>> cfg = Config(ModelConfig(n_layers=1, experts=ExpertsConfig(3, 1)), train=TrainConfig(batch=1, seq=8),
        ...              metrics=MetricsConfig(idle_expert=2))
        >>> told = Loads(cfg)
        >>> told.step(np.array([[5, 3, 0]]), 8)["dropped"], told.idle()
        (0, [])
        >>> told.step(np.array([[4, 3, 0]]), 8)["dropped"], told.idle()
        (1, ['layer 0: expert 2'])
    """

    def __init__(self, cfg: Config):
        assert cfg.model.experts is not None
        self.experts, self.limit = cfg.model.experts, cfg.metrics.idle_expert
        # over cp alone they go between the same ranks as attention's keys do, which the tally does not tell apart
        self._apart = cfg.parallel.ep == 1 or cfg.parallel.ep_of_dp > 1
        layers = cfg.model.n_layers - self.experts.dense_layers
        self._without = np.zeros((layers, self.experts.count), np.int64)  # steps in a row
        self.dropped = 0
        self.total = np.zeros((layers, self.experts.count), np.int64)

    def step(self, loads: np.ndarray, tokens: int,
             comm: Mapping[tuple[str, tuple[str, ...]], Any] | None = None) -> dict[str, Any]:
        """What the record of a step says: loads [layers, experts], how many choices were dropped, bytes that rank 0
        sent (None: not known).

        Args:
            loads: i64[layers, experts].
            tokens: of the step.
            comm: the tally of the step's collectives, where there is one.
        """
        self._without = np.where(loads > 0, 0, self._without + 1)
        dropped = int(len(loads) * tokens * self.experts.per_token - loads.sum())
        self.dropped += dropped
        self.total = self.total + loads
        sent = None if comm is None or not self._apart else sum(
            line.bytes for (op, axes), line in comm.items() if op == "all_to_all" and "ep" in axes)
        return {"loads": loads.tolist(), "dropped": dropped, "dispatch_bytes": sent}

    def idle(self) -> list[str]:
        """Those that just now have had nothing for as many steps as metrics.idle_expert says."""
        first = self.experts.dense_layers
        return [f"layer {first + layer}: expert {expert}"
                for layer, expert in np.argwhere(self._without == self.limit).tolist()] if self.limit else []

    def summary(self) -> str:
        """Of the run so far, in a line."""
        mean = np.maximum(self.total.mean(1), 1e-30)
        layer = int((self.total.max(1) / mean).argmax())
        share = self.dropped / max(self.dropped + int(self.total.sum()), 1)
        return (f"experts: the most loaded has {self.total[layer].max() / mean[layer]:.2f} of the mean, the least "
                f"{self.total[layer].min() / mean[layer]:.2f}, in layer {self.experts.dense_layers + layer}; "
                f"{share:.1%} of choices dropped")
