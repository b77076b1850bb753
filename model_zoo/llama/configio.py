# SPDX-License-Identifier: Apache-2.0
"""Reads a `Config` from YAML and the command line, checks every key and type, and prints it back.

Not here: what values mean together (`config.check`). A wrong key names its closest match; a wrong type says what was
expected. Nothing is coerced but int -> float and list -> tuple.
"""
from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

import yaml

from ms_dtensor.errors import ConfigError

from .config import Config, check

USAGE = "[--config FILE.yaml] [--section.key value ...] [--print-config]"


def load(argv: Sequence[str], world: int) -> tuple[Config, bool]:
    """The checked configuration of a command line, and whether `--print-config` was asked for."""
    tree: dict = {}
    overrides, show, rest = [], False, list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--print-config":
            show = True
            continue
        key, eq, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ConfigError(f"For the command line, '{word}' is not an option.", "", f"Usage: {USAGE}")
        if not eq:
            if not rest:
                raise ConfigError(f"For the command line, '--{key}' has no value.", "", f"Usage: {USAGE}")
            value = rest.pop(0)
        if key == "config":
            tree = _read_yaml(value)
        else:
            overrides.append((key, value))
    for key, value in overrides:
        *sections, last = key.split(".")
        node = tree
        for name in sections:
            node[name] = node = node[name] if isinstance(node.get(name), dict) else {}
        node[last] = _scalar(value)
    cfg = build(Config, tree)
    check(cfg, world)
    return cfg, show


def build(kind: type, tree: dict, where: str = ""):
    """`kind` (a dataclass) from nested dictionaries; `where` is the dotted prefix used in messages."""
    hints = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    for key in tree:
        if key not in known:
            raise _unknown(f"{where}{key}", where, known)
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in tree.items()})


def _unknown(key: str, where: str, known: set[str]) -> ConfigError:
    leaf = str(key)[len(where):]
    near = difflib.get_close_matches(leaf, known, n=1, cutoff=0.5)
    owners = [f"{s.name}.{leaf}" for s in fields(Config) if is_dataclass(_section(s.name))
              and leaf in {f.name for f in fields(_section(s.name))}]
    fix = [f"'{where}{near[0]}' is the closest match"] if near else []
    fix += [f"'{owner}' exists" for owner in owners if owner != f"{where}{leaf}"]
    return ConfigError(f"For the configuration, '{key}' is not a key.", "",
                       f"{'Keys of ' + where[:-1] if where else 'Sections'}: {', '.join(sorted(known))}.", fix)


def _section(name: str) -> type:
    return typing.get_type_hints(Config)[name]


def _value(hint, value, key: str):
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), value, key)
    if is_dataclass(hint):
        if isinstance(value, dict):
            return build(hint, value, key + ".")
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)) and len(value) == len(args):
            return tuple(_value(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"For the configuration, {key} cannot be {value!r}.", f"got {type(value).__name__} {value!r}",
                      f"{key} is {_describe(hint)}.")


def _describe(hint) -> str:
    if is_dataclass(hint):
        return "a section with keys " + ", ".join(f.name for f in fields(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(typing.get_args(hint))}: " + ", ".join(_describe(a) for a in typing.get_args(hint))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


def _scalar(text: str):
    """A command-line value as YAML reads it, and numbers such as 1e-3, which YAML 1.1 takes for text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _numbers(value)


def _numbers(value):
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    if isinstance(value, str):
        try:
            return float(value) if value[:1] in "+-.0123456789" and "e" in value.lower() else value
        except ValueError:
            return value
    return value


def _read_yaml(path: str) -> dict:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"For '--config', there is no file '{path}'.", f"looked in {Path.cwd()}", "",
                          "the configurations of this recipe are in model_zoo/llama/configs")
    try:
        tree = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"For '--config', '{path}' is not YAML.", str(error)) from None
    if not isinstance(tree or {}, dict):
        raise ConfigError(f"For '--config', '{path}' is not a tree of sections.", f"got {type(tree).__name__}")
    return _numbers(tree or {})


def dump(cfg: Config) -> str:
    """The resolved tree as YAML that `--config` reads back."""
    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain(asdict(cfg)), sort_keys=False)
