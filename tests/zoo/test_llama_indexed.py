# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed data sets as token files: the batches are windows of the tokens, and what is damaged is told."""
import struct
from dataclasses import replace

import numpy as np
import pytest

from model_zoo.llama.config import DataConfig, TrainConfig
from model_zoo.llama.data import check_same_data, load_text, places, stream_values
from model_zoo.llama.indexed_file import IndexedFile
from ms_dtensor.errors import ConfigError


def write(prefix, documents, code, kind):
    """As the format says: written here from its description, byte by byte. A document is a list of sequences."""
    sequences = [s for document in documents for s in document]
    tokens = np.concatenate([np.asarray(s) for s in sequences]).astype(kind)
    at, sizes, begins = 0, b"", b""
    for s in sequences:
        sizes, begins, at = sizes + struct.pack("<i", len(s)), begins + struct.pack("<q", at), at + len(s) * tokens.itemsize
    firsts = np.cumsum([0, *map(len, documents)])
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    prefix.with_suffix(".idx").write_bytes(head + sizes + begins + b"".join(struct.pack("<q", int(f)) for f in firsts))
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    return tokens


def documents_of(seed, count, end=0):
    rng = np.random.default_rng(seed)
    return [[rng.integers(1, 50, rng.integers(1, 9)).tolist() for _ in range(2)] + [[7, end]] for _ in range(count)]


@pytest.fixture
def made(tmp_path):
    return tmp_path, [write(tmp_path / name, documents_of(i, 20), 8, "<u2") for i, name in enumerate(("train", "held_out"))]


@pytest.mark.parametrize(("code", "kind"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_tokens_of_every_width_are_read(tmp_path, code, kind):
    tokens = write(tmp_path / "train", documents_of(3, 5), code, kind)
    file = IndexedFile(tmp_path / "train", 50)
    assert len(file) == len(tokens) and file.end == 0 and file.read(4, 9).tolist() == tokens[4:13].tolist()
    assert file.read(0, len(file)).tolist() == tokens.tolist()


def test_batches_are_windows_of_the_tokens_and_a_run_goes_on_with_the_same(made):
    folder, (train, held) = made
    cfg = DataConfig(path=str(folder), documents=True)
    files = load_text(cfg, 50, 8)
    ids, labels, at = files.batch(5, 2, 3, 8)
    starts = np.random.Generator(np.random.Philox(key=[5, 2])).integers(0, len(train) - 8, 3)
    assert ids.tolist() == [train[s:s + 8].tolist() for s in starts]
    assert labels.tolist() == [train[s + 1:s + 9].tolist() for s in starts] and at.tolist() == places(ids, 0).tolist()
    assert files.held_out_batch(0, 1, 2, 8)[0][0].tolist() == held[:8].tolist()
    run = TrainConfig(seq=8)
    before = stream_values(run, files)
    check_same_data(run, load_text(cfg, 50, 8), before)
    changed = train.copy()
    changed[3] += 1
    (folder / "train.bin").write_bytes(changed.tobytes())
    with pytest.raises(ConfigError, match="not those of the checkpoint"):
        check_same_data(run, load_text(cfg, 50, 8), before)
    assert len(load_text(replace(cfg, documents=False), 50, 8).batch(5, 2, 3, 8)) == 2


def test_documents_without_one_end_are_refused_where_they_matter(tmp_path):
    for name in ("train", "held_out"):
        write(tmp_path / name, [[[1, 2, 3]], [[4, 5, 6, 7, 8, 9, 10, 11, 12]]], 4, "<i4")
    assert len(load_text(DataConfig(path=str(tmp_path)), 50, 4).batch(0, 0, 1, 4)) == 2
    with pytest.raises(ConfigError, match="does not tell documents apart"):
        load_text(DataConfig(path=str(tmp_path), documents=True), 50, 4)


@pytest.mark.parametrize(("harm", "says"), [
    (lambda f: (f / "train.bin").unlink(), "cannot be read"),
    (lambda f: (f / "held_out.idx").unlink(), "cannot be read"),
    (lambda f: (f / "train.idx").write_bytes(b"MMIDIDX"), "does not begin as one"),
    (lambda f: _change(f, 9, 2), "another kind"),
    (lambda f: _change(f, 17, 7), "another kind"),
    (lambda f: (f / "train.idx").write_bytes((f / "train.idx").read_bytes()[:-200]), "too short"),
    (lambda f: _change(f, 34 + 4 * 60, 1), "one behind another"),
    (lambda f: _change(f, 34 + 12 * 60 + 8 * 20, 61), "documents do not follow one another"),
    (lambda f: _change(f, 34 + 12 * 60 + 8 * 7, 59), "documents do not follow one another"),
    (lambda f: (f / "train.bin").write_bytes((f / "train.bin").read_bytes()[:-2]), "not as many as its index says"),
])
def test_what_is_damaged_is_told_in_one_message(made, harm, says):
    folder, _ = made
    harm(folder)
    with pytest.raises(ConfigError, match=says):
        load_text(DataConfig(path=str(folder)), 50, 8)


def _change(folder, at, value):
    data = bytearray((folder / "train.idx").read_bytes())
    data[at] = value
    (folder / "train.idx").write_bytes(bytes(data))


def test_ids_beyond_the_model_are_refused_where_they_are_read(made):
    folder, _ = made
    with pytest.raises(ConfigError, match="the model's vocabulary has 30 tokens"):
        load_text(DataConfig(path=str(folder)), 30, 8).batch(0, 0, 4, 8)
