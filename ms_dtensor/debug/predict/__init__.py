# SPDX-License-Identifier: Apache-2.0
"""What a step costs on a machine that is not here: `estimate` one plan, `suggest` the best; from a model's sizes alone.

`hardware.py` reads a machine's figures; `cost.py` gives seconds of one op or collective; `transformer.py` lists a model's
work; `step.py` makes a training step of it; `search.py` compares plans. `timeline.py` takes the events of a program instead,
as a dry run records them. Pure: no MindSpore, no ranks.
"""
from .cost import Collective, Op, seconds
from .hardware import Hardware, load_hardware
from .search import Suggestion, suggest
from .step import Estimate, estimate
from .timeline import Timeline, timeline, timelines
from .transformer import Plan, Transformer

__all__ = ["Collective", "Estimate", "Hardware", "Op", "Plan", "Suggestion", "Timeline", "Transformer",
           "estimate", "load_hardware", "seconds", "suggest", "timeline", "timelines"]
