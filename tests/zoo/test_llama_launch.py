# SPDX-License-Identifier: Apache-2.0
"""What the launcher says about a failed run, and that a bad configuration ends it early. No ranks are started here."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from model_zoo.llama.launch import first_failure, msrun_command
from model_zoo.llama.ranks import FAILED

TRAIN = Path(__file__).resolve().parents[2] / "model_zoo/llama/train.py"


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
