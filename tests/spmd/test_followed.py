# SPDX-License-Identifier: Apache-2.0
"""Nothing that MindSpore computes of typed tensors is plain, whatever way it goes; and what varies is never refused."""
from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor.comm import fake_world
from ms_dtensor.core.tree import leaves, map_leaves
from ms_dtensor.debug.types.account import Account, Origin, Types
from ms_dtensor.debug.types.doors import watched
from ms_dtensor.debug.types.typed import Typed
from ms_dtensor.dispatch import patches
from ms_dtensor.errors import OpRuleError
from ms_dtensor.ops.rng import frozen
from ms_dtensor.ops.rules import spmd
from tests.spmd.test_table import corpus
from tests.tiers import sampled

pytestmark = pytest.mark.usefixtures("cpu")
CONSTANTS = {"ops.max()", "ops.min()"}  # the second result is a zero that MindSpore makes

ASKED = {"mint.allclose"}  # it reads a number


@pytest.mark.parametrize("kind", (spmd.V, spmd.P, spmd.R), ids="VPR")
def test_results_of_typed_tensors_are_typed(kind):
    patches.install()
    plain, refused, followed = [], [], 0
    with fake_world(2):
        now = Account("f", md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), (0,))

        def given(a):
            letter = kind if a.dtype.kind == "f" or kind is not spmd.P else spmd.R  # of integers: indices, for one
            return Typed(Tensor(a), Types((letter,), a.dtype.kind == "f", (Origin("an input"),)))
        for form in sampled(corpus(), 12):
            try:
                with watched(now), frozen(0):
                    result = form.fn(*map_leaves(given, form.variants()[0], np.ndarray))
            except OpRuleError:
                refused.append(form.name)
                continue
            except Exception:  # noqa: BLE001, S112  no such kernel on CPU: local code has none either
                continue
            followed += 1
            plain += [form.name for x in leaves([result], Tensor) if not isinstance(x, Typed)]
    assert not set(plain) - CONSTANTS, plain
    assert followed > 20
    assert kind is spmd.P or set(refused) <= ASKED, refused
