# SPDX-License-Identifier: Apache-2.0
"""What the launcher says about a failed run, that what cannot be ends it early, and two nodes on one machine."""
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from model_zoo.llama.launch import Nodes, first_failure, free_port, msrun_command
from model_zoo.llama.ranks import FAILED

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
