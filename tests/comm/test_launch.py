# SPDX-License-Identifier: Apache-2.0
"""How a job starts and ends with what is around it: limits, devices, MindSpore's own communication, a killed msrun."""
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ms_dtensor.comm.agree import check_every
from ms_dtensor.comm.shm import segment
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import free_port
from tests.jobs import running, soon
from tests.msrun import PATIENCE, ROOT, python


def four_parts(error: ConfigError) -> None:
    assert error.attempt.startswith("For ") and error.operands and error.rule and error.fix, error


@pytest.mark.parametrize("value", ["abc", "", "-1", "nan", "inf", "0", "1e400", "9" * 5000])
def test_a_timeout_that_is_none_is_refused_before_anybody_is_waited_for(value, monkeypatch, cpu):
    from ms_dtensor.comm.shm.backend import ShmBackend
    monkeypatch.setenv("MS_DTENSOR_TIMEOUT", value)
    with pytest.raises(ConfigError, match="MS_DTENSOR_TIMEOUT") as caught:
        ShmBackend(0, 2, "1")
    four_parts(caught.value)


def test_the_start_waits_as_long_as_the_timeout_says(monkeypatch, cpu):
    from ms_dtensor.comm.shm.backend import ShmBackend
    from ms_dtensor.errors import PeerLost
    monkeypatch.setenv("MS_DTENSOR_TIMEOUT", "0.3")
    with pytest.raises(PeerLost, match="waited 0.3 s for rank") as caught:
        ShmBackend(0, 2, f"alone-{os.getpid()}")
    assert "MS_DTENSOR_TIMEOUT=1 on every rank" in str(caught.value)


@pytest.mark.parametrize("value", ["x", "-1", "", "9" * 5000])
def test_a_wrong_number_of_collectives_is_refused(value, monkeypatch):
    monkeypatch.setenv("MS_DTENSOR_CHECK_EVERY", value)
    with pytest.raises(ConfigError) as caught:
        check_every(1)
    four_parts(caught.value)


@pytest.mark.parametrize(("name", "limit"), [("RLIMIT_AS", 64 << 30), ("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_NOFILE", 64)])
def test_limits_are_asked_before_memory_is_made(name, limit, monkeypatch):
    ours = resource.getrlimit
    kind = getattr(resource, name)
    monkeypatch.setattr(segment.resource, "getrlimit", lambda what: (limit, limit) if what == kind else ours(what))
    monkeypatch.setattr(os, "memfd_create", lambda *a: pytest.fail("made"))
    with pytest.raises(ConfigError, match=name) as caught:
        segment.create(64)
    four_parts(caught.value)


@pytest.mark.parametrize("device", ["npu", "gpu"])
def test_an_absent_device_is_refused(device, tmp_path):
    script = f"import ms_dtensor as md; md.init_device_mesh({device!r}, (1,))"
    run = python("-c", script)
    assert run.returncode == 1 and "ConfigError: For 'start', there is no" in run.stderr, run.stderr


SLEEPS = """
import os, sys, time
from pathlib import Path
import ms_dtensor as md
rank = md.init_device_mesh("cpu", (2,)).get_rank()
Path(sys.argv[1], f"pid{rank}").write_text(str(os.getpid()))
time.sleep(float(sys.argv[2]))
Path(sys.argv[1], f"done{rank}").write_text("")
"""


def msrun(folder: Path, text: str, *options: str, args: tuple[str, ...] = ()) -> subprocess.Popen:
    """An msrun of two workers; logs go to the folder."""
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.Popen([str(Path(sys.executable).parent / "msrun"), "--worker_num=2", "--local_worker_num=2",
                             "--master_addr=127.0.0.1", f"--master_port={free_port()}", f"--log_dir={folder}",
                             "--tail_worker_log=99999",  # no such worker: msrun leaves its `tail -f` behind
                             *options,
                             str(script), *args], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def workers_of(folder: Path) -> list[int]:
    """Their pids, once both are in the user's code."""
    files = [folder / f"pid{rank}" for rank in range(2)]
    assert soon(lambda: all(f.exists() and f.read_text() for f in files), 60)
    return [int(f.read_text()) for f in files]


@pytest.mark.dist
def test_an_absent_device_ends_the_job(tmp_path):
    job = msrun(tmp_path, "import ms_dtensor as md\nmd.init_device_mesh('npu', (2,))\n", "--join=True")
    try:
        assert job.wait(PATIENCE) == 1
        for log in ("worker_0.log", "worker_1.log", "scheduler.log"):
            assert "ConfigError: For 'start', there is no Ascend device here." in (tmp_path / log).read_text(), log
    finally:
        for child in psutil.Process(job.pid).children() if job.poll() is None else ():
            child.kill()
        job.kill()


@pytest.mark.dist
def test_workers_end_with_a_killed_msrun(tmp_path):
    job = msrun(tmp_path, SLEEPS, "--join=True", args=(str(tmp_path), "100"))
    workers = workers_of(tmp_path)
    try:
        job.kill()
        job.wait()
        assert soon(lambda: not any(map(running, workers)), 10), "workers outlive msrun"
        assert "is gone, so this rank ends" in (tmp_path / "worker_0.log").read_text()
    finally:
        for pid in filter(running, workers):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.dist
def test_workers_of_an_msrun_that_does_not_wait_go_on(tmp_path):
    job = msrun(tmp_path, SLEEPS, args=(str(tmp_path), "2"))
    workers_of(tmp_path)
    job.wait(PATIENCE)
    assert soon(lambda: all((tmp_path / f"done{rank}").exists() for rank in range(2)), 30)
