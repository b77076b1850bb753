# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: the only package that touches MindSpore's communication.

Not a public toolbox for models; the layers above use `Group` and nothing else. Importing it does no work and imports no
MindSpore. The invariant: every communication of the library passes one `Group` method, hence one recorder.
Read next: `protocol.py`, `group.py`, `shm/engine.py`.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from .group import Group
from .protocol import REDUCE_OPS, Backend, Work
from .record import CommEvent, annotate, record, user_site
from .registry import register_backend
from .world import World, current_world, fake_world, get_backend, group, set_cpu_backend, shutdown, start, world_key

if TYPE_CHECKING:
    from .mindspore_calls import MindSporeCollectives



def mindspore_collectives() -> MindSporeCollectives:
    """See `mindspore_calls.mindspore_collectives`, which imports MindSpore; this does not."""
    from .mindspore_calls import mindspore_collectives as begin
    return begin()


__all__ = ["REDUCE_OPS", "Backend", "CommEvent", "Group", "Work", "World", "annotate", "current_world", "fake_world",
           "get_backend", "group", "mindspore_collectives", "record", "register_backend", "set_cpu_backend", "shutdown",
           "start", "user_site", "world_key"]
