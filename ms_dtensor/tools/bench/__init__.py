# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor bench`: what a cluster's links, devices, files and dispatch give, in the columns of the field.

`suites.py` says what is measured, `run.py` starts it, `ranks.py` is what a rank runs. A step of a Llama is measured by the
recipe (`model_zoo/llama/tools/bench_step.py`), which a wheel does not have.
"""
