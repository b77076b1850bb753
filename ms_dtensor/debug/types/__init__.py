# SPDX-License-Identifier: Apache-2.0
"""Local code whose tensors know what the ranks' values mean together: checked by types, before a step (SPMD types).

The table is `ops/rules/spmd.py`; `typed.py` is the tensor that asks it, `account.py` what a check knows and how it
refuses, `doors.py` what MindSpore runs without asking a tensor, `moves.py` the moves from one type to another.
"""
