# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved on any mesh, loaded on any other, whole or not at all. See docs/checkpoints.md.

A checkpoint is a folder of safetensors files, one a rank, and an index. Names load on first use: index, plan, folders and
files need no MindSpore. Read next: `saving.py`, `loading.py`, `index.py`.
"""
from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .background import AsyncSave as AsyncSave
    from .background import wait as wait
    from .callback import CheckpointCallback as CheckpointCallback
    from .checkpointer import Checkpointer as Checkpointer
    from .converting import convert as convert
    from .folder import latest as latest
    from .hf import load_hf as load_hf
    from .hf import save_hf as save_hf
    from .loading import Loaded as Loaded
    from .loading import load as load
    from .random_state import RandomState as RandomState
    from .saving import save as save
    from .verifying import verify as verify

_HOME = {"AsyncSave": "background", "wait": "background", "latest": "folder", "Loaded": "loading", "load": "loading",
         "save": "saving", "RandomState": "random_state", "verify": "verifying", "convert": "converting", "load_hf": "hf",
         "save_hf": "hf", "Checkpointer": "checkpointer", "CheckpointCallback": "callback"}
__all__ = list(_HOME)

if not TYPE_CHECKING:
    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        return value

    def __dir__():
        return sorted(__all__)
