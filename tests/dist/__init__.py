# SPDX-License-Identifier: Apache-2.0
WORLD = 4  # ranks of a case, which is each function of `world` alone in the files `cases_*` here; see tests/cases.py
