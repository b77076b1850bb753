# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests. Importing this sets nothing in MindSpore: the pure tests never import it."""
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # pytest started from another folder
    sys.path.insert(0, str(ROOT))

from tests.cases import TEST_LIMIT, Case, Launches, cases_of  # noqa: E402
from tests.tiers import CHOSEN, TIERS, tier  # noqa: E402

# The same examples on every run and every machine; no deadline, as CI shares two cores.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LAUNCHES = pytest.StashKey[Launches]()
CASE = pytest.StashKey[Case]()  # of a test that is one on real ranks
COLLECTED = pytest.StashKey[list[str]]()  # all names, those left out too


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="push", help="runs the tests of this tier and of those before it")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Files of cases; not by `python_files`, for which pytest would compile each once more, with asserts of its own."""
    if file_path.name.startswith("cases_") and not parent.session.isinitpath(file_path):  # that one pytest collects
        return pytest.Module.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[pytest.Item] | None:
    """The cases of real ranks in `cases_*.py`: a test for each world size, `name[4]`."""
    tests = []
    for one in cases_of(collector.obj, name, obj) if isinstance(collector, pytest.Module) else ():
        test = pytest.Function.from_parent(collector, name=f"{name}[{one.world_size}]",
                                           callobj=lambda ranks, one=one: ranks.check(one))
        test.add_marker(pytest.mark.dist)
        test.add_marker(pytest.mark.timeout(TEST_LIMIT))
        test.stash[CASE] = one
        tests.append(test)
    return tests or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick tests first, then those with real ranks, then the slow ones: a plain mistake shows within seconds.

    What a test waits for is in `tests/tiers.py`. Those of later tiers are left out unless `--tier`, `-m` or their own
    name asks for them.
    """
    asked = [tier for tier in TIERS if tier == config.getoption("tier") or re.search(rf"\b{tier}\b", config.option.markexpr)]
    os.environ[CHOSEN] = asked[-1]
    for item in items:
        if (waits := tier(item.nodeid)) != "push":
            item.add_marker(waits)
    config.stash[COLLECTED] = [item.nodeid for item in items]
    later = TIERS[TIERS.index(config.getoption("tier")) + 1:]
    left = [tier for tier in later if tier not in asked]
    named = tuple(os.path.relpath(config.invocation_params.dir / arg, config.rootpath) for arg in config.args if "::" in arg)
    out = {item: None for item in items
           if any(item.get_closest_marker(tier) for tier in left) and not item.nodeid.startswith(named)}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is not None, item.get_closest_marker("dist") is not None)
    )


def pytest_collection_finish() -> None:
    """No collection of garbage goes through MindSpore and all tests again: a third of what collections took."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cpu() -> None:
    """MindSpore on CPU, launch-blocking: 40 times faster here than its asynchronous pipeline.

    Its waiting threads sleep, as ranks have the cores beside these tests; a loop of theirs took 15% of one.
    """
    import mindspore

    from ms_dtensor.comm.cores import end_spinning

    for choose in (lambda: mindspore.set_device("CPU"), mindspore.runtime.launch_blocking):
        try:
            choose()
        except RuntimeError:  # an earlier test has started the runtime
            assert mindspore.get_context("device_target") == "CPU"
    end_spinning()


@pytest.fixture(autouse=True)
def mindspore_as_found(request: pytest.FixtureRequest):
    """MindSpore as each test finds it, whichever ran before.

    A test that began it otherwise than `cpu` would leave it asynchronous to those that ask for `cpu` later. An exception
    inside a backward leaves MindSpore 2.10 recording for good.
    """
    if "mindspore" in sys.modules:
        request.getfixturevalue("cpu")
    yield
    if "mindspore" in sys.modules:
        from mindspore.common.api import _pynative_executor
        _pynative_executor.set_grad_flag(False)


@pytest.fixture(scope="session", autouse=True)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launches]:
    """Runs real-rank cases, one launch per world size, from the first test on; see tests/cases.py."""
    selected = [item.stash[CASE] for item in request.session.items if CASE in item.stash]
    logs = tmp_path_factory.mktemp("launches")  # here: pytest makes its folder at the first call, and two threads make two

    def new_dir(name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=re.sub(r"[^\w-]", "_", name), dir=logs))

    launches = Launches(selected, new_dir)
    request.config.stash[LAUNCHES] = launches
    launches.start()
    yield launches
    launches.stop()


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """With `--durations`, what pytest cannot see: how long launches and the cases in them took."""
    launches, shown = config.stash.get(LAUNCHES, None), config.getoption("durations")
    if launches is None or shown is None:
        return
    spent, cases = launches.spent, sorted(launches.seconds.items(), key=lambda x: -x[1])
    terminalreporter.section(f"{len(spent)} launches, {sum(s for _, _, s in spent):.0f} s, "
                             f"{sum(s for _, s in cases):.0f} of them in {len(cases)} cases")
    for group, size, seconds in sorted(spent, key=lambda x: -x[2]):
        terminalreporter.line(f"{seconds:7.1f} s launch  {group} on {size} ranks")
    for one, seconds in cases[:shown or None]:
        cpu = launches.used[one]
        terminalreporter.line(f"{seconds:7.1f} s case    {one.address} on {one.world_size} ranks, {cpu:.1f} s of CPU")
