# SPDX-License-Identifier: Apache-2.0
"""What the launcher says about a failed run, that what cannot be ends it early, signals, and two nodes on one machine."""
from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from model_zoo.llama.configio import load
from model_zoo.llama.hold import hold
from model_zoo.llama.launch import Nodes, first_failure, free_port, msrun_command
from model_zoo.llama.ranks import FAILED, NODE
from ms_dtensor.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "model_zoo/llama/train.py"
TINY = ["tiny", "--parallel.tp", "2", "--data.max_bytes", "200000", "--model.n_layers", "1", "--train.steps", "3"]


def test_the_rank_that_failed_first_is_quoted(tmp_path):
    (tmp_path / "worker_0.log").write_text(f"step 1\n{FAILED} rank=0 time=12.500\nPeerLost: rank 3 is gone\n")
    (tmp_path / "worker_3.log").write_text(f"{FAILED} rank=3 time=12.125\nTraceback ...\nValueError: the cause\n")
    said = first_failure(tmp_path)
    assert said.startswith("rank 3 failed first:") and "ValueError: the cause" in said and "PeerLost" not in said


def test_a_silent_death_shows_the_ends_of_the_logs(tmp_path):
    (tmp_path / "worker_0.log").write_text("a\nb\n")
    assert "without a traceback" in first_failure(tmp_path) and "worker_0.log:\na\nb" in first_failure(tmp_path)


def test_msrun_gets_a_port_it_accepts_and_the_script_with_its_arguments(tmp_path):
    command = msrun_command(TRAIN, 3, tmp_path, ["--train.steps", "2"])
    (port,) = [int(word.split("=")[1]) for word in command if word.startswith("--master_port")]
    assert 1024 <= port < 65536 and "--worker_num=3" in command and "--join=True" in command
    assert command[-3:] == [str(TRAIN), "--train.steps", "2"]


