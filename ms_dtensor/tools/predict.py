# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor suggest` and `memory`: plans for a model, of its configuration file, before the machine is there.

The figures are those of `md.debug.suggest`; here are only the file, the options and the words.
"""
from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.files import regular
from ..core.plain_yaml import plain_yaml
from ..core.refused import refused
from ..debug.predict import Estimate, Hardware, Plan, Transformer, estimate, load_hardware, suggest
from ..debug.predict.search import GIB, keys, transformer
from ..debug.predict.transformer import counts
from ..debug.text import human
from ..errors import ConfigError

DTYPES = ("float32", "bfloat16")  # of a recipe's products
# of a recipe, as model_zoo/llama/config.py has them
SECTIONS = ("model", "data", "parallel", "lora", "optim", "train", "checkpoint", "metrics", "guard", "profile")
MORE = 64  # so many times the ranks are tried, if no plan of this many fits


def read(path: Path) -> dict[str, Any]:
    """A configuration: Hugging Face's `config.json` (or its folder), or YAML with a section `model`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        text = regular(file).read_text("utf-8")
        told = json.loads(text) if file.suffix == ".json" else plain_yaml(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"For '{path}', no configuration can be read.", str(error)[:200],
                          "It is a config.json of Hugging Face, its folder, or YAML with a section `model`, plain: no tags, "
                          "no key twice.",
                          "name such a file") from None
    if not isinstance(told, dict):
        raise ConfigError(f"For '{path}', the configuration is no mapping.", str(told)[:80],
                          "It names a model's sizes.", "name a config.json, or YAML with a section `model`")
    wrong = [f"{name} = {told[name]!r}" for name in ("model", "parallel", "train")
             if not isinstance(told.get(name, {}), dict)]
    if not wrong:
        parallel, dtype = told.get("parallel", {}), told.get("train", {}).get("dtype", DTYPES[0])
        wrong = [f"parallel.{name} = {parallel[name]!r}" for name in ("fsdp", "zero1", "sequence_parallel")
                 if not isinstance(parallel.get(name, False), bool)]
        wrong += [f"train.dtype = {dtype!r}"] if dtype not in DTYPES else []
    recipe = "model" in told or any(name in SECTIONS for name in told)
    unknown = [str(name) for name in told if name not in SECTIONS] if recipe else []
    if unknown:  # a misspelt one would be left out of the figures without a word
        raise ConfigError(f"For '{path}', the recipe has sections that no recipe has.", ", ".join(unknown)[:200],
                          f"They are {', '.join(SECTIONS)}.", "write the section's name as it is there, or leave it out")
    if wrong:
        raise ConfigError(f"For '{path}', the recipe says what cannot be.", ", ".join(wrong)[:200],
                          "model, parallel and train are sections; fsdp, zero1 and sequence_parallel are true or false; "
                          f"dtype is {' or '.join(DTYPES)}.",
                          "write it as in model_zoo/llama/configs")
    return as_recipe(told) if recipe else told


def as_recipe(told: dict[str, Any]) -> dict[str, Any]:
    """As the recipe itself reads it, where Python finds it: it knows which keys there are, what each may be, and which
    sizes a model has that are not told."""
    try:
        recipe = importlib.import_module("model_zoo.llama.configio")  # no part of the wheel
    except ImportError:
        return told
    return recipe.checked_alone(told)


def sizes_of(told: dict[str, Any]) -> Transformer:
    """The model of a configuration."""
    sizes = dict(told.get("model", told))
    experts = sizes.pop("experts", None)
    if isinstance(experts, dict):  # the recipe's section
        sizes |= {"experts": experts.get("count", 8), "per_token": experts.get("per_token", 2)}  # what the recipe has unsaid
        sizes |= {"ffn_dim": experts["width"]} if experts.get("width") else {}
    return transformer(sizes)


def plan_of(told: dict[str, Any]) -> dict[str, Any]:
    """What a recipe's sections `parallel` and `train` say of a run, by the names of this command's options."""
    parallel, train = told.get("parallel") or {}, told.get("train") or {}
    out = {name: parallel[name] for name in ("dp", "cp", "tp", "pp", "ep", "hsdp") if name in parallel}
    out |= {name: train[name] for name in ("batch", "seq", "micro_batches") if name in train}
    if "model" in told:
        out["sequence_parallel"] = bool(parallel.get("sequence_parallel"))
    sharded = next((way for way in ("fsdp", "zero1") if parallel.get(way)), "none")
    return out | {"sharded": sharded, "recompute": "full" if train.get("recompute") else "none",
                  "itemsize": 4 if train.get("dtype", DTYPES[0]) == DTYPES[0] and "model" in told else 2}


