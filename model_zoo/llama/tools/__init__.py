# SPDX-License-Identifier: Apache-2.0
"""What shows that the recipe is right: losses beside PyTorch's and other layouts', bfloat16, n-grams."""
