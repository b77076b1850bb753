# SPDX-License-Identifier: Apache-2.0
"""`fully_shard` on four real ranks; one launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.dist.cases_fully_shard", 4))
def test_fully_shard(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.dist.cases_fsdp_steps", 4))
def test_steps_of_fully_shard(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.dist.cases_fsdp_windows", 4))
def test_windows(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.dist.cases_fsdp_devices", 4))
def test_fully_shard_on_devices(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.dist.cases_fsdp_inside", 4))
def test_inside_a_unit(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.dist.cases_selective", 4))
def test_selective_recompute(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.dist.cases_fsdp_written", 4))
def test_what_a_forward_writes(case, ranks):
    ranks.check(case)
