# SPDX-License-Identifier: Apache-2.0
"""Conversations for fine-tuning: a template makes text of them, and only the assistant's words count in the loss.

A file holds one conversation a line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.
"""
from __future__ import annotations

import codecs
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import rank

from .tokens import Tokens, json_row

ROLES = ("system", "user", "assistant", "tool")
READ = ("role", "content", "weight")
UNREAD = ("tool_calls", "function_call")  # what the model said, too, and no template has a place for
IGNORED = -100  # label of what does not count
# before a message, after it
TEMPLATES = {
    "plain": ("<|{role}|>\n", "<|end|>\n"),
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>\n"),  # Qwen's
    "llama3": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
}


def tokenized(messages: list[dict], tokens: Tokens, template: str) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them the model is to say: what an assistant says, unless its message has
    "weight": 0, and the end of it.

    Special tokens are the template's only: what spells one in a message is text. Raises `ValueError` where it cannot be.

    Example:
        >>> from model_zoo.llama.chat import tokenized
        >>> from model_zoo.llama.tokens import Bytes
        >>> talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        >>> ids, said = tokenized(talk, Bytes(), "plain")
        >>> bytes(i for i, s in zip(ids, said) if s)
        b'2<|end|>\\n'
    """
    before, after = TEMPLATES[template]
    ids, said = [], []
    marks = tokens.marks(before.format(role="user") + after)
    own = sum(i in marks for i in tokens.encode(after)) if marks else 0
    for number, message in enumerate(messages, 1):
        head = tokens.encode(before.format(role=message["role"]))
        new = tokens.encode(message["content"] + after)
        if sum(i in marks for i in new) > own:  # the content spells some: there they are text
            content = tokens.plain(message["content"])
            spelt = next((i for i in content if i in marks), None)
            if spelt is not None:
                raise ValueError(f"the content of message {number} has the token '{tokens.decode([spelt])}', which the "
                                 "tokenizer does not make text of")
            new = content + tokens.encode(after)
        ids += head + new
        counts = message["role"] == "assistant" and message.get("weight") != 0
        said += [False] * len(head) + [counts] * len(new)
    return ids, said


def end_of_answer(tokens: Tokens, template: str) -> int | None:
    """The token that ends an answer, if it is one."""
    ids = tokens.encode(TEMPLATES[template][1].rstrip())
    return ids[0] if len(ids) == 1 else tokens.end


def messages_of(line: bytes) -> list[dict]:
    """The messages of a line; raises `ValueError` that says what is wrong with it."""
    talk = json_row(line)
    messages = talk.get("messages") if isinstance(talk, dict) else None
    if not isinstance(messages, list):
        raise ValueError("it has no list 'messages'")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is no object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                kind = "missing" if key not in message else "null" if message[key] is None else "no text"
                raise ValueError(f"of message {number}, '{key}' is {kind}")
        if message["role"] not in ROLES:
            raise ValueError(f"of message {number}, the role is '{message['role']}'")
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"of message {number}, 'weight' is {message['weight']!r:.40}: 0 and 1 are known")
        for key in UNREAD:
            if message.get(key):
                raise ValueError(f"message {number} has '{key}', which no template has a place for")
    return messages


class Conversations:
    """One conversation a row, cut or filled up to the length; the stream of batches is a function of (file, seed, step)."""

    def __init__(self, path: Path, tokens: Tokens, template: str, seq: int, held_out_every: int, tokenizer: int = 0):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"For the configuration, data.path = '{path}' cannot be read: {error.strerror}.", "",
                              "It is a file of conversations.", "--data.path with one") from None
        rows, silent, cut, shortened = [], 0, 0, 0
        others: set[str] = set()
        for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
            if not line.strip():
                continue
            try:
                messages = messages_of(line)
                others.update(key for message in messages for key in message if key not in READ + UNREAD)
                ids, said = tokenized(messages, tokens, template)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"For '{path}', line {number} is no conversation.", str(error)[:200],
                                  '{"messages": [{"role": "user", "content": "..."}, ...]}; roles are '
                                  f"{', '.join(ROLES)}, content is text.", "mend the line") from None
            if any(said[:seq + 1]):
                rows.append((ids[:seq + 1], said[:seq + 1]))
                shortened += any(said[seq + 1:])
            elif any(said):
                cut += 1
            else:
                silent += 1
        notes = [f"{count} of {len(rows) + silent + cut} conversations of '{path}' have {what}" for count, what in (
            (silent, "no answer: left out"), (cut, f"no answer within train.seq = {seq} tokens: left out"),
            (shortened, f"answers beyond train.seq = {seq} tokens: cut off there")) if count]
        if others:
            notes.append(f"of messages of '{path}' {', '.join(READ)} are read, and not {', '.join(sorted(others))}"[:500])
        for note in notes if rank() == 0 else ():
            print(f"note: {note}", file=sys.stderr)
        self.held_out = rows[held_out_every - 1::held_out_every]
        self.train = [row for i, row in enumerate(rows, 1) if i % held_out_every]
        self._identity = {"format": "chat", "text": zlib.crc32(data), "template": template, "tokenizer": tokenizer,
                          "held_out_every": held_out_every}
        if not self.train or not self.held_out:
            raise ConfigError(f"For '{path}', there are too few conversations.",
                              f"{len(rows)} with an answer within train.seq, {silent} without one, {cut} with a later one",
                              f"One in {held_out_every} is held out, of the others one or more is trained on.",
                              "more of them, or a smaller --data.held_out_every")

    def identity(self) -> dict[str, Any]:
        return self._identity

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Each epoch in an order of its own."""
        places = [divmod(at, len(self.train)) for at in range(step * batch, (step + 1) * batch)]
        orders = {epoch: np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(self.train))
                  for epoch in {epoch for epoch, _ in places}}
        return _rows([self.train[orders[epoch][i]] for epoch, i in places], seq)

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.linspace(0, len(self.held_out), count * batch, endpoint=False).astype(int)
        return _rows([self.held_out[i] for i in at[index * batch:(index + 1) * batch]], seq)

    def held_out_batches(self, batch: int, seq: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each held-out conversation once; what is missing in the last batch has no labels."""
        rows = self.held_out + [([0], [False])] * (-len(self.held_out) % batch)
        return [_rows(rows[i:i + batch], seq) for i in range(0, len(rows), batch)]


def _rows(rows, seq: int) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = np.zeros((len(rows), seq), np.int32), np.full((len(rows), seq), IGNORED, np.int32)
    for row, (tokens, said) in enumerate(rows):
        n = len(tokens) - 1
        ids[row, :n] = tokens[:-1]
        labels[row, :n] = np.where(said[1:], tokens[1:], IGNORED)
    return ids, labels
