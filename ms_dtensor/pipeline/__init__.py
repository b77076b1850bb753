# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as values (made, checked, simulated, drawn), and what runs them.

A schedule is one list of actions per rank. What makes it knows its name; whatever takes it (check, simulation, picture,
messages, the run) knows only the lists. Read next: `actions.py`, `builders.py`, `order.py`, which are pure; then what runs,
and loads MindSpore on first use: `split.py` (a model into stages), `stage.py`, `transfer.py`, `schedule.py`. See
docs/pipeline.md.
"""
from importlib import import_module
from typing import TYPE_CHECKING

from .actions import Action, Actions, Overlap
from .builders import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zbv
from .check import Fault, check
from .draw import draw
from .order import Lowered, Recv, Reduce, Send, Slot, Timeline, lower, simulate

if TYPE_CHECKING:
    from .chain import Absent as Absent
    from .microbatches import PerMicrobatch as PerMicrobatch
    from .schedule import Schedule as Schedule
    from .schedule import Schedule1F1B as Schedule1F1B
    from .schedule import ScheduleDualPipeV as ScheduleDualPipeV
    from .schedule import ScheduleGPipe as ScheduleGPipe
    from .schedule import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from .schedule import ScheduleZBH1 as ScheduleZBH1
    from .schedule import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from .split import pipeline as pipeline
    from .stage import PipelineStage as PipelineStage

_RUNS = {"Absent": "chain", "PerMicrobatch": "microbatches", "pipeline": "split", "PipelineStage": "stage",
         "Schedule": "schedule",
         **dict.fromkeys(("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBH1",
                          "ScheduleZBVZeroBubble", "ScheduleDualPipeV"), "schedule")}

__all__ = ["Action", "Actions", "Fault", "Lowered", "Overlap", "Recv", "Reduce", "Send", "Slot", "Timeline", "check", "draw",
           "dualpipe_v", "gpipe", "interleaved", "lower", "one_f_one_b", "simulate", "zb_h1", "zbv", *_RUNS]


def __getattr__(name: str):
    if name not in _RUNS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_RUNS[name]}", __name__), name)
