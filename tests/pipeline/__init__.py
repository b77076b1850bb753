# SPDX-License-Identifier: Apache-2.0
WORLD = 2  # ranks of a case, see tests/cases.py
