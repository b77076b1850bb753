# SPDX-License-Identifier: Apache-2.0
"""All of MindSpore that is not its public API: its private names, and probes that they behave as this library relies on."""
