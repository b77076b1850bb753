# SPDX-License-Identifier: Apache-2.0
"""Costs may be told by a file; plans follow them, and a wrong file is refused before anything is planned."""
from __future__ import annotations

import json
import os

import numpy as np
import pytest

from ms_dtensor import Layout, Partial, Replicate
from ms_dtensor.errors import ConfigError
from ms_dtensor.redistribute import cost as cost_module
from ms_dtensor.redistribute.cost import CostModel, costs, load_costs, set_costs
from ms_dtensor.redistribute.plan import plan
from ms_dtensor.tools.calibrate import fit
from tests.pure.test_plan import mesh_of


@pytest.fixture(autouse=True)
def restored():
    yield
    set_costs(None)


def test_plans_follow_the_costs_in_force(tmp_path):
    mesh, shape = mesh_of((4, 4)), (256, 64)
    ends = Layout(mesh, [Partial(), Replicate()], shape), Layout(mesh, [Replicate(), Replicate()], shape)
    dear, cheap = tmp_path / "dear.json", tmp_path / "cheap.json"
    dear.write_text(json.dumps({"cpu": {"alpha": 1}}))
    cheap.write_text(json.dumps({"cpu": {"alpha": 0}, "npu": {"alpha": 1e-5, "beta": 1e-11, "gamma": 1e-12}}))
    set_costs(dear)
    assert [m.kind for m in plan(*ends)] == ["all_reduce"]
    set_costs(str(cheap))
    assert [m.kind for m in plan(*ends)][-1] == "all_gather"
    assert costs("npu") == CostModel(1e-5, 1e-11, 1e-12) and costs("gpu") == CostModel()


def test_the_environment_is_asked_once(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text('{"gpu": {"beta": 1e-12}}')
    monkeypatch.setattr(cost_module, "_told", None)
    monkeypatch.setenv("MS_DTENSOR_COSTS", str(path))
    assert costs("gpu").beta == 1e-12
    path.unlink()
    assert costs("gpu").beta == 1e-12


@pytest.mark.parametrize("text", ["", "[]", '{"tpu": {}}', '{"cpu": 3}', '{"cpu": {"alpa": 1}}', '{"cpu": {"alpha": -1}}',
                                  '{"cpu": {"alpha": "1"}}', '{"cpu": {"alpha": %s}}' % ("9" * 400), '"%s"' % ("9" * 9999),
                                  '{"cpu": {"alpha": %s}}' % ("9" * 5000), '{"cpu": {"beta": Infinity}}', "[" * 100_000,
                                  '{"cpu": {"gamma": NaN}}', '{"cpu": %s}' % ("[" * 500 + "]" * 500), "\xe9"])
def test_a_wrong_file_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text, encoding="latin-1")
    for name, wrong in ((path, "MS_DTENSOR_COSTS"), *((name, "cannot be read")
                                                      for name in (tmp_path / "absent.json", "x" * 300, os.devnull))):
        with pytest.raises(ConfigError, match=wrong) as caught:
            load_costs(name)
        e = caught.value
        assert e.attempt and e.operands and e.rule and e.fix and len(str(e)) < 1500


def test_calibration_finds_the_figures_it_was_made_from():
    rng = np.random.default_rng(0)
    alpha, beta, gamma = 3e-4, 4e-10, 1e-10
    samples = [(alpha + beta * sent + gamma * after, sent, after)
               for sent, after in 2.0 ** rng.uniform(12, 24, (60, 2))]
    made = {"alpha": alpha, "beta": beta, "gamma": gamma}
    assert fit(samples, gamma) == pytest.approx(made, rel=1e-3)
    noisy = [(t * f, sent, after) for (t, sent, after), f in zip(samples, rng.uniform(0.8, 1.2, len(samples)))]
    assert fit(noisy, gamma) == pytest.approx(made, rel=0.25)
    assert min(fit([(1e-6, sent, after) for _, sent, after in samples], gamma).values()) >= 0


def test_ranks_that_copy_faster_together_than_one_alone_do_not_send_for_nothing():
    """Measured on shared memory: what the collectives copy takes less than a local copy of as many bytes."""
    samples = [(4e-5 + 4e-11 * sent + 4e-11 * after, sent, after)
               for sent in (2048., 2. ** 18, 2. ** 24) for after in (sent, 2 * sent)]
    found = CostModel(**fit(samples, 1e-10))
    assert found.beta > 0
    for seconds, sent, after in samples:
        assert found.alpha + found.beta * sent + found.gamma * after == pytest.approx(seconds, rel=0.2)
