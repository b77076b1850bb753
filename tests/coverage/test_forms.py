# SPDX-License-Identifier: Apache-2.0
"""A fixed slice of the verifier's corpus, every family in it: every eighth form with its first arguments on one mesh.

Everything, with all arguments and meshes of two axes, runs in `scripts/verify_rules.py`. Forms that must be refused all run.
"""
from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ms_dtensor.debug.verify import Report
from tests.coverage.run import refuses, verify_form

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("forms_*.py"))
FORMS = {family: importlib.import_module(f"tests.coverage.{family}").FORMS for family in FAMILIES}
SLICE = [pytest.param(f, id=f"{family}: {f.name}") for family in FAMILIES
         for f in [f for f in FORMS[family] if f.raises is None][::8]]
REFUSED = [pytest.param(f, id=f"{family}: {f.name}") for family in FAMILIES for f in FORMS[family] if f.raises is not None]


@pytest.mark.parametrize("form", SLICE)
def test_cases_are_right(cpu, form):
    report = Report()
    verify_form(form, report, quick=True)
    assert report.compared and not report.wrong, report.wrong[:3]


@pytest.mark.parametrize("form", REFUSED)
def test_refused(cpu, form):
    assert refuses(form) == []
