# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: reading and writing them on any mesh."""
