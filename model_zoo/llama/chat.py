# SPDX-License-Identifier: Apache-2.0
"""Conversations for fine-tuning: a template makes text of them, and only the assistant's words count in the loss.

A file holds one conversation a line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.
"""
from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from ms_dtensor.errors import ConfigError

from .tokens import Tokens

IGNORED = -100  # label of what does not count
# before a message, after it
TEMPLATES = {
    "plain": ("<|{role}|>\n", "<|end|>\n"),
    "chatml": ("<|im_start|>{role}\n", "<|im_end|>\n"),  # Qwen's
    "llama3": ("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
}


def tokenized(messages: list[dict], tokens: Tokens, template: str) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, and which of them the model is to say: what an assistant says and the end of it.

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
    for message in messages:
        for text, counts in ((before.format(role=message["role"]), False),
                             (message["content"] + after, message["role"] == "assistant")):
            new = tokens.encode(text)
            ids += new
            said += [counts] * len(new)
    return ids, said


class Conversations:
    """One conversation a row, cut or filled up to the length; the stream of batches is a function of (file, seed, step)."""

    def __init__(self, path: Path, tokens: Tokens, template: str, seq: int, held_out_every: int):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"For the configuration, data.path = '{path}' cannot be read: {error.strerror}.", "",
                              "It is a file of conversations.", "--data.path with one") from None
        rows = []
        for number, line in enumerate(data.splitlines(), 1):
            try:
                ids, said = tokenized(json.loads(line)["messages"], tokens, template)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"For '{path}', line {number} is no conversation.",
                                  f"{type(error).__name__}: {error}"[:200],
                                  '{"messages": [{"role": "user", "content": "..."}, ...]}', "mend the line") from None
            if any(said[:seq + 1]):
                rows.append((ids[:seq + 1], said[:seq + 1]))
        held = [i for i in range(len(rows)) if i % held_out_every == held_out_every - 1]
        self.held_out = [rows[i] for i in held]
        self.train = [row for i, row in enumerate(rows) if i not in set(held)]
        self._identity = zlib.crc32(data)
        if not self.train or not self.held_out:
            raise ConfigError(f"For '{path}', there are too few conversations.",
                              f"{len(rows)} with an answer within train.seq",
                              f"One in {held_out_every} is held out, of the others one or more is trained on.",
                              "more of them, or a smaller --data.held_out_every")

    def identity(self) -> int:
        return self._identity

    def batch(self, seed: int, step: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Each epoch in an order of its own."""
        numbers = []
        for at in range(step * batch, (step + 1) * batch):
            epoch, i = divmod(at, len(self.train))
            numbers.append(np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(self.train))[i])
        return _rows([self.train[i] for i in numbers], seq)

    def held_out_batch(self, index: int, count: int, batch: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        at = np.linspace(0, len(self.held_out), count * batch, endpoint=False).astype(int)
        return _rows([self.held_out[i] for i in at[index * batch:(index + 1) * batch]], seq)


def _rows(rows, seq: int) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = np.zeros((len(rows), seq), np.int32), np.full((len(rows), seq), IGNORED, np.int32)
    for row, (tokens, said) in enumerate(rows):
        n = len(tokens) - 1
        ids[row, :n] = tokens[:-1]
        labels[row, :n] = np.where(said[1:], tokens[1:], IGNORED)
    return ids, labels
