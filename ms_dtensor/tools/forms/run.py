# SPDX-License-Identifier: Apache-2.0
"""Runs one form of the corpus: verifies its rules, or shows that a DTensor call of it is refused.

Shared by `python -m ms_dtensor verify` (everything) and the tests of each family (a slice).
"""
from __future__ import annotations

import traceback

import numpy as np
from mindspore import Tensor

from ...core.layout import Layout
from ...core.mesh import DeviceMesh
from ...core.placements import Shard
from ...debug.verify import Report, check_rule
from ...dispatch import patches
from ...dispatch.operands import wrap
from ...tensor.dtensor import DTensor
from .form import Form

ONE_AXIS = ((2,), (3,))
TWO_AXES = (*ONE_AXIS, (2, 2))


def verify_form(form: Form, report: Report, missed: bool = False, quick: bool = False) -> None:
    """Checks all variants of a form into `report`; `quick`: the first variant on one small mesh.

    A form that reaches no rule at all (it bypasses dispatch) counts as wrong.
    """
    for i, args in enumerate(form.variants()[:1] if quick else form.variants()):
        before = report.samples, len(report.wrong)
        try:
            check_rule(form.fn, *args, axes=((2,),) if quick else ONE_AXIS if i else TWO_AXES, report=report,
                       alike=not form.travels, **({"missed": True} if missed else {}))
        except Exception as e:  # noqa: BLE001  whatever MindSpore raises on plain tensors is a finding
            at = traceback.extract_tb(e.__traceback__)[-1]
            text = str(e).strip().splitlines()
            report.wrong.append(f"variant {i}: {type(e).__name__}: {text[0] if text else ''} ({at.filename}:{at.lineno})")
            continue
        if before == (report.samples, len(report.wrong)):
            report.wrong.append(f"variant {i}: no op of this form reached a rule")


def refuses(form: Form) -> list[str]:
    """What is wrong with the refusal of a form that must raise: nothing if it raises on sharded operands."""
    assert form.raises is not None
    mesh = DeviceMesh("cpu", np.arange(2), mesh_dim_names=("x",))  # an axis of one rank cuts nothing
    wrong = []
    patches.install()  # as the first DTensor of a user's does
    for i, args in enumerate(form.variants()):
        try:
            form.fn(*(_sharded(a, mesh) for a in args))
        except form.raises:
            continue
        except Exception as e:  # noqa: BLE001
            wrong.append(f"variant {i}: raised {type(e).__name__}: {e}, not {form.raises.__name__}")
        else:
            wrong.append(f"variant {i}: not refused")
    return wrong


def _sharded(value, mesh):
    if isinstance(value, np.ndarray):
        layout = Layout(mesh, [Shard(0)] if value.ndim else None, value.shape, str(value.dtype))
        x = wrap(Tensor(value[:layout.local_shape()[0]] if value.ndim else value), layout)
        assert isinstance(x, DTensor)
        return x
    if isinstance(value, tuple | list):
        return type(value)(_sharded(v, mesh) for v in value)
    return value
