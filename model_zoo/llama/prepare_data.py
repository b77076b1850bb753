# SPDX-License-Identifier: Apache-2.0
"""Turns texts into token files for training: `train.tokens` and `held_out.tokens` in a folder; goes on where it stopped.

    python model_zoo/llama/prepare_data.py --out data/books --text books/ --tokenizer Qwen3-0.6B
    python model_zoo/llama/prepare_data.py --out data/wiki --text wiki.jsonl --column text
    python model_zoo/llama/prepare_data.py --out data/hub --dataset wikitext --name wikitext-2-raw-v1 --split train
    python model_zoo/llama/prepare_data.py --verify data/books

Then `--data.path data/books`. A document is a file, a line of a .jsonl file (its `--column`), a row of a data set, or a
record of MindRecord files (.mindrecord); after each comes the tokenizer's token for the end of a text (of bytes: 0).
One document in `--held_out_every` is held out. The tokenizer is copied beside the token files, which know it again.
The `datasets` package is an extra, `tokenizers` too; bytes need neither.
"""
from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a script: make the repository root importable, and not this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from model_zoo.llama.ranks import script
from model_zoo.llama.token_file import BLOCK, TokenFile, is_token_file, write
from model_zoo.llama.tokens import Bytes, Tokens, copy_tokenizer, decoded, fingerprint, json_row, load_tokens
from ms_dtensor.core.files import own_file, replacing
from ms_dtensor.errors import ConfigError

PARTS = ("train", "held_out")
SAVED_EVERY = 2.0  # seconds


def documents(o: argparse.Namespace, raw: bool = False) -> Iterator[tuple[str | bytes, float]]:
    """(text, share of the whole that is done with it), in a fixed order; `raw`: what is in a file as its bytes."""
    if o.dataset:
        try:
            from datasets import load_dataset
        except ImportError as error:  # not there, or what it needs is not
            raise ConfigError("For 'prepare_data.py', the package 'datasets' cannot be imported.",
                              f"--dataset {o.dataset}: {error}"[:300], "Data sets of Hugging Face's need it, files do not.",
                              "in the checkout: pip install '.[data]'") from None
        try:
            rows = load_dataset(o.dataset, o.name, split=o.split)
        except Exception as error:  # of the package's many kinds: no network, no such set, part or column
            raise ConfigError("For 'prepare_data.py', the data set cannot be loaded.",
                              f"--dataset {o.dataset}, --name {o.name}, --split {o.split}: {error}"[:400],
                              "It is one on the Hub, or a folder with files that the package 'datasets' reads.",
                              "--dataset, --name and --split of one that is there") from error
        for i, row in enumerate(rows):
            yield _column(row, o.column, f"{o.dataset}, row {i + 1}"), (i + 1) / len(rows)
        return
    files = _files(Path(o.text))
    sizes = np.cumsum([max(f.stat().st_size, 1) for f in files])
    for file, done in zip(files, sizes / sizes[-1], strict=True):
        try:
            for text in _texts(file, o.column, raw):
                yield text, done
        except OSError as error:
            raise ConfigError(f"For 'prepare_data.py', '{file}' cannot be read: {error.strerror or error}.", "",
                              "Every file of --text is read.", "make it readable, or take it out") from None


def _files(root: Path) -> list[Path]:
    files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file() and f.suffix != ".db")
    if not files:
        raise ConfigError(f"For 'prepare_data.py', there is no text in '{root}'.", "", "A file, or a folder of files.",
                          "--text with one")
    for file in files:
        if file.suffix == ".tokens" and is_token_file(file):
            raise ConfigError(f"For 'prepare_data.py', '{file}' is no text.", f"--text {root}",
                              "It is a token file, what this script makes of texts.", "--text without it")
    return files


def _texts(file: Path, column: str, raw: bool) -> Iterator[str | bytes]:
    """The documents of a file."""
    if file.suffix == ".jsonl":
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = json_row(line)
                    except (ValueError, RecursionError) as error:
                        raise ConfigError(f"For 'prepare_data.py', line {number} of '{file}' is not JSON.",
                                          f"{line[:60]!r}: {error}"[:200],
                                          "One object a line, no key twice, in UTF-8 without a mark.",
                                          "mend the line") from None
                    yield _column(row, column, f"{file}, line {number}")
    elif file.suffix == ".mindrecord":
        import mindspore.dataset as ds
        rows = ds.MindDataset(str(file), shuffle=False).create_dict_iterator(num_epochs=1, output_numpy=True)
        for number, row in enumerate(rows, 1):
            yield _column(row, column, f"{file}, record {number}")
    elif raw:
        yield file.read_bytes()
    else:
        yield decoded(file.read_bytes(), file)


