# SPDX-License-Identifier: Apache-2.0
"""The shape of the repository: what imports without MindSpore, what every file carries, how long it may be."""
import re
import subprocess
from pathlib import Path

import pytest

from tests.msrun import PATIENCE, python, run_ranks

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ms_dtensor", "model_zoo", "scripts", "docs", "tests")
PURE = (
    "ms_dtensor.core.layout",
    "ms_dtensor.core.placements",
    "ms_dtensor.core.mesh",
    "ms_dtensor.errors",
    "ms_dtensor.checkpoint",
    "ms_dtensor.checkpoint.folder",
    "ms_dtensor.checkpoint.plan",
    "ms_dtensor.checkpoint.reader",
    "ms_dtensor.pipeline",
    "ms_dtensor.redistribute.plan",
    "ms_dtensor.redistribute.cost",
    "ms_dtensor.ops.rules",
)
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 500


def python_files() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted([*ROOT.glob("*.py"), *inside])


@pytest.mark.parametrize("module", PURE)
def test_pure_module_imports_where_mindspore_cannot(module: str) -> None:
    done = python("-c", f"import sys; sys.modules['mindspore'] = None; import {module}")
    assert done.returncode == 0, done.stderr


def test_version_is_the_same_for_setup_and_package() -> None:
    in_package = python("-c", "import sys; sys.modules['mindspore'] = None; import ms_dtensor as m; print(m.__version__)")
    in_setup = python("setup.py", "--version")
    version = in_package.stdout.strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version), in_package.stderr
    assert in_setup.stdout.strip().splitlines()[-1] == version, in_setup.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_top_level_folder_is_there(folder: str) -> None:
    assert (ROOT / folder).is_dir()


def test_setup_finds_every_package_folder() -> None:
    missing = {path.parent for path in (ROOT / "ms_dtensor").rglob("*.py")} - {
        path.parent for path in (ROOT / "ms_dtensor").rglob("__init__.py")
    }
    assert not missing, f"folders with Python files but no __init__.py are left out of the package: {missing}"


def test_every_python_file_names_its_licence_first() -> None:
    bare = [str(path.relative_to(ROOT)) for path in python_files() if not path.read_text("utf-8").startswith(SPDX)]
    assert not bare, f"the first line of these is not '{SPDX}': {bare}"


def test_no_python_file_outgrows_one_idea() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in python_files()}
    long = {name: count for name, count in lengths.items() if count > MAX_LINES}
    assert not long, f"over {MAX_LINES} lines, split along the idea: {long}"


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/run_llama.sh", "scripts/test.sh",
                                    "scripts/_env.sh", ".ci/run"])
def test_shell_script_parses(script: str) -> None:
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.dist
def test_readme_example_runs_on_four_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "demo.py").write_text(code, "utf-8")
    run_ranks(tmp_path / "demo.py", 4, log_dir=tmp_path / "log")
    printed = (tmp_path / "log" / "worker_0.log").read_text("utf-8")
    assert "DTensor(f32[8@dp, 64], mesh=(dp=2, tp=2)" in printed
    assert "f32[8, 64@tp]" in printed


def test_the_installed_package_says_that_it_is_typed(tmp_path):
    """What a type checker then sees of it: `user_types.py`, which `python -m mypy` asks."""
    done = python("setup.py", "-q", "build_py", "--build-lib", str(tmp_path))
    assert (tmp_path / "ms_dtensor" / "py.typed").is_file(), done.stderr
