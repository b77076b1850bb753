# SPDX-License-Identifier: Apache-2.0
"""Slices of the recipe's tools/check_hf.py: weights in and out of two real ranks, written by hand and by `transformers`."""
import importlib.util
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).resolve().parents[2] / "model_zoo/llama/tools/check_hf.py"
spec = importlib.util.spec_from_file_location("check_hf", SCRIPT)
check_hf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_hf)


def check(folder, kinds: list[str], by: str) -> None:
    results = check_hf.check(folder, kinds, by)
    assert set(results) == {f"{kind} {layout}" for kind in kinds for layout in check_hf.layouts_of(kind)}
    for name, result in results.items():
        assert not result["bad"] and result["files"] > 10 and result["read_over_shards"] == 1.0, (name, result)


def test_folders_made_by_hand(tmp_path, cpu):
    check(tmp_path / "models", ["llama3", "qwen3", "mixtral", "deepseek_v3"], "hand")


def test_folders_made_by_transformers(tmp_path, cpu):
    pytest.importorskip("transformers", reason="an extra: pip install '.[hf]'")
    pytest.importorskip("torch", reason="an extra: pip install '.[hf]'")
    check(tmp_path / "models", ["llama3", "qwen2", "mistral", *check_hf.MIXTURES], "transformers")