def _column(row, column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise ConfigError(f"For '{where}', there is no row.", f"{row!r}"[:80], "A row is an object of named columns.",
                          "mend it")
    if column not in row:
        raise ConfigError(f"For '{where}', a row has no '{column}'.", f"it has {', '.join(map(str, row))}"[:200],
                          "--column names the text.", f"--column with one of {list(row)}"[:200])
    text = row[column]
    if isinstance(text, np.ndarray) and text.size == 1:
        text = text.item()
    if not isinstance(text, str):
        raise ConfigError(f"For '{where}', '{column}' is no text.", f"{type(text).__name__}: {text!r}"[:80],
                          "--column names a column of texts.", ["mend or take out the row", "another --column"])
    return text


class Progress:
    """Which documents are in the unfinished files: enough to go on after a kill at any moment."""

    def __init__(self, out: Path, made_of: dict):
        self.file, self.made_of, self.done, self.sizes = out / "progress.json", made_of, 0, dict.fromkeys(PARTS, 0)
        if self.file.exists():
            said = json.loads(self.file.read_text())
            if said["made_of"] != made_of:
                unlike = [key for key in made_of if said["made_of"].get(key) != made_of[key]]
                raise ConfigError(f"For 'prepare_data.py', '{out}' was begun with another {unlike[0].replace('_', ' ')}.",
                                  f"{said['made_of'].get(unlike[0])} there, {made_of[unlike[0]]} here",
                                  "A folder is gone on with as it was begun.", [f"remove {self.file}", "another --out"])
            self.done, self.sizes = said["done"], said["sizes"]

    def save(self, done: int, files) -> None:
        for name, file in files.items():
            file.flush()
            os.fsync(file.fileno())
            self.sizes[name] = file.tell()
        with replacing(self.file) as new:
            new.write(json.dumps({"made_of": self.made_of, "done": done, "sizes": self.sizes}).encode())


class Bar:
    """A bar where a terminal is there, else a line every ten seconds."""

    def __init__(self):
        self.started, self.shown = time.monotonic(), 0.0

    def show(self, share: float, documents: int, tokens: int, last: bool = False) -> None:
        now, live = time.monotonic(), sys.stderr.isatty()
        if not last and now - self.shown < (0.1 if live else 10):
            return
        self.shown, full = now, int(30 * share)
        print(f"{chr(13) if live else ''}[{'#' * full}{'.' * (30 - full)}] {share:4.0%}  {documents:,} documents  "
              f"{tokens:,} tokens  {tokens / max(now - self.started, 1e-9):,.0f}/s", end="\n" if last or not live else "",
              file=sys.stderr, flush=True)


def prepare(o: argparse.Namespace) -> dict[str, int]:
    """Tokens by part, written."""
    out, tokens, own = _out(o), load_tokens(o.tokenizer, o.end_token), fingerprint(o.tokenizer)
    if tokens.end is None:
        print("note: no token ends a document: they run together, and data.documents cannot tell them apart. "
              "tokenizer_config.json beside the tokenizer can name one (eos_token), or --end_token TEXT", file=sys.stderr)
    elif o.tokenizer:
        print(f"a document ends with {tokens.decode([tokens.end])!r} (--end_token TEXT for another)", file=sys.stderr)
    if o.text:
        _files(Path(o.text))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"For 'prepare_data.py', --out = '{out}' cannot be made: {error.strerror}.", "",
                          "It is the folder of the token files.", "--out with a folder") from None
    try:
        with _alone(out):
            return _prepare(o, out, tokens, own)
    except OSError as error:
        raise ConfigError(f"For 'prepare_data.py', '{error.filename or out}' cannot be written: {error.strerror or error}.",
                          f"--out {out}", "Token files and what makes them are there.",
                          ["room there, and the same command goes on where it stopped", "another --out"]) from None


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other `prepare_data.py` writes into the folder meanwhile; the system lets the lock go with the process."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ConfigError(f"For 'prepare_data.py', another one is writing into '{out}' at this moment.", f"--out {out}",
                          "The documents of two would mix.", ["wait for it", "another --out", "end the other one"]) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(folder)


