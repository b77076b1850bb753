# SPDX-License-Identifier: Apache-2.0
"""Data: batches are pure functions of (text, seed, step); train and held-out text are disjoint."""
import errno
import json
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from model_zoo.llama import prepare_data
from model_zoo.llama.config import Config, DataConfig, ModelConfig, TrainConfig
from model_zoo.llama.data import check_same_data, find_tokenizer, load_text, own_tokenizer, read_tokens, stream_values
from model_zoo.llama.ranks import script
from model_zoo.llama.token_file import HEADER, TokenFile, write
from model_zoo.llama.tokens import load_tokens
from ms_dtensor.errors import CheckpointError, ConfigError


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


# -- token files -------------------------------------------------------------------------------------------------------
@pytest.fixture
def made(tmp_path):
    """A folder of small texts, and the token files made of them."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i:02}.txt").write_text(f"text {i} " * (20 + i))
    (texts / "rows.jsonl").write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(9)))
    prepare_data.run(["--out", str(tmp_path / "out"), "--text", str(texts), "--column", "body"])
    return texts, tmp_path / "out"


def test_texts_become_token_files_and_batches(made, capsys):
    texts, out = made
    assert sorted(f.name for f in out.iterdir()) == ["held_out.tokens", "train.tokens"]
    train, held = (TokenFile(out / f"{name}.tokens") for name in ("train", "held_out"))
    said = b"".join(f.read_bytes() + b"\0" for i, f in enumerate(sorted(texts.glob("*.txt"))) if i % 20 != 19)
    whole = train.read(0, len(train)).astype(np.uint8).tobytes()
    assert whole.startswith(said) and whole.endswith(b"row 7\0row 8\0") and train.end == 0 and train.vocab == 256
    assert held.read(0, len(held)).astype(np.uint8).tobytes().startswith(b"text 19 ")
    text = load_text(DataConfig(path=str(out)), 256, 16)
    ids, labels = text.batch(7, 3, 4, 16)
    assert ids.shape == (4, 16) and ids.dtype == np.int32 and np.array_equal(ids[:, 1:], labels[:, :-1])
    assert np.array_equal(ids, text.batch(7, 3, 4, 16)[0]) and not np.array_equal(ids, text.batch(7, 4, 4, 16)[0])
    assert text.held_out_batch(1, 2, 3, 16)[0].shape == (3, 16)
    assert text.identity()["text"] == train.identity() != text.identity()["held_out"] == held.identity()
    ids, _, where = load_text(DataConfig(path=str(out), documents=True), 256, 300).batch(1, 0, 4, 300)
    for row, place in zip(ids, where):
        assert place[0] == 0 and all(place[i] == (0 if row[i - 1] == 0 else place[i - 1] + 1) for i in range(1, 300))
    assert (where[:, 1:] == 0).any()
    with pytest.raises(ConfigError, match="names no token files"):
        load_text(DataConfig(documents=True), 256, 16)
    with pytest.raises(ConfigError, match="vocab_size = 100 is too small"):
        load_text(DataConfig(path=str(out)), 100, 16)
    prepare_data.run(["--verify", str(out)])
    assert "as they were written" in capsys.readouterr().out


def test_a_killed_preparation_goes_on_where_it_stopped(made, tmp_path, monkeypatch):
    texts, out = made
    argv = ["--out", str(tmp_path / "again"), "--text", str(texts), "--column", "body"]
    monkeypatch.setattr(prepare_data, "SAVED_EVERY", 0.0)
    encode, count = prepare_data.load_tokens(None).encode, [0]

    class Dying:
        size, end = 256, 0

        def encode(self, text):
            count[0] += 1
            if count[0] == 25:
                raise KeyboardInterrupt
            return encode(text)
    monkeypatch.setattr(prepare_data, "load_tokens", lambda *_: Dying())
    with pytest.raises(KeyboardInterrupt):
        prepare_data.run(argv)
    with pytest.raises(ConfigError, match="begun with another column"):
        prepare_data.run([*argv[:-1], "title"])
    prepare_data.run(argv)
    assert count[0] == 25 + 25, "24 were done; 25 of 49 were left"
    for name in ("train.tokens", "held_out.tokens"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("harm, says", [
    (lambda b: b[:50], "does not begin as"), (lambda b: b"x" + b[1:], "does not begin as"), (lambda b: b[:-7], "too short"),
    (lambda b: b + b"1", "more in it"), (lambda b: b[:20] + b"\7" + b[21:], "header is damaged"),
    (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "table is damaged"), (lambda b: b[:900] + b"\1" + b[901:], "are damaged"),
    (lambda b: b"", "does not begin as"),
])
def test_a_damaged_token_file_is_told_in_one_message(made, harm, says):
    file = made[1] / "train.tokens"
    file.write_bytes(harm(file.read_bytes()))
    with pytest.raises(ConfigError, match=says) as caught:
        load_text(DataConfig(path=str(made[1])), 256, 16).batch(0, 0, 4, 16)
    assert str(file) in str(caught.value) and "prepare_data.py" in str(caught.value)


def test_ids_beyond_the_vocabulary_are_told_though_all_checksums_are_right(tmp_path):
    with open(tmp_path / "train.tokens", "wb") as file:
        write(file, "<u2", 200, None, 5, iter([np.array([1, 2, 199, 200, 3], "<u2")]))
    with pytest.raises(ConfigError, match="(?s)tokens 0 to .* have the id 200.*its vocabulary has 200 tokens, 0 to 199"):
        TokenFile(tmp_path / "train.tokens").read(0, 2)


def test_a_tokenizer_of_a_file_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="an extra: pip install '.[tokenizers]'")
    words = {"<|endoftext|>": 0, "[UNK]": 1, **{f"w{i}": i + 2 for i in range(70000)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w5 w69999 what " * 30)
    (tmp_path / "b.txt").write_text("w7 " * 30)
    for name in "ab":
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").rename(tmp_path / "texts" / f"{name}.txt")
    prepare_data.run(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "texts"), "--tokenizer", str(tmp_path),
                      "--held_out_every", "2"])
    train = TokenFile(tmp_path / "out/train.tokens")
    assert train.read(0, 4).tolist() == [7, 70001, 1, 7] and train.read(90, 1)[0] == 0 and train.vocab == 70002
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokens(tmp_path)
    with pytest.raises(ConfigError, match="there is no file"):
        load_tokens(tmp_path / "none")


def test_mindrecord_files_and_data_sets_are_read(tmp_path, monkeypatch):
    """The second by a stand-in for the package `datasets`."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(tmp_path / "a.mindrecord"), 1)
    writer.add_schema({"text": {"type": "string"}})
    writer.write_raw_data([{"text": f"record {i} " * 9} for i in range(4)])
    writer.commit()
    prepare_data.run(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "a.mindrecord"), "--held_out_every", "4"])
    assert TokenFile(tmp_path / "out/train.tokens").read(0, 8).astype(np.uint8).tobytes() == b"record 0"
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"text": "one " * 9}, {"text": "two " * 9}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prepare_data.run(["--out", str(tmp_path / "hub"), "--dataset", "some/set", "--held_out_every", "2"])
    assert asked == [(("some/set", None), {"split": "train"})] and len(TokenFile(tmp_path / "hub/held_out.tokens")) == 37
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/set' on the Hub")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(ConfigError, match="cannot be loaded.\n.*Couldn't reach"):
        prepare_data.run(["--out", str(tmp_path / "hub"), "--dataset", "some/set"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install"):
        prepare_data.run(["--out", str(tmp_path / "hub"), "--dataset", "some/set"])


@pytest.mark.parametrize("out, text", [("texts", "texts"), ("texts/deep", "texts"), ("texts/00.txt", "texts/01.txt")])
def test_token_files_go_where_no_text_is(made, tmp_path, out, text):
    before = sorted(made[0].rglob("*"))
    with pytest.raises(ConfigError, match="--out is inside of --text|--out = .* is a file"):
        prepare_data.run(["--out", str(tmp_path / out), "--text", str(tmp_path / text)])
    assert sorted(made[0].rglob("*")) == before
    with pytest.raises(ConfigError, match=r"train.tokens' is no text"):
        prepare_data.run(["--out", str(tmp_path / "more"), "--text", str(made[1] / "train.tokens")])
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("line, says", [
    (b"not json", "line 3 of '.*rows.jsonl' is not JSON"), (b'\xef\xbb\xbf{"text": "a"}', "line 3 of .* is not JSON"),
    (b'{"text": "\xff"}', "line 3 of .* is not JSON"), (b'{"text": null}', "line 3', 'text' is no text"),
    (b'{"text": 7}', "line 3', 'text' is no text"), (b"[1]", "line 3', there is no row"),
    (b'{"body": "a"}', "line 3', a row has no 'text'"),
    (b'{"text": "a", "text": "b"}', "line 3 of .* is not JSON"), (rb'{"text": "\ud800"}', "document 2 is no text"),
])
def test_a_line_that_is_no_row_is_told(tmp_path, line, says):
    """A blank one is no row, and skipped."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "ab"}\n \n' + line + b"\n")
    argv = ["--out", str(tmp_path / "out"), "--text", str(file), "--held_out_every", "2"]
    with pytest.raises(ConfigError, match=says):
        prepare_data.run(argv)
    file.write_bytes(b'{"text": "ab"}\n \n\n{"text": "c"}')
    prepare_data.run(argv)
    assert [len(TokenFile(tmp_path / f"out/{name}.tokens")) for name in ("train", "held_out")] == [3, 2]


def test_bytes_are_taken_as_they_are_and_a_tokenizer_wants_text(tmp_path, capsys):
    data = b"ok \xff\xfe\x80 b\r\ntes\n"
    (tmp_path / "a.txt").write_bytes(data)
    prepare_data.run(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "a.txt")])
    made = TokenFile(tmp_path / "out/train.tokens")
    assert made.read(0, len(made)).astype(np.uint8).tobytes() == data + b"\0"
    assert "nothing is held out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not UTF-8") as caught:
        list(prepare_data.documents(SimpleNamespace(text=tmp_path / "a.txt", dataset=None, column="text")))
    assert "a.txt" in str(caught.value) and "0xff at offset 3" in str(caught.value)


@pytest.mark.parametrize("argv, says", [
    (["--text", "a"], "--out is missing"), (["--out", "a"], "neither --text nor --dataset"),
    (["--out", "a", "--text", "b", "--dataset", "c"], "are two sources"),
    (["--out", "a", "--text", "b", "--held_out_every", "1"], "--held_out_every is 1"),
    (["--out", "a", "--text", "b", "--held_out_every", "0"], "--held_out_every is 0"),
])
def test_options_that_do_not_go_together_are_told(argv, says):
    with pytest.raises(ConfigError, match=says):
        prepare_data.run(argv)


def test_what_the_library_refuses_is_one_message_of_a_script(capsys):
    def refused():
        raise CheckpointError("For 'x', no.", "y", "z", "w")
    assert script(refused) == 2
    said = capsys.readouterr().err
    assert "For 'x', no." in said and "fix:  w" in said and "Traceback" not in said


# -- conversations -----------------------------------------------------------------------------------------------------
ANSWER = {"role": "assistant", "content": "b"}


def chat(file: Path, talks, **how) -> DataConfig:
    """A file of conversations, and of lines without any."""
    file.write_text("\n\n".join(json.dumps({"messages": talk}) for talk in talks))
    return DataConfig(path=str(file), format="chat", **how)


def test_only_answers_have_labels(tmp_path):
    file = tmp_path / "chat.jsonl"
    talks = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"yes {i}"}] for i in range(8)]
    text = load_text(chat(file, talks, held_out_every=4), 256, 64)
    ids, labels = text.batch(0, 0, 6, 64)
    answers = sorted(bytes(row[row >= 0].astype(np.uint8)) for row in labels)
    assert answers == [b"yes %d<|end|>\n" % i for i in (0, 1, 2, 4, 5, 6)], "an epoch: each once"
    row, at = labels[0], int(np.flatnonzero(labels[0] >= 0)[0])
    assert ids[0, at] == ord("\n") and np.array_equal(ids[0, at + 1:at + 5], row[at:at + 4])
    assert b"<|user|>" in ids[0].astype(np.uint8).tobytes() and not np.array_equal(text.batch(0, 1, 6, 64)[0], ids)
    held = text.held_out_batch(0, 1, 2, 64)[1]
    assert sorted(bytes(row[row >= 0].astype(np.uint8))[:5] for row in held) == [b"yes 3", b"yes 7"]
    with pytest.raises(ConfigError, match="line 1 is no conversation"):
        load_text(chat(file, [3]), 256, 64)


@pytest.mark.parametrize("messages, says", [
    ([{"role": "bot", "content": "a"}], "of message 1, the role is 'bot'"), (["a"], "message 1 is no object"),
    ([{"role": "user", "content": None}], "'content' is null"), ([{"content": "a"}], "'role' is missing"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "'content' is no text"),
])
def test_a_message_that_is_none_is_told_with_its_line(tmp_path, messages, says):
    with pytest.raises(ConfigError, match="line 3 is no conversation") as caught:
        load_text(chat(tmp_path / "chat.jsonl", [[], messages]), 256, 64)
    assert says in str(caught.value) and "mend the line" in str(caught.value)


def test_conversations_without_an_answer_are_counted(tmp_path, capsys):
    talks = [[ANSWER]] * 4 + [[], [{"role": "system", "content": "a"}], [{"role": "user", "content": "a" * 99}, ANSWER]]
    text = load_text(chat(tmp_path / "chat.jsonl", talks, held_out_every=2), 256, 64)
    said = capsys.readouterr().err
    assert "2 of 7 conversations" in said and "1 of 7 conversations" in said and "no answer within train.seq = 64" in said
    batches = text.held_out_batches(3, 64)
    assert [(labels >= 0).any(1).tolist() for _, labels in batches] == [[True, True, False]]


# -- who data are ------------------------------------------------------------------------------------------------------
def said(call, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_checkpoint_knows_its_data_and_says_what_differs(made, tmp_path):
    """Settings and contents, of all three kinds; a checkpoint of before has four of the values."""
    out, t = made[1], TrainConfig(seq=32)
    talks, tokens = chat(tmp_path / "chat.jsonl", [[ANSWER]] * 40), DataConfig(path=str(out))
    text = DataConfig(path=str(made[0]))
    kinds = [(talks, {"template": "chatml"}, ["template: plain in the checkpoint, chatml here"]),
             (talks, {"held_out_every": 7}, ["held_out_every: 20"]), (tokens, {"documents": True}, ["documents: False"]),
             (text, {"held_out_every": 7}, ["held_out_every: 20", "text"]), (text, {"max_bytes": 5000}, ["text"]),
             (talks, {"path": str(made[0]), "format": "text"}, ["format: chat", "plain in the checkpoint, not there"])]
    for cfg, other, words in kinds:
        held = stream_values(t, load_text(cfg, 256, 32))
        check_same_data(t, load_text(cfg, 256, 32), held)
        theirs = load_text(replace(cfg, **other), 256, 32)
        said(partial(check_same_data, t, theirs, held), "not those of the checkpoint", *words)
        old = {key: held[key] for key in ("seed", "batch", "seq", "text")}
        check_same_data(t, load_text(cfg, 256, 32), old)
        said(partial(check_same_data, replace(t, seed=5), load_text(cfg, 256, 32), old), "seed: 0 in the checkpoint, 5 here")
    held = stream_values(t, load_text(tokens, 256, 32))
    (out / "held_out.tokens").write_bytes((out / "train.tokens").read_bytes())
    said(lambda: check_same_data(t, load_text(tokens, 256, 32), held), "checkpoint: held_out.")


@pytest.fixture
def words(tmp_path):
    """Two tokenizers' folders and the token files that the first one made."""
    tokenizers = pytest.importorskip("tokenizers", reason="an extra: pip install ms_dtensor[tokenizers]")
    for name, order in (("one", 1), ("two", -1)):
        (tmp_path / name).mkdir()
        known = ["<|endoftext|>", "[UNK]", *[f"w{i}" for i in range(300)][::order]]
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(known)}, "[UNK]"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        model.save(str(tmp_path / name / "tokenizer.json"))
    (tmp_path / "one/tokenizer_config.json").write_text("{}")
    (tmp_path / "texts").mkdir()
    for i in range(6):
        (tmp_path / f"texts/{i}.txt").write_text(" ".join(f"w{i + k}" for k in range(90)))
    prepare_data.run(["--out", str(tmp_path / "out"), "--text", str(tmp_path / "texts"), "--held_out_every", "3",
                      "--tokenizer", str(tmp_path / "one")])
    return tmp_path


def test_token_files_know_their_tokenizer(words):
    out, one, two = words / "out", str(words / "one"), str(words / "two")
    assert sorted(f.name for f in out.iterdir()) == ["held_out.tokens", "tokenizer.json", "tokenizer_config.json",
                                                     "train.tokens"]
    cfg, nowhere = DataConfig(path=str(out)), str(words / "none")
    assert own_tokenizer(cfg) == str(out / "tokenizer.json") == find_tokenizer(nowhere, cfg, None)
    load_text(replace(cfg, tokenizer=one), 302, 16)
    said(lambda: load_text(replace(cfg, tokenizer=two), 302, 16), "is not the one that made it", "--data.tokenizer")
    assert find_tokenizer(two, cfg, None) == str(out / "tokenizer.json") and find_tokenizer(two, cfg, one) == one
    assert find_tokenizer(two, DataConfig(), None) == Path(two) / "tokenizer.json"
    assert find_tokenizer(nowhere, DataConfig(), None) is None
    for path in (str(words / "texts"), None):
        said(lambda path=path: load_text(DataConfig(path=path, tokenizer=one), 302, 16), "data.path names a text",
             "prepare_data.py --tokenizer makes token files")
    own = Config(data=cfg, model=ModelConfig(vocab_size=302))
    assert read_tokens(nowhere, str(words / "texts/0.txt"), None, own, 16)[:2].tolist() == [2, 3]
    assert read_tokens(nowhere, str(out / "train.tokens"), None, own, 16)[:2].tolist() == [2, 3]
    said(lambda: read_tokens(nowhere, str(out / "train.tokens"), two, own, 16), "is not the one that made it")
    said(lambda: read_tokens(nowhere, str(out), None, own, 16), "is no text", f"--text {out}/held_out.tokens")
    said(lambda: load_text(DataConfig(path=str(words)), 302, 16), "is no text")
    made = (out / "train.tokens").read_bytes()
    (out / "train.tokens").write_bytes(prepared(made, 0))
    said(lambda: load_text(cfg, 302, 16), "do not belong together")
    said(lambda: find_tokenizer(nowhere, cfg, None), "it is not known which tokenizer", "--tokenizer")
    (out / "train.tokens").write_bytes(made)
    (out / "tokenizer.json").unlink()
    said(lambda: find_tokenizer(nowhere, cfg, None), f"there is no file '{out}/tokenizer.json'", "--tokenizer")


def prepared(file: bytes, tokenizer: int) -> bytes:
    """A token file as of another tokenizer, 0: as it was before files said it."""
    *fields, _, _ = HEADER.unpack(file[:HEADER.size])
    return HEADER.pack(*fields, zlib.crc32(HEADER.pack(*fields, 0, tokenizer)), tokenizer) + file[HEADER.size:]


def test_two_preparations_into_one_folder_do_not_mix(made, tmp_path):
    argv = ["--out", str(tmp_path / "more"), "--text", str(made[0] / "00.txt")]
    (tmp_path / "more").mkdir()
    with prepare_data._alone(tmp_path / "more"):
        said(lambda: prepare_data.run(argv), "another one is writing into", "--out")
    prepare_data.run(argv)


def test_a_full_disk_is_one_message(made, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(prepare_data.os, "fsync", full)
    argv = ["--out", str(tmp_path / "more"), "--text", str(made[0] / "00.txt")]
    assert script(lambda: prepare_data.run(argv)) == 2
    told = capsys.readouterr().err
    assert f"'{tmp_path / 'more'}' cannot be written: No space left" in told and "Traceback" not in told


def test_what_of_a_conversation_is_not_read_is_told(tmp_path, capsys):
    file = tmp_path / "chat.jsonl"
    talks = [[ANSWER]] * 4 + [[{**ANSWER, "weight": 0}, {**ANSWER, "content": "c", "weight": 1, "name": "x"}],
                              [{**ANSWER, "content": "d" * 99}], [{**ANSWER, "tool_calls": []}]]
    cfg = chat(file, talks, held_out_every=7)
    text, told = load_text(cfg, 256, 64), capsys.readouterr().err
    assert "1 of 7 conversations" in told and "answers beyond train.seq = 64 tokens: cut off" in told
    assert "role, content, weight are read, and not name" in told and "tool_calls" not in told
    ids, counted = text.train[4]
    assert bytes(i for i, c in zip(ids, counted) if c) == b"c<|end|>\n"
    for message, says in (({**ANSWER, "content": "", "tool_calls": [{"x": 1}]}, "'tool_calls'"),
                          ({**ANSWER, "weight": 0.5}, "'weight' is 0.5")):
        said(lambda message=message: load_text(chat(file, [[message]]), 256, 64), "line 1 is no conversation", says)
    file.write_text('{"messages":[{"role":"assistant","content":"one","content":"two"}]}')
    said(lambda: load_text(cfg, 256, 64), "line 1 is no conversation", "'content' is there twice")
