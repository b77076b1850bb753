# SPDX-License-Identifier: Apache-2.0
"""What a step costs on a machine that is not here: `estimate` one plan, `suggest` the best; from a model's sizes alone.

`hardware.py` reads a machine's figures; `cost.py` gives seconds of one op or collective; `transformer.py` lists a model's
work; `step.py` makes a training step of it; `search.py` compares plans. Pure: no MindSpore, no ranks. What a *program* does,
op by op, a dry run tells instead.
"""
from .cost import Collective, Op, seconds
from .hardware import Hardware, load_hardware
from .search import Suggestion, suggest
from .step import Estimate, estimate
from .transformer import Plan, Transformer

__all__ = ["Collective", "Estimate", "Hardware", "Op", "Plan", "Suggestion", "Transformer", "estimate",
           "load_hardware", "seconds", "suggest"]
