# SPDX-License-Identifier: Apache-2.0
"""Data parallelism on real ranks; programs that lose step end their own launch."""
from __future__ import annotations

import pytest

from tests.cases import case_params


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_ranks_alike", 2))
def test_ranks_alike(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", [p for n in (2, 4) for p in case_params("tests.sharding.cases_written", n)])
def test_written(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_in_place", 2))
def test_in_place(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_in_place", 4))
def test_in_place_of_four(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_ranks_differ", 2))
def test_ranks_differ(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_ranks_differ", 4))
def test_four_ranks_differ(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_past_outputs", 2))
def test_past_outputs(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_micro_batches", 2))
def test_micro_batches(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_rows", 2))
def test_rows(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_meshes", 2))
def test_meshes_of_two(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_meshes", 4))
def test_meshes(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_in_flight", 2))
def test_in_flight(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_fsdp2_names", 2))
def test_fsdp2_names(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", case_params("tests.sharding.cases_fsdp2_names", 4))
def test_fsdp2_names_of_four(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", [p for n in (2, 4) for p in case_params("tests.sharding.cases_local", n)])
def test_local(case, ranks):
    ranks.check(case)


@pytest.mark.parametrize("case", [p for n in (2, 4) for p in case_params("tests.sharding.cases_meta", n)])
def test_meta(case, ranks):
    ranks.check(case)
