# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits into its devices, by the formula of `memory.py`, and the nearest layout that does: asked before launch.

A layout is nearer if fewer options change; of those alike the one without recomputation, then the one that needs least.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import psutil

from model_zoo.llama.config import Config, check
from model_zoo.llama.memory import MIB, USABLE, communicators, per_rank
from ms_dtensor.comm.buffers import buffer_megabytes
from ms_dtensor.core.divisors import divisors
from ms_dtensor.errors import ConfigError

GIB = 2**30
NODE = 8  # cards whose links are quick enough for tensor parallelism
BUFFERS = "communication buffers"  # of a device; CPU ranks share theirs
MORE = 64  # so many times the ranks are tried, if no layout of this many fits


def machine(workers: int) -> tuple[int, str, bool]:
    """What a rank may need on this machine: a card's memory as MindSpore takes it, or its share of the machine's."""
    if Path("/dev/davinci_manager").exists():
        return USABLE, "a 64 GB card has", True
    return psutil.virtual_memory().total // workers, f"its share of this machine's memory, one of {workers}, is", False


def needed(cfg: Config, on_card: bool) -> dict[str, int]:
    return {what: n for what, n in per_rank(cfg).items() if on_card or what != BUFFERS}


def refuse_too_large(cfg: Config, world: int, limit: int, has: str, on_card: bool) -> None:
    """Refuses a run that cannot fit.

    Args:
        cfg: the run.
        world: number of ranks.
        limit: bytes that a rank has.
        has: words for them: `a 64 GB card has`.
        on_card: whether ranks have cards, or share a machine's memory.

    Raises:
        ConfigError: a rank needs more; with the nearest layouts that need less.

    Example:
        >>> from model_zoo.llama.configio import load
        >>> cfg, _ = load(["--config", "model_zoo/llama/configs/llama3_8b.yaml", "--parallel.dp", "8", "--parallel.tp", "1",
        ...                "--parallel.sequence_parallel", "false", "--train.micro_batches", "1"], 8)
        >>> refuse_too_large(cfg, 8, 58 << 30, "a 64 GB card has", True)
        Traceback (most recent call last):
            ...
        ms_dtensor.errors.ConfigError: For 'train.py', a rank needs 129.5 GiB, and a 64 GB card has 58.0.
        ...
    """
    rows = needed(cfg, on_card)
    total = sum(rows.values())
    if total <= limit:
        return
    most = sorted(rows.items(), key=lambda row: -row[1])[:3]
    p = cfg.parallel
    degrees = ", ".join(f"parallel.{name} = {n}" for name, n in (("pp", p.pp), ("dp", p.dp), ("cp", p.cp), ("tp", p.tp))
                        if n > 1 or name in ("dp", "tp"))
    raise ConfigError(
        f"For 'train.py', a rank needs {total / GIB:.1f} GiB, and {has} {limit / GIB:.1f}.",
        f"{degrees}; most are {', '.join(f'{what}: {n / GIB:.1f}' for what, n in most)}",
        "What a step needs is there at once; by formula (`python -m model_zoo.llama.memory`), not measured.",
        [*smaller_buffers(cfg, rows, limit), *ways(cfg, world, limit, on_card),
         "launch.py --force, which is --train.check_memory false, starts it all the same"])


def ways(cfg: Config, world: int, limit: int, on_card: bool) -> Iterator[str]:
    """Options that make it fit on as many ranks, and if there are none, on the fewest that a layout was found for."""
    ranks = world
    while ranks <= MORE * world:
        fit = sorted((len(options), other.train.recompute, total, options) for other, options in layouts(cfg, ranks)
                     if (total := sum(needed(other, on_card).values())) <= 0.95 * limit)
        if fit:
            yield (f"on {ranks} ranks: " if ranks != world else "") + \
                f"{' '.join(f'--{key} {value}' for key, value in fit[0][3])}  needs {fit[0][2] / GIB:.1f} GiB"
            return
        if not on_card:
            break  # more ranks share the same memory
        ranks *= 2
    yield "a smaller model, or --train.seq with fewer tokens"


def smaller_buffers(cfg: Config, rows: dict[str, int], limit: int) -> Iterator[str]:
    """HCCL_BUFFSIZE with which it fits, if buffers of more than HCCL's own size are what is too much."""
    left = limit - sum(rows.values()) + rows.get(BUFFERS, 0)
    most = left // (2 * MIB * communicators(cfg.parallel)) if rows.get(BUFFERS) else 0
    if 200 <= most < buffer_megabytes():
        yield f"HCCL_BUFFSIZE={most}, the same on all ranks"


def layouts(cfg: Config, world: int) -> Iterator[tuple[Config, list[tuple[str, str]]]]:
    """Layouts of the same model and batch over so many ranks, with the options that make them of this one."""
    p, t = cfg.parallel, cfg.train
    left = world // (p.pp * p.cp)
    sizes = [n for n in divisors(left) if n <= NODE or n == p.tp] if left * p.pp * p.cp == world else []
    for tp, cut, recompute in product(sizes, {(p.fsdp, p.zero1), (True, False)}, {t.recompute, True}):
        dp = left // tp
        batch = t.batch if t.batch % dp == 0 else -(-t.batch // dp) * dp
        for parts in divisors(batch // dp):
            if parts < t.micro_batches and p.pp == 1:
                continue  # larger ones need more; a pipeline holds several at once
            fsdp, zero1 = cut if dp * p.cp > 1 else (False, False)
            other = replace(cfg, parallel=replace(p, dp=dp, tp=tp, fsdp=fsdp, zero1=zero1, sequence_parallel=tp > 1 and
                                                  (p.sequence_parallel or p.tp == 1)),
                            train=replace(t, batch=batch, recompute=recompute, micro_batches=parts))
            try:
                check(other, world)
            except ConfigError:
                continue
            yield other, changed(cfg, other)


def changed(cfg: Config, other: Config) -> list[tuple[str, str]]:
    """Keys and new values."""
    return [(f"{section}.{key}", str(value).lower()) for section in ("parallel", "train")
            for key, value in asdict(getattr(other, section)).items() if value != getattr(getattr(cfg, section), key)]
