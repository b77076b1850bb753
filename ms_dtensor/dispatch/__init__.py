# SPDX-License-Identifier: Apache-2.0
"""From an op call to its result: key, cached plan, local op, DTensor. Read `dispatcher.py` first."""
