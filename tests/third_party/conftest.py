# SPDX-License-Identifier: Apache-2.0
"""Packages that are no dependencies, unedited, on real ranks: their cases are there where the packages are.

    pip install '.[third_party]'         # mindcv
    pip download --no-deps mindformers==2.1.0 && unzip -d mf mindformers-2.1.0-*.whl && export MINDFORMERS_WHEEL=$PWD/mf
"""
import os
from importlib.util import find_spec

collect_ignore_glob: list[str] = []
if find_spec("mindcv") is None:
    collect_ignore_glob.append("cases_mindcv.py")
if find_spec("mindformers") is None and not os.environ.get("MINDFORMERS_WHEEL"):
    collect_ignore_glob.append("cases_mindformers*.py")


def pytest_report_header() -> list[str]:
    return [f"not here, so not asked: tests/third_party/{name}" for name in collect_ignore_glob]
