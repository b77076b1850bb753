# SPDX-License-Identifier: Apache-2.0
"""Executable definition of a correct rule; ships with the library, because users who register ops need it."""
from __future__ import annotations

from .check import Report, check_rule

__all__ = ["Report", "check_rule"]
