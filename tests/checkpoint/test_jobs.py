# SPDX-License-Identifier: Apache-2.0
"""What takes jobs, or long: two ranks save, one plain process loads and saves, two ranks load, bit for bit; published
weights in and out of two ranks; slices of `python -m tests.long.check_checkpoints`; the index of a 405B Llama on 16,384
ranks. Within four ranks the first is `tests/checkpoint/cases_save_load.py`.
"""
import importlib.util
import json
from pathlib import Path

import pytest

from tests.checkpoint.programs import load_all, save_all
from tests.msrun import python, run_ranks


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 3, 4)], ids=["two", "four"])
def test_jobs_of_any_number_of_ranks_load_each_others_checkpoints(tmp_path, sizes):
    """In every layout they can have, into each: bit by bit."""
    for size in sizes:
        save_all(tmp_path, 1) if size == 1 else run_ranks("tests.checkpoint.programs", size, ["save", str(tmp_path)])
    for size in sizes:
        told = [load_all(tmp_path, 1)] if size == 1 else sum(
            run_ranks("tests.checkpoint.programs", size, ["load", str(tmp_path)]), [])
        assert len(told) == size
        for pairs in told:
            assert len(pairs) >= 3 and not any(pairs.values()), pairs


SCRIPT = Path(__file__).resolve().parents[2] / "model_zoo/llama/tools/check_hf.py"
spec = importlib.util.spec_from_file_location("check_hf", SCRIPT)
check_hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_hf)


def check(folder, kinds: list[str], by: str) -> None:
    results = check_hf.check(folder, kinds, by)
    assert set(results) == {f"{kind} {layout}" for kind in kinds for layout in check_hf.layouts_of(kind)}
    for name, result in results.items():
        assert not result["bad"] and result["files"] > 10 and result["read_over_shards"] == 1.0, (name, result)


@pytest.mark.dist
def test_folders_made_by_hand(tmp_path, cpu):
    check(tmp_path / "models", ["llama3", "qwen3", "mixtral", "deepseek_v3"], "hand")


@pytest.mark.dist
def test_folders_made_by_transformers(tmp_path, cpu):
    pytest.importorskip("transformers", reason="an extra: pip install '.[hf]'")
    pytest.importorskip("torch", reason="an extra: pip install '.[hf]'")
    check(tmp_path / "models", ["llama3", "qwen2", "mistral", *check_hf.MIXTURES], "transformers")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", [("kills", "--runs=6"), ("fuzz", "--runs=300"), ("memory", "--gib=0.25")],
                         ids=lambda what: what[0])
def test_a_slice_of(what):
    done = python("-m", "tests.long.check_checkpoints", *what, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert not json.loads(done.stdout)["wrong"]


def measured(*options: str) -> dict:
    done = python("scripts/bench/checkpoint_index.py", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_index_of_16384_ranks_is_as_small_as_of_64():
    many, few = measured(), measured("--fsdp=8", "--rank=7")
    assert (many["ranks"], few["ranks"]) == (16384, 64) and many["parts"] > 30_000_000 and many["tensors"] == 3411
    assert many["index_bytes"] < 1.02 * few["index_bytes"] < 1_000_000
    assert many["header_bytes"] < 1_000_000 and many["files_opened"] == 1 and not many["mindspore"]
    assert many["peak_mib"] < 200
