# SPDX-License-Identifier: Apache-2.0
"""Every planted fault turns its test red. Night only: each starts pytest, and some start ranks."""
import shutil

import pytest

from tests.mutants.faults import FAULTS
from tests.mutants.plant import asked, caught, copied, planted
from tests.mutants.push_faults import PUSH_FAULTS

ALL = [*FAULTS, *PUSH_FAULTS]
HARMFUL = [f for f in ALL if not f.why]


@pytest.fixture(scope="module")
def copy():
    folder = copied()
    yield folder
    shutil.rmtree(folder)


def test_there_are_enough_and_each_has_its_place(tmp_path):
    """Quick, and by day: a change of the code that a fault is planted in moves the fault along, or fails here."""
    folder = copied()
    try:
        for fault in ALL:
            with planted(fault, folder):
                pass
    finally:
        shutil.rmtree(folder)
    assert len(FAULTS) >= 41 and len(PUSH_FAULTS) >= 30 and len({f.name for f in ALL}) == len(ALL)


@pytest.mark.timeout(3600)
def test_without_a_fault_the_same_tests_pass(copy):
    for tests in dict.fromkeys(f.test for f in HARMFUL):
        code, said = asked([tests], copy)
        assert code == 0, said


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("fault", HARMFUL, ids=lambda f: f.name)
def test_a_planted_fault_is_caught(fault, copy):
    seen, said = caught(fault, copy)
    assert seen, said
