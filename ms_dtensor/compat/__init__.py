# SPDX-License-Identifier: Apache-2.0
"""Other libraries' names for what is here. Nothing imports this package otherwise."""
