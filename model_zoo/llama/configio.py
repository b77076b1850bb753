# SPDX-License-Identifier: Apache-2.0
"""Reads a `Config` from YAML and the command line, checks every key and type, and prints it back.

Not here: ranges, and what values mean together (`config.check`). A wrong key names its closest match; a wrong type says
what was expected. Nothing is coerced but int -> float and list -> tuple. Of YAML only what a configuration needs is read:
no tags, no aliases, no dates, no key twice, of numbers the decimal ones, and little of it.
"""
from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ms_dtensor.core.plain_yaml import plain_yaml
from ms_dtensor.errors import ConfigError

from .config import Config, check, check_ranges
from .hf import read_config

_MOST_BYTES = 64 << 10
USAGE = "[--config FILE.yaml] [--section.key value ...] [--print-config]"


def load(argv: Sequence[str], world: int | None = None) -> tuple[Config, bool]:
    """The checked configuration of a command line, and whether `--print-config` was asked for.

    `world` is the number of workers; None: as many as the configuration asks for.
    """
    tree: dict = {}
    overrides, show, rest = [], False, list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--print-config":
            show = True
            continue
        key, eq, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ConfigError(f"For the command line, {_short(word)} is not an option.", f"{len(argv)} words",
                              "Options begin with two dashes.", f"usage: {USAGE}")
        if not eq:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"For the command line, '--{key[:80]}' has no value.", f"{len(argv)} words",
                                  "Each option but --print-config has one.",
                                  [f"usage: {USAGE}", "--section.key=--text for one that begins with two dashes"])
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
    cfg = _with_published_sizes(build(Config, tree), tree)
    check(cfg, cfg.parallel.dp * cfg.parallel.tp * cfg.parallel.pp if world is None else world)
    return cfg, show


def _with_published_sizes(cfg: Config, tree: dict) -> Config:
    """`train.init_hf` brings the section `model`; one that is given too must say the same."""
    if cfg.train.init_hf is None:
        return cfg
    model = read_config(cfg.train.init_hf)
    given = tree.get("model") or {}
    unlike = [key for key in given if getattr(cfg.model, key) != getattr(model, key)]
    if unlike:
        raise ConfigError(f"For the configuration, model.{unlike[0]} is not that of train.init_hf.",
                          f"{getattr(cfg.model, unlike[0])}, and {getattr(model, unlike[0])} in '{cfg.train.init_hf}'",
                          "Weights have the sizes of their config.json.", "leave the section 'model' out")
    return replace(cfg, model=model)


def checked_alone(tree: dict) -> dict:
    """The tree with its section `model` whole, as a run has it: a size that is not told has a default, or is that of
    `train.init_hf`. Refuses keys, types and numbers that no run can have. Not: what they mean together, which options may
    still change."""
    cfg = _with_published_sizes(build(Config, tree), tree)
    check_ranges(cfg)
    return tree | {"model": asdict(cfg.model)}


def build(kind: type, tree: dict, where: str = ""):
    """`kind` (a dataclass) from nested dictionaries; `where` is the dotted prefix used in messages."""
    hints = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)}
    for key in tree:
        if key not in known:
            raise _unknown(f"{where}{key}", where, known)
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in tree.items()})


