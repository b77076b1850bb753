# SPDX-License-Identifier: Apache-2.0
"""A quick slice of the verifier over views, indexing and writes: first arguments, one mesh.

Everything else of them runs in `scripts/verify_rules.py`; real ranks in `tests/dist/cases_bypass.py`.
"""
from __future__ import annotations

import pytest

from ms_dtensor.verify import Report
from tests.coverage import forms_index, forms_view, forms_write
from tests.coverage.run import refuses, verify_form

FORMS = [*forms_view.FORMS, *forms_index.FORMS, *forms_write.FORMS]


@pytest.mark.parametrize("form", [pytest.param(f, id=f.name) for f in FORMS[::5] if f.raises is None])
def test_cases_are_right(cpu, form):
    report = Report()
    verify_form(form, report, quick=True)
    assert report.compared and not report.wrong, report.wrong[:3]


@pytest.mark.parametrize("form", [pytest.param(f, id=f.name) for f in FORMS if f.raises is not None])
def test_refused(cpu, form):
    assert refuses(form) == []
