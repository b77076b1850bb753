# SPDX-License-Identifier: Apache-2.0
"""Pipelines that run, on real ranks."""
from __future__ import annotations

import pytest
from mindspore import nn
from mindspore.ops import ones

from ms_dtensor import init_device_mesh
from ms_dtensor.errors import ConfigError, ScheduleError
from ms_dtensor.pipeline import Schedule1F1B, pipeline


def test_what_is_no_stage_is_refused(cpu):
    mesh, net = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), nn.SequentialCell(nn.Dense(4, 4))
    stages = pipeline(net, mesh)
    for call, error, text in (
            (lambda: pipeline("net", mesh), ConfigError, "'module' is a str"),
            (lambda: Schedule1F1B([], 2), ScheduleError, "not this rank's stages"),
            (lambda: Schedule1F1B(nn.Dense(4, 4), 2), ScheduleError, "Dense"),
            (lambda: Schedule1F1B(stages, 2, len).step(ones((2, 4)), weights=["a", 1.0]), ScheduleError, "'a'")):
        with pytest.raises(error, match="For ") as refused:
            call()
        assert text in str(refused.value)
