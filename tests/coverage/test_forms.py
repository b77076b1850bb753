# SPDX-License-Identifier: Apache-2.0
"""A fixed slice of the verifier's corpus, every family in it: every eighth form with its first arguments on one mesh.

Everything, with all arguments and meshes of two axes, runs in `python -m ms_dtensor verify`.
Forms that must be refused all run.
"""
import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from ms_dtensor.core.tree import map_leaves
from ms_dtensor.debug.verify import Report, check_rule
from ms_dtensor.debug.verify.alike import check_alike
from ms_dtensor.ops.local import LOCAL_OPS
from ms_dtensor.ops.rules import RULES, LocalCall
from ms_dtensor.ops.rules.pointwise import pointwise
from ms_dtensor.tools import forms
from ms_dtensor.tools.forms.run import refuses, verify_form
from ms_dtensor.tools.verify import corpus
from tests.msrun import python
from tests.tiers import sampled

FAMILIES = sorted(path.stem for path in Path(forms.__file__).parent.glob("forms_*.py"))
FORMS = {family: importlib.import_module(f"ms_dtensor.tools.forms.{family}").FORMS for family in FAMILIES}
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


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_without_elements_see_what_the_others_see(cpu, family):
    """Structure, dtypes, layouts, nodes, errors, collectives do not depend on what a shard holds; at push one in eight."""
    wrong = []
    for form in sampled([f for f in FORMS[family] if f.raises is None and not f.travels], 8):
        for args in form.variants()[:2]:
            wrong += [f"{form.name}: {text}" for text in check_alike(form.fn, map_leaves(Tensor, args, np.ndarray), {})]
    assert not wrong, "\n".join(wrong)


def test_gradients_of_averages_are_compared(cpu, monkeypatch):
    monkeypatch.setitem(LOCAL_OPS, "detached", lambda x: mint.neg(ops.stop_gradient(x)))

    def rule(call):
        spec = pointwise(call)
        average = tuple(c for c in spec.cases if c.ins[0].is_partial("avg"))
        return replace(spec, cases=average, local=lambda at: LocalCall("detached", call.operands) if at.ins[0].partial_axes
                       else None)
    monkeypatch.setitem(RULES, "neg", rule)
    report = check_rule(mint.neg, np.random.default_rng(0).normal(size=(4, 2)).astype("f"), axes=((2,),), alike=False)
    assert report.wrong and "gradient of operand 0" in report.wrong[0]


def test_a_function_is_asked_alone_and_a_part_of_a_name_by_all_that_have_it():
    def names(text):
        return {form.name for _, form in corpus(name=text)}
    assert names("ops.add") == {"ops.add", "ops.add(x, 2)"}
    assert {"ops.addcmul", "mint.addcmul", "mint.addcmul(value)"} <= names("addcm") and not names("no such name")


@pytest.mark.timeout(300)
def test_every_planted_fault_is_caught():
    done = python("scripts/mutate_rules.py")
    result = json.loads(done.stdout[done.stdout.index("{"):])
    assert result["planted"] >= 40 and not result["survived"], result
