# SPDX-License-Identifier: Apache-2.0
"""What the launcher says about a failed run, that what cannot be ends it early, signals, and two nodes on one machine."""
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from model_zoo.llama import launch
from model_zoo.llama.configio import load
from model_zoo.llama.hold import hold
from model_zoo.llama.launch import Nodes, after_signal, first_failure, msrun_command
from model_zoo.llama.ranks import LAUNCHER as BY
from model_zoo.llama.ranks import this_process
from model_zoo.llama.token_file import write
from model_zoo.llama.train import run
from ms_dtensor.comm.shm import rendezvous
from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import FAILED, free_port, guarded
from tests.jobs import Job, metrics, recipe, running, soon
from tests.msrun import PATIENCE, python

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
    run = python("-X", "importtime", str(TRAIN), "--parallel.tp", "2", env=env)
    assert run.returncode == 2 and "ConfigError: For the configuration, the parallel degrees make 2" in run.stderr
    assert "Traceback" not in run.stderr and "mindspore" not in run.stderr.replace(str(TRAIN), "")


def test_print_config_prints_and_trains_nothing():
    run = python(str(TRAIN), "--print-config", "--model.dim", "64")
    assert run.returncode == 0 and "  dim: 64\n" in run.stdout and "loss" not in run.stdout.replace("loss_parallel", "")


def test_help_says_how_and_where_the_keys_are():
    run = python(str(TRAIN), "--help")
    assert run.returncode == 0 and "usage: train.py [--config" in run.stdout and "--print-config;" in run.stdout, run.stderr


@pytest.mark.parametrize(("words", "env", "said"), [
    ([], {}, "parallel degrees make 2 ranks but 1 worker runs"),
    (["--max_restarts", "-1", "--parallel.tp", "1"], {}, "--max_restarts is out of range"),
    (["--checkpoint.resume", "nosuch", "--parallel.tp", "1"], {}, "nothing to go on from in 'nosuch'"),
    (["--train.stesp", "3"], {}, "'train.steps' is the closest match"), (["--optim.lr", "fast"], {}, "cannot be 'fast'"),
    (["--config", "nowhere.yaml"], {}, "there is no file 'nowhere.yaml'"),
    (["--metrics.trackers", "mlflow"], {}, "'tensorboard', 'wandb', 'swanlab'"),
    (["--metrics.trackers", "[swanlab]", "--parallel.tp", "1"], {}, "'swanlab' is not installed"),
    (["--data.path", "HERE", "--parallel.tp", "1"], {}, "does not begin as"),
    (["--train.log_dir", "HERE/train.tokens/run", "--parallel.tp", "1"], {}, "cannot be written"),
    (["--train.log_dir", "/proc/run", "--parallel.tp", "1"], {}, "cannot be written"),
    ([], {"NNODES": "2", "NODE_RANK": "1"}, "MASTER_PORT is not given"), ([], {"NNODES": "two"}, "invalid int value: 'two'"),
    ([], {"NNODES": "2", "NODE_RANK": "2", "MASTER_PORT": "29500"}, "Nodes count from 0"),
    (["--data.path", "/no/such"], {"NNODES": "2", "NODE_RANK": "1", "MASTER_PORT": "29500"}, "holds no text")])
def test_what_cannot_be_is_refused_once_and_starts_no_rank(tmp_path, words, env, said, monkeypatch, capfd):
    (tmp_path / "train.tokens").write_bytes(b"no token file")
    words = [word.replace("HERE", str(tmp_path)) for word in words]
    monkeypatch.setattr(launch, "Run", None)  # whoever starts ranks fails
    monkeypatch.setattr(sys, "argv", ["launch.py", "--workers", "1", "--config", str(TRAIN.parent / "configs/tiny.yaml"),
                                      *TINY[1:], "--train.log_dir", str(tmp_path), *words])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    try:
        code = launch.main()
    except SystemExit as end:
        code = end.code
    out = "".join(capfd.readouterr())
    assert code == 2 and out.count(said) == 1 and "Traceback" not in out and "starting" not in out, out


def test_the_script_hands_a_refusal_on(tmp_path):
    out = Job(tmp_path / "out", *recipe(1, *TINY, "--train.log_dir", tmp_path, "--train.stesp", "3")).ended(2)
    assert out.count("'train.steps' is the closest match") == 1 and "Traceback" not in out, out


