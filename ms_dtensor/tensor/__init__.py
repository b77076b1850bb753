# SPDX-License-Identifier: Apache-2.0
"""The surface: the DTensor class, its indexing, factories and initialisers. Read `dtensor.py` first."""
