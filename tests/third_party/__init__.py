# SPDX-License-Identifier: Apache-2.0
"""Models of other packages, unedited. At night only, after `pip install '.[third_party]'`: `scripts/test.sh -m night`."""
