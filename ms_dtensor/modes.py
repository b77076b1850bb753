# SPDX-License-Identifier: Apache-2.0
"""Modes of dispatch, one contextvar: skip dispatch, let plain tensors in, what to do about implicit communication.

All are context managers, re-entrant, nestable in any order and per thread, because a mode is an immutable value that
each block replaces and restores. Not here: what the modes do (`dispatch.py`).
"""
from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from .errors import ConfigError

POLICIES = ("auto", "warn", "explicit")


class Mode(NamedTuple):
    """The modes in force."""

    skip: bool = False
    no_skip: frozenset[str] = frozenset()
    implicit_replication: bool = False
    policy: str = "auto"


DEFAULT = Mode()
mode: ContextVar[Mode] = ContextVar("ms_dtensor_mode", default=DEFAULT)


@contextmanager
def _replaced(**fields):
    token = mode.set(mode.get()._replace(**fields))
    try:
        yield
    finally:
        mode.reset(token)


def implicit_replication():
    """Inside, plain tensors mix with DTensors as if replicated on the DTensor's mesh.

    Meaning as `torch.distributed.tensor.experimental.implicit_replication`, but per thread. The caller vouches that
    every rank passes the same values; their gradients are reduced accordingly.
    """
    return _replaced(implicit_replication=True)


def redistribution_policy(policy: str):
    """What an op does that needs its operands moved: "auto" records, "warn" warns, "explicit" refuses.

    Args:
        policy: "auto", "warn" (once per call site) or "explicit" (raises `ImplicitCommError` that names the
            `redistribute()` call to insert).

    Raises:
        ConfigError: another name.
    """
    if policy not in POLICIES:
        raise ConfigError(f"For 'redistribution_policy', 'policy' must be one of {POLICIES}, but got {policy!r}.")
    return _replaced(policy=policy)


class SkipDTensorDispatch:
    """Inside, ops see the local tensors: results are plain and nothing is communicated.

    Args:
        no_skip: ops (callables or public names) that are still dispatched.
    """

    def __init__(self, no_skip=None):
        names = (getattr(op, "__name__", op) for op in no_skip or ())
        self._no_skip = frozenset(str(n) for n in names)
        self._tokens: list = []

    def __enter__(self):
        self._tokens.append(mode.set(mode.get()._replace(skip=True, no_skip=self._no_skip)))
        return self

    def __exit__(self, *exc):
        mode.reset(self._tokens.pop())
