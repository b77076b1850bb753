# SPDX-License-Identifier: Apache-2.0
"""The device's branch of the library on a machine without one: communication emulated strictly, kernels stood in for.

`tables.py` what the vendors' documents allow; `emulator.py` MindSpore's communication over another backend; `kernels.py`
what the branch needs of kernels, and the counts; `watch.py` who touches what is on its way; `session.py` enters it all.
"""
