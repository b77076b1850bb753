# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Importing this sets nothing in MindSpore: the pure tests never import it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # pytest started from another folder
    sys.path.insert(0, str(ROOT))

from tests.cases import Case, Launches  # noqa: E402

# The same examples on every run and every machine; no deadline, as CI shares two cores.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick tests first, then those with real ranks, then the slow ones: a plain mistake shows within seconds.

    Those of the night are left out unless `-m` names them.
    """
    if "night" not in config.option.markexpr:
        night = [item for item in items if item.get_closest_marker("night")]
        config.hook.pytest_deselected(items=night)
        items[:] = [item for item in items if item not in night]
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is not None, item.get_closest_marker("dist") is not None)
    )


@pytest.fixture(scope="session")
def cpu() -> None:
    """MindSpore on CPU, launch-blocking: 40 times faster here than its asynchronous pipeline."""
    import mindspore

    for choose in (lambda: mindspore.set_device("CPU"), mindspore.runtime.launch_blocking):
        try:
            choose()
        except RuntimeError:  # an earlier test has started the runtime
            assert mindspore.get_context("device_target") == "CPU"


@pytest.fixture(autouse=True)
def not_recording():
    """An exception inside a backward leaves MindSpore 2.10 recording for good: no test may pass that on to the next."""
    yield
    if "mindspore" in sys.modules:
        from mindspore.common.api import _pynative_executor
        _pynative_executor.set_grad_flag(False)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """Runs real-rank cases, one launch per group and world size; see tests/cases.py."""
    values = [
        value for item in request.session.items if hasattr(item, "callspec") for value in item.callspec.params.values()
    ]
    selected = [value for value in values if isinstance(value, Case)]
    return Launches(selected, lambda name: tmp_path_factory.mktemp(re.sub(r"[^\w-]", "_", name)))
