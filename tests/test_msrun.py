# SPDX-License-Identifier: Apache-2.0
"""The launcher and the case runner tell the truth about ranks that pass, fail, crash, hang or wait for each other."""
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from tests.cases import LAUNCHES, Case, Launches, verdicts
from tests.forks import JOB
from tests.msrun import MARK, REPORTS, ROOT, Outcome, end_marked, headline, launch, marked, run_ranks

# msrun runs the script as its scheduler too; without MindSpore's cluster that one has nothing to do.
HEAD = "import os, sys, time\nif os.environ['MS_ROLE'] == 'MS_SCHED': sys.exit(0)\nrank = int(os.environ['RANK_ID'])\n"


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(HEAD + body)
    return path


@pytest.mark.dist
def test_run_ranks_returns_what_each_rank_reported(tmp_path: Path) -> None:
    body = "from tests.msrun import report\nreport(sys.argv[1] * rank)\nreport(rank)\n"
    assert run_ranks(script(tmp_path, body), 3, ["a"], log_dir=tmp_path / "log") == [["", 0], ["a", 1], ["aa", 2]]


@pytest.mark.dist
def test_run_ranks_raises_the_first_failing_ranks_traceback(tmp_path: Path) -> None:
    body = "if rank == 1: raise ValueError('from rank 1')\ntime.sleep(600)\n"
    with pytest.raises(AssertionError, match=r"rank 1 failed first:\nTraceback(.|\n)*ValueError: from rank 1") as error:
        run_ranks(script(tmp_path, body), 2, log_dir=tmp_path / "log")
    assert "not done after" not in str(error.value)


@pytest.mark.dist
def test_failed_launch_does_not_wait_for_a_scheduler_that_stays(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os, sys, time\nif os.environ['MS_ROLE'] == 'MS_SCHED': time.sleep(600)\nsys.exit(3)\n")
    outcome = launch(path, 2, log_dir=tmp_path / "log")
    assert outcome.failure is not None and "not done after" not in outcome.failure


@pytest.mark.dist
def test_launch_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    """Ranks in sessions of their own, as msrun's; without msrun, which takes more than 6 s to come on a loaded machine."""
    ranks = script(tmp_path, """if os.fork() == 0:
    os.environ["RANK_ID"] = "1"
    os.setsid()
from tests.msrun import MARK, report
report(os.environ[MARK])
time.sleep(600)
""")
    env = {"MS_ROLE": "MS_WORKER", "RANK_ID": "0"}
    outcome = launch(ranks, 2, timeout=6, log_dir=tmp_path / "log", env=env, forked=True)
    assert outcome.failure is not None and "not done after 6 s" in outcome.failure
    ((mark,), (same,)) = outcome.reports
    assert mark == same and marked(mark) == []


def test_end_marked_ends_only_what_carries_the_mark() -> None:
    marks = uuid.uuid4().hex, uuid.uuid4().hex
    mine, other = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, MARK: mark})
        for mark in marks
    )
    try:
        end_marked(marks[0])
        assert mine.wait(10) != 0
        assert other.poll() is None
    finally:
        end_marked(marks[1])
        other.wait(10)


