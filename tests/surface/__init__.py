# SPDX-License-Identifier: Apache-2.0
"""MindSpore's training surface, row by row: what one device computes, on every kind of mesh."""
