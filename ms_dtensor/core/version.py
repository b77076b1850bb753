# SPDX-License-Identifier: Apache-2.0
"""The version, in one place: setup.py reads this file as text, the package imports it."""

__version__ = "0.1.0"