def _prepare(o: argparse.Namespace, out: Path, tokens: Tokens, own: int) -> dict[str, int]:
    dtype = "<u2" if tokens.size <= 2 ** 16 else "<u4"
    progress = Progress(out, {"text": o.dataset or str(Path(o.text).resolve()),
                              "tokenizer": o.tokenizer and f"{o.tokenizer} (CRC-32 {own:#x})",
                              "end_token": f"{tokens.end}",
                              "held_out_every": o.held_out_every, "column": o.column, "part_of_it": [o.name, o.split]})
    with contextlib.ExitStack() as closing:
        mode = "r+b" if progress.done else "w+b"
        files = {name: closing.enter_context(open(out / f"{name}.unfinished", mode, opener=own_file)) for name in PARTS}
        for name, file in files.items():
            file.seek(progress.sizes[name])
            file.truncate()
        _fill(files, o, tokens, dtype, progress)
    if o.tokenizer:
        copy_tokenizer(o.tokenizer, out)
    counts = {}
    for name in PARTS:
        unfinished = out / f"{name}.unfinished"
        counts[name] = unfinished.stat().st_size // np.dtype(dtype).itemsize
        whole = np.memmap(unfinished, dtype, "r") if counts[name] else np.zeros(0, dtype)
        with open(out / f"{name}.new", "wb", opener=own_file) as new:
            write(new, dtype, tokens.size, tokens.end, counts[name],
                  (whole[i:i + BLOCK] for i in range(0, counts[name], BLOCK)), own)
        os.replace(out / f"{name}.new", out / f"{name}.tokens")
    for name in PARTS:
        (out / f"{name}.unfinished").unlink()
    progress.file.unlink()
    return counts


def _out(o: argparse.Namespace) -> Path:
    """Where the token files go; refused where they would be read as text."""
    out = Path(o.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"For 'prepare_data.py', --out = '{out}' is a file.", "", "It is the folder of the token files.",
                          "--out with a folder")
    if o.text and Path(o.text).is_dir() and out.resolve().is_relative_to(Path(o.text).resolve()):
        raise ConfigError("For 'prepare_data.py', --out is inside of --text.", f"--out {out}, --text {o.text}",
                          "Every file below --text is read: the token files would be, too.", "--out with another folder")
    return out


def _fill(files: dict, o: argparse.Namespace, tokens: Tokens, dtype: str, progress: Progress) -> None:
    """Writes what is left of the documents, noting now and then how far it is."""
    bar, saved, done, first = Bar(), time.monotonic(), 0, progress.done
    end = [] if tokens.end is None else [tokens.end]
    for done, (text, share) in enumerate(documents(o, isinstance(tokens, Bytes)), 1):
        if done <= first:
            continue
        part = "held_out" if done % o.held_out_every == 0 else "train"
        try:
            ids = tokens.encode(text)
        except UnicodeEncodeError as error:  # half of a pair, which JSON can spell
            raise ConfigError(f"For 'prepare_data.py', document {done} is no text.", str(error)[:200],
                              "Half of a surrogate pair is no character.", "mend the document") from None
        files[part].write(np.array([*ids, *end], dtype).tobytes())
        if time.monotonic() - saved > SAVED_EVERY:
            progress.save(done, files)
            saved = time.monotonic()
        bar.show(share, done, sum(f.tell() for f in files.values()) // np.dtype(dtype).itemsize)
    progress.save(done, files)
    bar.show(1.0, done, sum(f.tell() for f in files.values()) // np.dtype(dtype).itemsize, last=True)


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the token files")
    parser.add_argument("--text", help="a file or a folder of them: text, .jsonl, .mindrecord")
    parser.add_argument("--dataset", help="a data set of Hugging Face's, by name or path")
    parser.add_argument("--name", help="which configuration of the data set")
    parser.add_argument("--split", default="train")
    parser.add_argument("--column", default="text", help="of a row, the one with the text")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder; default: bytes")
    parser.add_argument("--end_token", metavar="TEXT", help="the tokenizer's token that ends a document; default: eos_token "
                        "of the tokenizer_config.json beside it, or its known names")
    parser.add_argument("--held_out_every", type=int, default=20, help="one document in so many is held out")
    parser.add_argument("--verify", metavar="FOLDER", help="read every byte of token files that are there")
    o = parser.parse_args(argv)
    if o.verify:
        for name in PARTS:
            file = TokenFile(Path(o.verify) / f"{name}.tokens")
            file.verify()
            print(f"{file.path}: {len(file):,} tokens, as they were written")
        return
    wrong = ("--out is missing" if not o.out else "there is neither --text nor --dataset" if not o.text and not o.dataset
             else "--text and --dataset are two sources" if o.text and o.dataset else
             "--end_token names one of a --tokenizer, and there is none" if o.end_token is not None and not o.tokenizer else
             f"--held_out_every is {o.held_out_every}" if o.held_out_every < 2 else None)
    if wrong:
        raise ConfigError(f"For 'prepare_data.py', {wrong}.", " ".join(argv),
                          "--out, and one of --text and --dataset; --held_out_every is at least 2: 1 would hold out all.",
                          "python model_zoo/llama/prepare_data.py --help")
    counts = prepare(o)
    print(", ".join(f"{name}: {count:,} tokens" for name, count in counts.items()))
    if not counts["held_out"]:
        print(f"note: nothing is held out: there are fewer than {o.held_out_every} documents (--held_out_every). Training "
              "needs some: cut the text into more documents, or a smaller --held_out_every", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(script(lambda: run(sys.argv[1:])))