def test_a_bad_configuration_ends_the_script_before_mindspore_starts():
    env = {k: v for k, v in os.environ.items() if k not in ("MS_WORKER_NUM", "RANK_ID", "MS_ROLE")}
    run = subprocess.run([sys.executable, "-X", "importtime", str(TRAIN), "--parallel.tp", "2"], env=env,
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "ConfigError: For the configuration, the parallel degrees make 2" in run.stderr
    assert "Traceback" not in run.stderr and "mindspore" not in run.stderr.replace(str(TRAIN), "")


def test_print_config_prints_and_trains_nothing():
    run = subprocess.run([sys.executable, str(TRAIN), "--print-config", "--model.dim", "64"], capture_output=True,
                         text=True, timeout=60)
    assert run.returncode == 0 and "  dim: 64\n" in run.stdout and "loss" not in run.stdout.replace("loss_parallel", "")


def test_help_says_how_and_where_the_keys_are():
    run = subprocess.run([sys.executable, str(TRAIN), "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "usage: train.py [--config" in run.stdout and "--print-config;" in run.stdout, run.stderr


def run_llama(nproc: int, *words: str, **env: str) -> subprocess.Popen:
    """scripts/run_llama.sh at work."""
    return subprocess.Popen(["bash", str(ROOT / "scripts/run_llama.sh"), str(nproc), *words], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHON": sys.executable, **env})


@pytest.mark.parametrize(("words", "env", "said"), [
    ([], {}, "parallel degrees make 2 ranks but 1 worker runs"),
    (["--max_restarts", "-1", "--parallel.tp", "1"], {}, "--max_restarts is out of range"),
    (["--checkpoint.resume", "nosuch", "--parallel.tp", "1"], {}, "nothing to go on from in 'nosuch'"),
    (["--train.stesp", "3"], {}, "'train.steps' is the closest match"),
    ([], {"NNODES": "2", "NODE_RANK": "1"}, "MASTER_PORT is not given"), ([], {"NNODES": "two"}, "invalid int value: 'two'"),
    ([], {"NNODES": "2", "NODE_RANK": "2", "MASTER_PORT": "29500"}, "Nodes count from 0"),
    (["--data.path", "/no/such"], {"NNODES": "2", "NODE_RANK": "1", "MASTER_PORT": "29500"}, "holds no text")])
def test_what_cannot_be_is_refused_once_and_starts_no_rank(tmp_path, words, env, said):
    run = run_llama(1, *TINY, "--train.log_dir", str(tmp_path), *words, **env)
    out = run.communicate(timeout=60)[0]
    assert run.returncode == 2 and out.count(said) == 1 and "Traceback" not in out and "starting" not in out, out


def test_a_port_that_somebody_has_is_refused():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        with pytest.raises(Exception, match="is in use"):
            Nodes(2, 0, "127.0.0.1", holder.getsockname()[1]).check()
        Nodes(2, 1, "127.0.0.1", holder.getsockname()[1]).check()  # the first node's to have


# -- signals -----------------------------------------------------------------------------------------------------------
LAUNCHER = """
import sys
from pathlib import Path
from model_zoo.llama import launch
folder = sys.argv.pop()
launch.msrun_command = lambda *_: [sys.executable, "-c", Path(folder, "msrun.py").read_text(), folder]
launch.preflight = lambda *_: Path(folder)
sys.exit(launch.main())
"""
MSRUN = """
import os, subprocess, sys
rank = ("trap 'sleep 0.5; touch $0/saved; exit 0' TERM; echo $PPID $$ > $0/pids; echo ' 1/9  ' > $0/worker_0.log; "
        "while :; do sleep 0.05; done")
worker = subprocess.Popen(["bash", "-c", rank, sys.argv[1]], start_new_session=True,
                          env={**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": "0"})
sys.exit(worker.wait())
"""


def running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def soon(what, seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(what())


def test_signals_end_the_whole_job_and_ranks_may_save(tmp_path):
    """msrun and the rank are stand-ins, so that nothing waits for MindSpore; the terminal is a real one."""
    sent = {"HUP": ["HUP"], "twice": ["HUP", "HUP"], "QUIT": ["QUIT"], "TERM": ["TERM"], "nohup": ["HUP"], "KILL": ["KILL"],
            "terminal": []}
    jobs: dict[str, subprocess.Popen] = {}
    pids: dict[str, list[int]] = {}
    ours, theirs = pty.openpty()
    try:
        for name in sent:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "msrun.py").write_text(MSRUN)
            command = [sys.executable, "-c", LAUNCHER, "--workers", "1", str(folder)]
            if name == "terminal":  # of a session of its own, as a window's is
                command = ["setsid", "--ctty", "--wait", *command]
            out = theirs if name == "terminal" else subprocess.DEVNULL
            jobs[name] = subprocess.Popen(
                command, stdin=out, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN) if name == "nohup" else None)
        os.close(theirs)
        assert soon(lambda: all((tmp_path / name / "worker_0.log").exists() for name in sent))
        pids |= {name: [int(pid) for pid in (tmp_path / name / "pids").read_text().split()] for name in sent}
        time.sleep(0.5)  # launch.py has looked
        os.close(ours)
        for name, signals in sent.items():
            for word in signals:
                jobs[name].send_signal(getattr(signal, f"SIG{word}"))
                time.sleep(0.1)
        for name in ("HUP", "twice", "QUIT", "TERM", "terminal"):
            assert jobs[name].wait(20) == 0, name
            assert (tmp_path / name / "saved").exists() and not any(map(running, pids[name])), name
        assert jobs["KILL"].wait(20) == -signal.SIGKILL
        assert soon(lambda: not running(pids["KILL"][0])), "msrun outlives launch.py; its ranks end with it"
        assert jobs["nohup"].poll() is None and all(map(running, pids["nohup"]))
        jobs["nohup"].terminate()
        assert jobs["nohup"].wait(20) == 0 and (tmp_path / "nohup/saved").exists()
    finally:
        for name, job in jobs.items():
            job.kill()
            job.wait()
            for pid in pids.get(name, ()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# -- a folder is of one run --------------------------------------------------------------------------------------------
def test_a_folder_is_of_one_run_at_a_time(tmp_path, monkeypatch):
    from model_zoo.llama.train import run

    words = ["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--train.log_dir", str(tmp_path / "run")]
    cfg = load(words, 1)[0]
    saving = load([*words[:-1], str(tmp_path / "a"), "--checkpoint.interval", "5", "--checkpoint.dir", str(tmp_path / "c")],
                  1)[0]
    other = load([*words[:-1], str(tmp_path / "b"), "--checkpoint.interval", "5", "--checkpoint.dir", str(tmp_path / "c")],
                 1)[0]
    with ExitStack() as keep:
        keep.enter_context(hold(cfg))
        keep.enter_context(hold(saving))
        before = {*tmp_path.rglob("*")}
        with pytest.raises(ConfigError, match=f"another run is at work in '{tmp_path}/run'.\n.*process {os.getpid()} on "):
            run(words)
        with pytest.raises(ConfigError, match="another run is at work"):
            keep.enter_context(hold(cfg, launcher=True))
        with pytest.raises(ConfigError, match=f"For 'checkpoint.dir', another run is at work in '{tmp_path}/c'"):
            keep.enter_context(hold(other))
        refused = run_llama(1, "tiny", "--train.log_dir", str(tmp_path / "run"), "--checkpoint.resume", "latest")
        out = refused.communicate(timeout=60)[0]
        assert refused.returncode == 2 and out.count("another run is at work") == 1 and "starting" not in out, out
        assert {*tmp_path.rglob("*")} == {*before, tmp_path / "b", tmp_path / "b/.lock"}
        for role in ({"MS_ROLE": "MS_SCHED"}, {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "1"}):  # only rank 0 asks
            with pytest.MonkeyPatch.context() as env:
                for key, value in role.items():
                    env.setenv(key, value)
                keep.enter_context(hold(cfg))
    with ExitStack() as launcher, ExitStack() as rank:
        launcher.enter_context(hold(cfg, launcher=True))
        monkeypatch.setenv(NODE, "0")
        rank.enter_context(hold(cfg))
        monkeypatch.delenv(NODE)
        launcher.close()  # killed: its rank still saves
        with pytest.raises(ConfigError, match="another run is at work"):
            rank.enter_context(hold(cfg, launcher=True))
    holder = subprocess.Popen([sys.executable, "-c", "import sys, time; from model_zoo.llama.configio import load; from "
                               "model_zoo.llama.hold import hold; h = hold(load(sys.argv[1:], 1)[0]); h.__enter__(); "
                               "print(1, flush=True); time.sleep(60)", *words], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout.readline()
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "), hold(cfg):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with hold(cfg):
        pass


@pytest.mark.dist
def test_two_nodes_train_as_one_machine_does(tmp_path, cpu):
    """Each node has its msrun, and they meet over TCP."""
    from model_zoo.llama.train import run

    port, words = str(free_port()), [*TINY, "--train.log_dir", str(tmp_path / "two")]
    nodes = [run_llama(1, *words, NNODES="2", NODE_RANK=str(i), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
             for i in range(2)]
    try:
        out = [node.communicate(timeout=150)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(out)
    assert "on node 1 of 2" in out[1] and "held-out loss at step 3" in out[0] and "held-out" not in out[1]
    config = ["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--parallel.tp", "1"]
    run([*config, *words[3:-2], "--train.log_dir", str(tmp_path / "one")])
    losses = [[r.get("loss", r.get("held_out_loss")) for r in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text()
                                                                   .splitlines())] for name in ("one", "two")]
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-5)