def _unknown(key: str, where: str, known: set[str]) -> ConfigError:
    key = key[:200]
    leaf = key[len(where):]
    near = difflib.get_close_matches(leaf, known, n=1, cutoff=0.5)
    owners = [f"{s.name}.{leaf}" for s in fields(Config) if is_dataclass(_section(s.name))
              and leaf in {f.name for f in fields(_section(s.name))}]
    fix = [f"'{where}{near[0]}' is the closest match"] if near else []
    fix += [f"'{owner}' exists" for owner in owners if owner != f"{where}{leaf}"]
    return ConfigError(f"For the configuration, '{key}' is not a key.", where[:-1] or "the whole tree",
                       f"{'Keys of ' + where[:-1] if where else 'Sections'}: {', '.join(sorted(known))}.",
                       fix or "use one of these")


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
    elif origin is tuple and args[-1] is Ellipsis:
        if isinstance(value, (list, tuple)):
            return tuple(_value(args[0], v, f"{key}[{i}]") for i, v in enumerate(value))
        if not isinstance(value, dict):  # one is a list of one
            return (_value(args[0], value, key),)
    elif origin is tuple:
        if isinstance(value, (list, tuple)) and len(value) == len(args):
            return tuple(_value(a, v, f"{key}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))
    elif hint is float:
        if isinstance(value, float) or _is_int(value):
            return float(value)
    elif isinstance(value, hint) and (hint is not int or _is_int(value)) and value != "":
        return value
    whole = hint is int and isinstance(value, float) and value.is_integer() and _is_int(int(value))
    raise ConfigError(f"For the configuration, {key} cannot be {_short(value)}.",
                      f"got {type(value).__name__} {_short(value)}", f"{key} is {_describe(hint)}.",
                      f"--{key} {int(value)}" if whole else f"--{key} with such a value")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2 ** 63  # more is no size of anything


def _short(value) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of thousands of digits
        text = "a huge number"
    return text if len(text) < 100 else f"{text[:90]}..."


def _describe(hint) -> str:
    if is_dataclass(hint):
        return "a section with keys " + ", ".join(f.name for f in fields(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[-1] is Ellipsis:
        return f"a list, each {_describe(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(typing.get_args(hint))}: " + ", ".join(_describe(a) for a in typing.get_args(hint))
    return {int: "a whole number, written plainly: 10, and not 1e1, 10.0, 010, 1_0 or 0xa",
            float: "a number, such as 10, 0.5 or 1e-3",
            bool: "true or false", str: "text, of one character at least"}.get(hint, str(hint))


def _yaml(text: str | bytes):
    """What YAML says, or why not, as ValueError."""
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{len(text)} bytes")
    return plain_yaml(text)


def _scalar(text: str):
    """A command-line value as YAML reads it; nothing is an empty text, as of a shell's variable that is not set."""
    try:
        return _yaml(text) if text.strip() else ""
    except ValueError:
        return text


def _read_yaml(path: str) -> dict:
    shown = path if len(path) < 200 else f"{path[:190]}..."
    try:
        if not Path(path).is_file():  # nothing that blocks
            raise FileNotFoundError
        with open(path, "rb") as file:
            tree = _yaml(file.read(_MOST_BYTES + 1))
    except FileNotFoundError:
        raise ConfigError(f"For '--config', there is no file '{shown}'.", f"looked in {Path.cwd()}", "It names a YAML file.",
                          "the configurations of this recipe are in model_zoo/llama/configs") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"For '--config', '{shown}' cannot be read.", str(error)[:500], "It names a file of at most "
                          f"{_MOST_BYTES >> 10} KiB of plain YAML: no tags, no aliases, no key twice, nothing nested deep.",
                          "see the configurations in model_zoo/llama/configs") from None
    if not isinstance(tree or {}, dict):
        raise ConfigError(f"For '--config', '{shown}' is not a tree of sections.", f"got {_short(tree)}",
                          f"Sections are {', '.join(f.name for f in fields(Config))}.", "write  section: {key: value}")
    return tree or {}


def model_values(cfg: Config) -> dict[str, Any]:
    """Of the sections `model` and `lora` every value by its dotted key: what a checkpoint's weights mean."""
    def flat(value: Any, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {key: value}
        return {k: v for name, child in value.items() for k, v in flat(child, f"{key}.{name}").items()}
    tree = asdict(cfg)
    return flat(tree["model"], "model") | flat(tree["lora"], "lora")


def held_values(values: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Of a checkpoint's values those of one part of the state, such as `config`."""
    return {key[len(part) + 1:]: value for key, value in values.items() if key.startswith(f"{part}.")}


def unlike_held(ours: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, str]:
    """What a run does not have as its checkpoint has it: a line by key."""
    return {key: f"{key}: {held.get(key, 'not there')} in the checkpoint, {ours.get(key, 'not there')} here"
            for key in (*ours, *(key for key in held if key not in ours))
            if key not in ours or key not in held or ours[key] != held[key]}


def check_same_model(cfg: Config, held: dict[str, Any], where: str) -> None:
    """Refuses to go on from a checkpoint whose `model_values` are other ones; keys that it lacks had their defaults."""
    tree: dict[str, Any] = {}
    for key, value in held.items():
        *sections, last = key.split(".")
        node = tree
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value
    unlike = unlike_held(model_values(cfg), model_values(build(Config, tree)))
    if unlike:
        raise ConfigError(f"For the configuration, the model is not that of the checkpoint: {', '.join(unlike)}.",
                          f"'{where}'\n" + "\n".join(unlike.values()), "A run goes on with the model that it began with.",
                          ["the run's own settings", "another --train.log_dir begins a new run"])


def dump(cfg: Config) -> str:
    """The resolved tree as YAML that `--config` reads back."""
    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain(asdict(cfg)), sort_keys=False)