@contextmanager
def small_disk(folder: Path, fills_when: str):
    """A disk of 1 MiB, full at once, or as soon as the run has written a file of this name."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    ended = threading.Event()

    def fill() -> None:
        while fills_when and not list(folder.glob(f"**/{fills_when}")) and not ended.wait(0.2):
            pass
        with suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield filler.join() if not fills_when else None
    finally:
        ended.set()
        filler.join()
        subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.dist
@pytest.mark.parametrize(("disk", "words", "said"), [
    (None, ["--optim.lr", "1000", "--optim.clip_norm", "0", "--optim.warmup", "0"], "the guard ends the run"),
    (None, ["--data.path", "HERE/tokens"], "tokens 0 to 1048576 are damaged"),
    ("", [], "No space left on device"), ("metrics.jsonl", [], "No space left on device")],
    ids=["diverges", "damaged", "full", "fills_up"])
def test_what_ends_a_run_is_said_once(disk, words, said, tmp_path):
    """By ranks at work, but for a disk that is full before."""
    if disk is not None and os.geteuid() != 0:
        pytest.skip("mounts a disk, which only root can")
    (tmp_path / "tokens").mkdir()
    for name in ("train", "held_out"):
        with open(tmp_path / f"tokens/{name}.tokens", "w+b") as file:
            write(file, "<u2", 256, 0, 4000, iter([np.arange(4000, dtype=np.uint16) % 251]))
            file.seek(4001)
            file.write(b"\xff")
    with small_disk(tmp_path / "run", disk) if disk is not None else nullcontext():
        words = [word.replace("HERE", str(tmp_path)) for word in words]
        run = Job(tmp_path / "out", *recipe(2, *TINY[:-1], 2000, "--train.log_dir", tmp_path / "run", *words))
        code = run.process.wait(PATIENCE)
    assert code not in (0, -signal.SIGTERM) and run.said().count(said) == 1, run.said()


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
look = launch.Run._look

def looked(run):
    look(run)
    for pid in [run.scheduler, *run.ranks]:
        Path(folder, f"knows {pid}").touch()

launch.Run._look = looked
launch.GRACE = float("inf")  # who ends only by waiting for the scheduler does not end
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


def as_at_a_terminal(nohup):
    """An ignored signal stays ignored in children: SIGHUP under nohup, SIGINT and SIGQUIT behind a script's `command &`."""
    for one in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(one, signal.SIG_DFL)
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_signals_end_the_whole_job_and_ranks_may_save(tmp_path):
    """msrun and the rank are stand-ins, so that nothing waits for MindSpore; the terminal is a real one."""
    sent = {"HUP": ["HUP"], "twice": ["HUP", "HUP"], "QUIT": ["QUIT"], "TERM": ["TERM"], "INT": ["INT"], "nohup": ["HUP"],
            "KILL": ["KILL"], "terminal": []}
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
                preexec_fn=partial(as_at_a_terminal, nohup=name == "nohup"))
        os.close(theirs)
        assert soon(lambda: all((tmp_path / name / "worker_0.log").exists() for name in sent))
        pids |= {name: [int(pid) for pid in (tmp_path / name / "pids").read_text().split()] for name in sent}
        assert soon(lambda: all((tmp_path / name / f"knows {pids[name][1]}").exists() for name in sent))
        os.close(ours)
        for name, signals in sent.items():
            for word in signals:
                jobs[name].send_signal(getattr(signal, f"SIG{word}"))
                time.sleep(0.1)
        for name in ("HUP", "twice", "QUIT", "TERM", "INT", "terminal"):
            assert jobs[name].wait(120) == 0, name
            assert (tmp_path / name / "saved").exists() and not any(map(running, pids[name])), name
        assert jobs["KILL"].wait(120) == -signal.SIGKILL
        assert soon(lambda: not running(pids["KILL"][0])), "msrun outlives launch.py; its ranks end with it"
        assert jobs["nohup"].poll() is None and all(map(running, pids["nohup"]))
        jobs["nohup"].terminate()
        assert jobs["nohup"].wait(120) == 0 and (tmp_path / "nohup/saved").exists()
    finally:
        for name, job in jobs.items():
            job.kill()
            job.wait()
            for pid in pids.get(name, ()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


MSRUN_WITH_SCHEDULER = """
import os, subprocess, sys, time
from pathlib import Path
def start(role):
    return subprocess.Popen(["sleep", "3000"], start_new_session=True, env={**os.environ, "MS_ROLE": role, "RANK_ID": "0"})
folder = Path(sys.argv[1])
processes = [start("MS_SCHED")]
if folder.name != "no_rank_yet":
    processes.append(start("MS_WORKER"))
(folder / "new").write_text(" ".join(str(p.pid) for p in processes))
(folder / "new").rename(folder / "pids")
code = processes[-1].wait() if len(processes) == 2 else None
print(f"Worker process {processes[-1].pid} exit with exception. Error code: {code}.", flush=True)
processes[0].wait()
raise RuntimeError("Distributed job exited with exception.")
"""


@pytest.mark.parametrize(("name", "ends", "code", "said"), [
    ("no_rank_yet", "launcher", 143, "ended by SIGTERM; with --checkpoint.on_sigterm"),
    ("no_step_yet", "launcher", 143, "ended by SIGTERM; with --checkpoint.on_sigterm"),
    ("scheduler", "scheduler", 1, "the scheduler of msrun was ended by SIGKILL"),
    ("rank", "rank", 1, "rank 0 was ended by SIGKILL")])
def test_an_end_before_the_first_step_waits_for_nobody_and_is_no_failure_of_msrun(tmp_path, name, ends, code, said):
    """msrun by itself would wait for its scheduler, and end with a traceback."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "msrun.py").write_text(MSRUN_WITH_SCHEDULER)
    job = subprocess.Popen([sys.executable, "-c", LAUNCHER, "--workers", "1", str(folder)], cwd=ROOT, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    pids: list[int] = []
    try:
        assert soon((folder / "pids").exists)
        pids += map(int, (folder / "pids").read_text().split())
        assert soon(lambda: all((folder / f"knows {pid}").exists() for pid in pids))
        os.kill(job.pid if ends == "launcher" else pids[ends == "rank"], signal.SIGTERM if code == 143 else signal.SIGKILL)
        out = job.communicate(timeout=PATIENCE)[0]
        assert job.returncode == code and said in out and "raceback" not in out, out
        assert not any(map(running, pids))
    finally:
        job.kill()
        job.wait()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_of_a_rank_that_said_why_and_was_ended_then_the_reason_is_told(tmp_path, capsys):
    """MindSpore ends ranks by SIGTERM who are late to leave; what they had said counts, without its own chatter behind."""
    said = f"{FAILED} rank=0 time=1.5\nTraceback\nms_dtensor.errors.CommError: For 'all_gather', a peer died\n  fix:  a\n"
    (tmp_path / "worker_0.log").write_text(said + "[INFO] DISTRIBUTED(1,7f,python):2026 [tcp_client.cc] Start] success!\n")
    (tmp_path / "msrun.log").write_text("Worker process 77 exit with exception. Error code: -15.\n")
    run = launch.Run.__new__(launch.Run)
    run.log_dir, run.asked, run.scheduler, run.ranks, run.killed = tmp_path, 0, None, {77: "0"}, ""
    run._look_for_killed()
    assert run.killed == "" and first_failure(tmp_path).endswith("a peer died\n  fix:  a")
    (tmp_path / "worker_0.log").write_text("step 1\n")
    run._look_for_killed()
    assert "rank 0 was ended by SIGTERM (by somebody, or by MindSpore's scheduler" in run.killed and "step 1" in run.killed


def test_what_ranks_say_of_each_other_after_a_signal_is_no_failure(tmp_path):
    (tmp_path / "worker_0.log").write_text(f"{FAILED} rank=0 time=1.5\nTraceback\nms_dtensor.errors.PeerLost: rank 1 left\n")
    assert "rank" not in after_signal(tmp_path, signal.SIGTERM)
    (tmp_path / "worker_1.log").write_text(f"{FAILED} rank=1 time=1.6\nConfigError: no space is left\n")
    assert after_signal(tmp_path, signal.SIGTERM) == "ended by SIGTERM, and rank 1 failed:\nConfigError: no space is left\n"


def test_ctrl_c_saves_where_it_was_asked_for(tmp_path):
    words = ["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--train.log_dir", str(tmp_path),
             "--data.max_bytes", "200000", "--train.steps", "100000", "--checkpoint.interval", "100000",
             "--checkpoint.on_sigterm", "true"]
    run = Job(tmp_path / "out", sys.executable, TRAIN, *words)
    try:
        run.until(lambda: len(metrics(tmp_path)) > 2)
        run.process.send_signal(signal.SIGINT)
        assert "which is saved" in run.ended() and (tmp_path / "checkpoints/latest").exists(), run.said()
    finally:
        run.end()


# -- what other jobs leave, and networks -------------------------------------------------------------------------------
@pytest.mark.parametrize(("msrun", "code", "said"), [("12", 0, ""), ("", 2, "unset MS_ROLE")])
def test_the_scheduler_of_one_rank_does_not_do_its_work(msrun, code, said, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "msrun_ancestor", lambda: msrun)
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    monkeypatch.setenv("MS_WORKER_NUM", "1")
    assert guarded(lambda: pytest.fail("it trains")) == code and said in capsys.readouterr().err


@pytest.mark.parametrize("role", [None, "MS_WORKER"])
def test_a_process_alone_speaks_to_its_user_and_a_rank_to_its_launcher(role, monkeypatch, capsys):
    def refused():
        raise ConfigError("For 'model.dims', there is no such key.")
    monkeypatch.delenv("MS_WORKER_NUM", raising=False)
    monkeypatch.delenv("MS_ROLE", raising=False)
    if role:
        monkeypatch.setenv("MS_ROLE", role)
    assert guarded(refused) == 2
    assert capsys.readouterr().err.startswith(FAILED if role else "ConfigError: For 'model.dims'")


def test_an_address_that_no_network_leads_to_is_refused():
    with pytest.raises(ConfigError, match="no network leads to no.such.host.invalid"):
        Nodes(2, 1, "no.such.host.invalid", 29500).check()
    none = ["unshare", "--net"]
    if subprocess.run([*none, "true"], capture_output=True, check=False).returncode == 0:  # root may
        check = "from model_zoo.llama.nodes import ALONE; ALONE.check()"
        done = subprocess.run([*none, sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
        assert "no network leads to 127.0.0.1" in done.stderr and "ip link set lo up" in done.stderr, done.stderr


# -- a folder is of one run --------------------------------------------------------------------------------------------
def test_a_folder_is_of_one_run_at_a_time(tmp_path, monkeypatch):
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
        with tempfile.TemporaryDirectory() as other:
            command = recipe(1, "tiny", "--train.log_dir", tmp_path / "run", "--checkpoint.resume", "latest")
            out = Job(Path(other, "out"), *command).ended(2)
        assert out.count("another run is at work") == 1 and "starting" not in out, out
        assert {*tmp_path.rglob("*")} == {*before, tmp_path / "b"}
        for role in ({"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "2"},
                     {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_NODE_ID": "1"}):  # only rank 0 asks
            with pytest.MonkeyPatch.context() as env:
                for key, value in role.items():
                    env.setenv(key, value)
                keep.enter_context(hold(cfg))
        for left in ({"MS_ROLE": "MS_SCHED"}, {"MS_ROLE": "MS_WORKER"}, {"MS_DTENSOR_NODE": "0"}, {BY: "process 7 on x"},
                     {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "1"}):  # by another job, in the environment
            with pytest.MonkeyPatch.context() as env:
                for key, value in left.items():
                    env.setenv(key, value)
                with pytest.raises(ConfigError, match="another run is at work"), hold(cfg):
                    pass
    assert not list(tmp_path.rglob(".lock"))  # so that the next run may be another user's
    with ExitStack() as launcher, ExitStack() as rank:
        launcher.enter_context(hold(cfg, launcher=True))
        monkeypatch.setenv(BY, this_process())
        rank.enter_context(hold(cfg))
        monkeypatch.delenv(BY)
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
    with open(tmp_path / "run/.lock") as file:  # the process that took it is gone, one that it shared it with goes on
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match=f"process {holder.pid} on .*, which is gone"), hold(cfg):
            pass
    with hold(cfg):
        assert (tmp_path / "run/.lock").stat().st_mode & 0o777 == 0o600  # who can open it can hold it


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which only root can")
def test_a_folder_that_another_user_has_is_refused(tmp_path):
    cfg = load(["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--train.log_dir", str(tmp_path)], 1)[0]
    lock = tmp_path / ".lock"
    lock.write_text("process 7 on x")
    os.chown(lock, 65534, 65534)
    with pytest.raises(ConfigError, match="file of user 65534") as caught, hold(cfg):
        pass
    assert f"rm {lock}" in str(caught.value) and lock.read_text() == "process 7 on x"


@pytest.mark.dist
def test_two_nodes_train_as_one_machine_does(tmp_path, cpu):
    """Each node has its msrun, and they meet over TCP."""
    port, words = str(free_port()), [*TINY, "--train.log_dir", str(tmp_path / "two")]
    nodes = [Job(tmp_path / f"out{i}", *recipe(1, *words), NNODES="2", NODE_RANK=str(i), MASTER_ADDR="127.0.0.1",
                 MASTER_PORT=port) for i in range(2)]
    try:
        out = [node.ended() for node in nodes]
    finally:
        for node in nodes:
            node.end()
    assert "on node 1 of 2" in out[1] and "held-out loss at step 3" in out[0] and "held-out" not in out[1]
    config = ["--config", str(ROOT / "model_zoo/llama/configs/tiny.yaml"), "--parallel.tp", "1"]
    run([*config, *words[3:-2], "--train.log_dir", str(tmp_path / "one")])
    losses = [[r.get("loss", r.get("held_out_loss")) for r in metrics(tmp_path / name)] for name in ("one", "two")]
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-5)