def not_told(told: dict[str, Any]) -> list[str]:
    """Keys of a recipe that change what a rank needs, and that `Plan` and `Transformer` have no word for."""
    usual: dict[str, dict[str, Any]] = {
        "parallel": {"ulysses": 1, "pp_schedule": "1f1b", "pp_split": None, "loss_parallel": True, "expert_tp": True,
                     "cp_algorithm": "gather"},
        "train": {"recompute_gib": 0}, "model": {"latent": None}}
    out = [f"{section}.{key}" for section, keys in usual.items() for key, value in keys.items()
           if (told.get(section) or {}).get(key, value) != value]
    experts = (told.get("model") or {}).get("experts") or {}
    out += [f"model.experts.{key}" for key in ("shared", "dense_layers") if isinstance(experts, dict) and experts.get(key)]
    return out + ["lora"] * bool(told.get("lora"))


def add_run(parser: argparse.ArgumentParser) -> None:
    """The options that both commands have."""
    parser.add_argument("config", type=Path, metavar="CONFIG",
                        help="config.json of Hugging Face, its folder, or a recipe's YAML")
    parser.add_argument("--hardware", default="910b", help="910b, 910c, a100, h100, or a file; default 910b")
    parser.add_argument("--batch", type=int, help="sequences of all ranks in a step; needed, but for a recipe that says it")
    parser.add_argument("--seq", type=int, help="tokens of a sequence; as --batch")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check_numbers(config: Path, told: dict[str, Any]) -> None:
    """Refuses degrees and sizes of a run that are none, of options and of a recipe."""
    names = ("dp", "cp", "tp", "pp", "ep", "hsdp", "batch", "seq", "micro_batches", "world")
    wrong = {name: told[name] for name in names if name in told and not counts(told[name])}
    if wrong:
        raise ConfigError(f"For '{config}', a number of the run is none.",
                          ", ".join(f"{name} = {value!r}" for name, value in wrong.items()),
                          "Each is a whole number, 1 or more.", f"--{next(iter(wrong))} with such a number")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Transformer]:
    """The options, those that are not given as the recipe has them; and the model."""
    config = parser.parse_args(arguments).config
    told = read(config)
    plan = plan_of(told)
    check_numbers(config, plan)  # before argparse makes a number of a text that is a default
    parser.set_defaults(**plan)
    args = parser.parse_args(arguments)
    if missing := [name for name in ("batch", "seq") if getattr(args, name) is None]:
        parser.error(f"{args.config} does not say train.{' and train.'.join(missing)}: give --{' and --'.join(missing)}")
    check_numbers(args.config, vars(args))
    return args, sizes_of(told)


def suggested(arguments: Sequence[str]) -> int:
    """`suggest`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor suggest", description="Ranks all plans of a model on so "
                                     "many ranks by the seconds of a step, and says why each of the next ones lost.")
    add_run(parser)
    parser.add_argument("--world", type=int, required=True, help="ranks")
    args, model = parsed(parser, arguments)
    found = suggest(model, args.world, args.hardware, batch=args.batch, seq=args.seq, itemsize=args.itemsize)
    print(json.dumps([told(one) for one in found.plans[:10]], indent=1) if args.json else found)
    return 0


def needed(arguments: Sequence[str]) -> int:
    """`memory`; returns the exit code: 1 if the plan does not fit."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor memory", description="What a rank of one plan needs, by "
                                     "formula, beside what the device has, and the quickest plan that fits if it does not.")
    add_run(parser)
    for name in ("dp", "cp", "tp", "pp", "ep", "hsdp", "micro_batches"):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help="default: as the recipe has it, else 1")
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--sharded", choices=("none", "zero1", "fsdp"), default="none")
    args, model = parsed(parser, arguments)
    machine = load_hardware(args.hardware)
    one, nearest = judged(model, args, machine)
    fits, lacking = one.bytes <= machine.capacity, not_told(read(args.config))
    if args.json:
        print(json.dumps({**told(one), "fits": fits, "capacity_gib": machine.capacity / GIB,
                          "instead": told(nearest) if nearest else None, "not_counted": lacking}, indent=1))
        return 0 if fits else 1
    print(f"a rank of {one.plan.world}, batch {args.batch}, seq {args.seq}: {keys(one.plan)}")
    for name, size in one.memory.items():
        print(f"{name:<42}{human(size):>10}")
    print(f"{'all':<42}{human(one.bytes):>10} of {human(machine.capacity)}" + ("" if fits else ": does not fit"))
    if nearest:
        print(f"the quickest plan of {nearest.plan.world} ranks that fits needs {nearest.bytes / GIB:.1f} GiB: "
              f"{keys(nearest.plan)}")
    elif not fits:
        print(f"no plan of up to {MORE * one.plan.world} ranks fits")
    if lacking:
        print(f"not counted here: {', '.join(lacking)}; the recipe's own command counts them, with the same formula, "
              f"in a checkout: python -m model_zoo.llama.memory --config {args.config}")
    print(f"by formula, not measured; kernels' workspace is not in it. {machine.name}: {machine.source}")
    return 0 if fits else 1


