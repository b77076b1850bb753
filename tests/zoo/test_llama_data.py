# SPDX-License-Identifier: Apache-2.0
"""Data: batches are pure functions of (text, seed, step); train and held-out text are disjoint."""
from __future__ import annotations

import numpy as np
import pytest

from model_zoo.llama.config import DataConfig
from model_zoo.llama.data import load_text
from ms_dtensor.errors import ConfigError


@pytest.fixture(scope="module")
def text():
    return load_text(DataConfig(max_bytes=400_000), 256, 64)


def test_the_standard_library_is_there_and_is_read_the_same_each_time(text):
    again = load_text(DataConfig(max_bytes=400_000), 256, 64)
    assert np.array_equal(text.train, again.train) and np.array_equal(text.held_out, again.held_out)
    assert len(text.train) + len(text.held_out) == 400_000
    assert b"import" in text.train.tobytes() and b"def " in text.held_out.tobytes()


def test_batches_depend_on_seed_and_step_only(text):
    ids, labels = text.batch(7, 3, 4, 64)
    assert ids.shape == labels.shape == (4, 64) and ids.dtype == labels.dtype == np.int32
    text.batch(7, 9, 2, 16)
    assert np.array_equal(ids, text.batch(7, 3, 4, 64)[0])
    assert np.array_equal(ids[:, 1:], labels[:, :-1]), "labels are the next tokens"
    assert not np.array_equal(ids, text.batch(7, 4, 4, 64)[0])
    assert not np.array_equal(ids, text.batch(8, 3, 4, 64)[0])


def test_held_out_batches_spread_over_the_text_and_differ(text):
    batches = [text.held_out_batch(i, 3, 2, 64)[0] for i in range(3)]
    assert len({batch.tobytes() for batch in batches}) == 3
    assert np.array_equal(batches[1], text.held_out_batch(1, 3, 2, 64)[0])


def test_one_block_in_so_many_is_held_out(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(200)) * 10)
    text = load_text(DataConfig(path=str(file), held_out_every=10), 256, 8)
    assert len(text.held_out) == pytest.approx(200, abs=100) and len(text.train) + len(text.held_out) == 2000


def test_a_folder_is_read_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "z.txt").write_bytes(b"z" * 3000)
    (tmp_path / "a.md").write_bytes(b"a" * 3000)
    text = load_text(DataConfig(path=str(tmp_path)), 256, 8)
    assert text.train[0] == ord("a") and text.train[-1] == ord("z")


def test_too_short_a_text_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"short" * 20)
    with pytest.raises(ConfigError, match="too short"):
        load_text(DataConfig(path=str(file)), 256, 64)
