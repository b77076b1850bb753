# SPDX-License-Identifier: Apache-2.0
"""Llama-3: `config` -> `model` -> `parallelize` -> `train`, in reading order."""