def judged(model: Transformer, args: argparse.Namespace, machine: Hardware) -> tuple[Estimate, Estimate | None]:
    """What the plan of these options needs; and if it does not fit, the quickest of as many ranks, or of the next more."""
    plan = Plan(args.dp, args.cp, args.tp, args.pp, args.ep, args.micro_batches, 1,
                args.tp > 1 and getattr(args, "sequence_parallel", True), args.recompute, args.sharded,
                args.hsdp)
    if args.batch % (plan.dp * plan.micro_batches):
        raise ConfigError("For 'memory', the batch cannot be cut.", f"--batch {args.batch} over dp = {plan.dp} ranks and "
                          f"{plan.micro_batches} micro-batches", "Each rank has equally many sequences in a micro-batch.",
                          f"--batch {args.batch + -args.batch % (plan.dp * plan.micro_batches)}")
    if model.heads % plan.tp or model.kv_heads % plan.tp:
        below = range(1, min(plan.tp, model.kv_heads + 1))
        raise ConfigError("For 'memory', heads cannot be cut.", f"{model.heads} heads, {model.kv_heads} of keys, over tp = "
                          f"{plan.tp} ranks", "Each rank of tp has equally many heads.",
                          f"--tp {max(t for t in below if model.heads % t == model.kv_heads % t == 0)}")
    check_degrees(model, plan, args.seq)
    one = estimate(model, plan, machine, args.batch, args.seq, args.itemsize)
    ranks = plan.world
    while one.bytes > machine.capacity and ranks <= MORE * plan.world:
        with suppress(ConfigError):  # none of so many fits
            return one, suggest(model, ranks, machine, batch=args.batch, seq=args.seq, itemsize=args.itemsize).plans[0]
        ranks *= 2
    return one, None


def check_degrees(model: Transformer, plan: Plan, seq: int) -> None:
    """Refuses degrees that the recipe refuses, too: figures of such a plan would be of nothing that can run."""
    cut = plan.dp % plan.ep == 0 or (plan.ep % plan.cp == 0 and plan.dp % (plan.ep // plan.cp) == 0)
    for wrong, on, rule, fix in (
            (seq % plan.cp, f"{seq} tokens over cp = {plan.cp} ranks", "Each rank of cp has equally many tokens.",
             f"--seq {seq + -seq % plan.cp}"),
            (plan.pp > model.layers + 2, f"{model.layers} layers, embedding, norm and head over pp = {plan.pp} ranks",
             "Each rank of pp has a part of the model.", f"--pp {model.layers + 2} or less"),
            (plan.dp % plan.hsdp or (plan.hsdp > 1 and plan.sharded != "fsdp"),
             f"hsdp = {plan.hsdp}, dp = {plan.dp}, sharded = {plan.sharded}", "hsdp divides dp and goes with fsdp.",
             "--hsdp 1"),
            (plan.ep > 1 and (not cut or plan.ep > model.experts or plan.hsdp > 1),
             f"{model.experts or 'no'} experts, ep = {plan.ep}, dp = {plan.dp}, cp = {plan.cp}, hsdp = {plan.hsdp}",
             "ep divides dp, or is cp times such a number; each of its ranks has an expert; it does not go with hsdp yet.",
             "--ep 1")):
        if wrong:
            raise ConfigError("For 'memory', there is no such plan.", on, rule, fix)


def run_of(config: Path) -> tuple[argparse.Namespace, Transformer]:
    """A recipe's plan as `memory` takes it, and its model.

    Raises:
        ConfigError: it says no batch and no seq, or no model, or what cannot be.
    """
    told = read(config)
    plan = {**dict.fromkeys(("dp", "cp", "tp", "pp", "ep", "hsdp", "micro_batches"), 1), **plan_of(told)}
    if not {"batch", "seq"} <= plan.keys():
        raise ConfigError(f"For '{config}', no run is described.", f"its sections: {', '.join(told)}"[:200],
                          "A recipe's YAML says its batch and seq in the section `train`.",
                          f"python -m ms_dtensor memory {config} --batch N --seq N")
    check_numbers(config, plan)
    return argparse.Namespace(**plan), sizes_of(told)


def told(one: Estimate) -> dict[str, Any]:
    """A plan as JSON has it."""
    return {"plan": asdict(one.plan), "options": keys(one.plan), "seconds": one.seconds, "gib": one.bytes / GIB,
            "time": one.time, "memory_gib": {name: size / GIB for name, size in one.memory.items()}}


def main(arguments: Sequence[str]) -> int:
    """Either command, the first of its arguments; exit code 2 if it cannot be answered."""
    try:
        return {"suggest": suggested, "memory": needed}[arguments[0]](arguments[1:])
    except ConfigError as error:
        return refused(error, "--json" in arguments)
