# SPDX-License-Identifier: Apache-2.0
"""What type checkers see of the package: a user's program with real types, and every wrong line of it found."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.msrun import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
RIGHT = """
import ms_dtensor as md

x: md.DTensor = md.ones(2)
y: md.DTensor = x.redistribute(placements=[md.Shard(0)])
layout: md.Layout = y.layout
names: tuple[str, ...] = layout.mesh.mesh_dim_names
md.init.zeros_(x)
md.random.manual_seed(3)
md.optim.AdamW, md.debug.explain, md.verify.check_rule, md.errors.LayoutError, md.parallel.replicate
"""
WRONG = ("md.shard(0)", "md.debug.explian", "x.layout.mesh.names", "md.Shard('0')", "md.full((2,))",
         "z: md.Layout = md.Shard(0)")


def test_a_users_program_type_checks_and_its_mistakes_are_found(tmp_path):
    program = tmp_path / "user.py"
    program.write_text(RIGHT + "\n".join(WRONG) + "\n", "utf-8")
    done = subprocess.run([sys.executable, "-m", "mypy", "--strict", str(program)], cwd=ROOT, capture_output=True, text=True,
                          timeout=170)
    first = RIGHT.count("\n") + 1
    wrong = sorted({int(line) for line in re.findall(r"user\.py:(\d+): error", done.stdout)})
    assert wrong == list(range(first, first + len(WRONG))), done.stdout + done.stderr


def test_the_installed_package_says_that_it_is_typed(tmp_path):
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=PATIENCE)
    assert (tmp_path / "ms_dtensor" / "py.typed").is_file(), done.stderr
