# SPDX-License-Identifier: Apache-2.0
"""A quick slice of the verifier over matmul, convolution, attention and random forms: first arguments, one mesh.

Everything else of them runs in `scripts/verify_rules.py`.
"""
from __future__ import annotations

import pytest

from ms_dtensor.verify import Report
from tests.coverage import forms_attention, forms_conv, forms_matmul, forms_random
from tests.coverage.run import refuses, verify_form

FORMS = [*forms_matmul.FORMS, *forms_conv.FORMS, *forms_attention.FORMS, *forms_random.FORMS]


@pytest.mark.parametrize("form", [pytest.param(f, id=f.name) for f in FORMS[::6] if f.raises is None])
def test_cases_are_right(form):
    report = Report()
    verify_form(form, report, quick=True)
    assert report.compared and not report.wrong, report.wrong[:3]


@pytest.mark.parametrize("form", [pytest.param(f, id=f.name) for f in FORMS if f.raises is not None])
def test_refused(form):
    assert refuses(form) == []
