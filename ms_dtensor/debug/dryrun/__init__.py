# SPDX-License-Identifier: Apache-2.0
"""A step of one rank of any world, in one process and without data: its memory, communication, operations.

`executor.py` answers in the place of kernels, `abstract.py` makes tensors that have a shape and no data and counts their
bytes, `backend.py` is a world of such ranks, `formulas.py` says what ops cost, `run.py` is what users see.
"""