RANKS_OF_A_LAUNCHER = """
import subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, sys.argv[0], "ranks"]).wait()
from tests import forks
def run(cases):
    print("runs", flush=True)
    time.sleep(600)
forks.load, forks.run = list, run
forks.main(2, [])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_ranks_end_with_a_killed_pytest(tmp_path: Path) -> None:
    program, mark, log = tmp_path / "launcher.py", uuid.uuid4().hex, tmp_path / "worker_1.log"
    program.write_text(RANKS_OF_A_LAUNCHER)
    launcher = subprocess.Popen([sys.executable, program], env={
        **os.environ, MARK: mark, REPORTS: str(tmp_path), JOB: "32001", "PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: log.exists() and "runs" in log.read_text())
        assert len(marked(mark)) == 3  # launcher, what forks, rank
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not marked(mark))
    finally:
        end_marked(mark)


def wait_until(condition: Callable[[], bool], limit: float = 60.0) -> None:
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_headline_is_the_error_and_not_the_end_of_its_message() -> None:
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ^^^\n'
    assert headline(frames + "ValueError: one line") == "ValueError: one line"
    assert (
        headline(frames + "errors.PeerLost: rank 1 is gone.\n  rule: r\n  fix:  look")
        == "errors.PeerLost: rank 1 is gone."
    )


def case_named(name: str) -> Case:
    return Case("m", name, 2, "m", 60)


def record(ok: bool, ended: float) -> dict:
    trace = None if ok else f"Traceback\nValueError: at {ended}"
    return {"ok": ok, "traceback": trace, "ended": ended, "seconds": 1.0, "cpu": 1.0}


A, B, C = map(case_named, "abc")


def test_failure_on_one_rank_fails_only_its_case_when_the_launch_went_on() -> None:
    reports = [[record(True, 1), record(True, 2)], [record(False, 1), record(True, 2)]]
    got = verdicts([A, B], Outcome(reports, None))
    assert "rank 1 failed first" in got[A] and "ValueError: at 1" in got[A]
    assert got[B] is None


def test_the_rank_that_failed_earliest_is_blamed() -> None:
    got = verdicts([A], Outcome([[record(False, 7)], [record(False, 6)]], None))
    assert "rank 1 failed first" in got[A] and "rank 0 after it: ValueError: at 7" in got[A]


def test_cases_after_lost_step_are_not_run() -> None:
    reports = [[record(True, 1)], [record(True, 1), record(False, 2)]]
    got = verdicts([A, B, C], Outcome(reports, "msrun exited with 1"))
    assert got[A] is None
    assert "rank 1 failed first" in got[B] and "ranks [0] did not finish" in got[B]
    assert got[C] == "not run: the launch ended in m:b"


def test_lost_step_after_a_case_that_every_rank_finished_is_its_fault() -> None:
    got = verdicts([A, B], Outcome([[record(False, 1)], [record(True, 1)]], "msrun exited with 1"))
    assert "rank 0 failed first" in got[A] and got[B] == "not run: the launch ended in m:a"


def test_crash_without_a_record_shows_the_launchs_own_words() -> None:
    got = verdicts([A, B], Outcome([[record(True, 1)], []], "rank 1 failed first:\nFatal Python error"))
    assert "ranks [1] did not finish" in got[A] and "Fatal Python error" in got[A]
    assert got[B] == "not run: the launch ended in m:a"


def test_a_launch_that_fails_after_its_last_case_does_not_pass() -> None:
    got = verdicts([A, B], Outcome([[record(True, 1)] * 2] * 2, "msrun exited with 1"))
    assert got[A] is None and "the launch failed: msrun exited with 1" in got[B]


def test_cases_behind_one_that_ended_the_launch_run_in_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = []

    def one(main: str, size: int, args: list[str], limit: float, log_dir: Path, stopped: Event, forked: bool) -> Outcome:
        launched.append([a.split(":")[1] for a in args])
        ends = len(args) == 3  # the first launch, in its second case
        rows = [record(True, 1), record(False, 2)] if ends else [record(True, 1)] * len(args)
        return Outcome([rows] * size, "msrun exited with 1" if ends else None)
    monkeypatch.setattr("tests.cases.launch", one)
    launches = Launches([A, B, C], lambda prefix: tmp_path)
    launches.start()
    launches.check(A)
    with pytest.raises(AssertionError, match="failed first"):
        launches.check(B)
    launches.check(C)
    assert launched == [["a", "b", "c"], ["c"]]


def test_a_group_whose_every_case_ends_its_launch_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched = []

    def one(main: str, size: int, args: list[str], limit: float, log_dir: Path, stopped: Event, forked: bool) -> Outcome:
        launched.append(args)
        return Outcome([[record(False, 1)]] * size, "msrun exited with 1")
    monkeypatch.setattr("tests.cases.launch", one)
    cases = [case_named(f"case{i}") for i in range(LAUNCHES + 2)]
    launches = Launches(cases, lambda prefix: tmp_path)
    launches.start()
    for c in cases:
        with pytest.raises(AssertionError):
            launches.check(c)
    assert len(launched) == LAUNCHES
    with pytest.raises(AssertionError, match=f"not run: the launch ended in m:case{LAUNCHES - 1}"):
        launches.check(cases[-1])


def test_a_session_that_ends_early_ends_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = []

    def one(main: str, size: int, args: list[str], limit: float, log_dir: Path, stopped: Event, forked: bool) -> Outcome:
        begun.append(size)
        assert stopped.wait(60)
        return Outcome([[]] * size, "msrun exited with 1")
    monkeypatch.setattr("tests.cases.launch", one)
    launches = Launches([A, B, C], lambda prefix: tmp_path)
    launches.start()
    launches.stop()
    assert len(begun) <= 1
    with pytest.raises(AssertionError):
        launches.check(A)


def test_a_launcher_that_cannot_launch_fails_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.cases.launch", lambda *args, **more: 1 / 0)
    launches = Launches([A], lambda prefix: tmp_path)
    launches.start()
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        launches.check(A)


def test_a_launch_that_is_stopped_ends_at_once(tmp_path: Path) -> None:
    stopped = Event()
    stopped.set()
    assert launch(script(tmp_path, "import time; time.sleep(100)"), 2, log_dir=tmp_path / "log", stopped=stopped).failure
