# SPDX-License-Identifier: Apache-2.0
"""In a dry run results have the shapes and dtypes that kernels give them, of every form of the corpus."""
from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor

import ms_dtensor as md
import ms_dtensor.tools.forms
from ms_dtensor.core.tree import leaves, map_leaves
from ms_dtensor.debug import dry_run
from ms_dtensor.errors import DTensorError
from ms_dtensor.tools.forms.form import Form
from tests.tiers import sampled

pytestmark = pytest.mark.usefixtures("cpu")
FAMILIES = sorted(file.stem for file in Path(ms_dtensor.tools.forms.__file__).parent.glob("forms_*.py"))
NOT_KNOWN = {  # MindSpore's own Python chooses by how it was called, or has no kernel here
    "x.cumsum(axis=) of integers", "auto_generate.grouped_matmul", "auto_generate.grouped_matmul(bias)",
    "auto_generate.GroupedMatmul", "auto_generate.grouped_matmul(list)", "auto_generate.grouped_matmul(list, bias)",
    "auto_generate.GroupedMatmul(list)"}


def results(form: Form, args: tuple, make) -> list[tuple]:
    made = form.fn(*(map_leaves(make, a, np.ndarray) for a in args))
    return [(tuple(x.shape), x.dtype) for x in leaves((made,), Tensor)]


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_what_kernels_say(family):
    """At push every twentieth form; a form whose result only data tell, or that this CPU has no kernel for, is not asked."""
    forms = [f for f in importlib.import_module(f"ms_dtensor.tools.forms.{family}").FORMS if f.raises is None]
    wrong, asked = [], 0
    for form in sampled(forms, 20):
        for args in form.variants()[:2]:
            try:
                want = results(form, args, Tensor)
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):  # MindSpore's own refusals
                continue
            with dry_run(world=1, device="CPU"):
                mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
                try:
                    got = results(form, args, lambda a, mesh=mesh: md.DTensor.from_local(Tensor(a), mesh))
                except DTensorError:
                    continue
            asked += 1
            if got != want and form.name not in NOT_KNOWN:
                wrong.append(f"{form.name}: {got}, with kernels {want}")
    assert not wrong, "\n".join(wrong)
    assert asked or family not in ("forms_arithmetic", "forms_logic", "forms_reduce"), "of some others a CPU has no kernels"
