# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as values: made, checked, simulated, drawn. Pure: no MindSpore, no ranks; nothing here runs one.

A schedule is one list of actions per rank. What makes it knows its name; whatever takes it (check, simulation, picture,
messages) knows only the lists. Read next: `actions.py`, then `builders.py`, `order.py`. See docs/pipeline.md.
"""
from .actions import Action, Actions, Overlap
from .builders import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zbv
from .check import Fault, check
from .draw import draw
from .order import Lowered, Recv, Reduce, Send, Slot, Timeline, lower, simulate

__all__ = ["Action", "Actions", "Fault", "Lowered", "Overlap", "Recv", "Reduce", "Send", "Slot", "Timeline", "check", "draw",
           "dualpipe_v", "gpipe", "interleaved", "lower", "one_f_one_b", "simulate", "zb_h1", "zbv"]
