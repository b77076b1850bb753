# SPDX-License-Identifier: Apache-2.0
"""Of how many machines a run can be (launch.py's `--nodes MIN:MAX`): what changes with their number is dp, and nothing else.

The global batch stays, and which sequences are in it, as they follow from the step alone; so a run goes on with the same
data on any number of machines. Not here: how machines find each other (`meeting.py`). No import of MindSpore.
"""
from __future__ import annotations

import argparse
import contextlib
import time

from model_zoo.llama.config import Config
from model_zoo.llama.configio import load
from model_zoo.llama.fits import machine, refuse_too_large
from model_zoo.llama.hold import hold
from ms_dtensor.errors import ConfigError

LEAVING = 60.0  # seconds in which a lost machine's lock goes: a network's file system asks it for so long


def least_and_most(text: str) -> tuple[int, int]:
    """Of `--nodes`, for argparse.

    Example:
        >>> least_and_most("2:4"), least_and_most("3")
        ((2, 4), (3, 3))
    """
    least, between, most = text.partition(":")
    most = most if between else least
    if not least.isdigit() or not most.isdigit() or not 1 <= int(least) <= int(most):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not MIN:MAX, as 2:4 is: machines that are needed, and taken")
    return int(least), int(most)


def layouts_of(args: list[str], workers: int, nodes: tuple[int, int]) -> dict[int, list[str]]:
    """The options that make the run one of so many machines, for each number that it can be of.

    Args:
        args: of `train.py`.
        workers: ranks of a machine.
        nodes: the least and the greatest number.

    Raises:
        ConfigError: it can be of none; or it would not go on with what it has done.
    """
    cfg, _ = load(args)
    if not cfg.checkpoint.interval:
        raise ConfigError("For 'launch.py', --nodes has nothing to go on from when a machine is lost.",
                          "checkpoint.interval is 0", "A run with other machines goes on from its latest checkpoint.",
                          "--checkpoint.interval 100")
    if cfg.checkpoint.resume not in (None, "latest"):
        raise ConfigError("For 'launch.py', --nodes goes on from the latest checkpoint of the run's own folder.",
                          f"checkpoint.resume = {cfg.checkpoint.resume}", "Every start is with the same options.",
                          "a run without --nodes begins there; then leave checkpoint.resume out")
    p = cfg.parallel
    out, why = dict[int, list[str]](), []
    for n in range(nodes[0], nodes[1] + 1):
        world = workers * n
        options = ["--parallel.dp", str(max(1, world // (p.tp * p.cp * p.pp)))]
        try:
            other, _ = load([*args, *options], world)
            if cfg.train.check_memory:
                refuse_too_large(other, world, *machine(workers))
            out[n] = options
        except ConfigError as error:
            why.append(f"{n}: {error.attempt}")
    if not out:
        raise ConfigError(f"For 'launch.py', the run can be of no number of machines from {nodes[0]} to {nodes[1]}.",
                          "\n".join(why), f"A machine has {workers} ranks; dp is what tp x cp x pp = {p.tp * p.cp * p.pp} "
                          "leaves of them, and all else is as the configuration says.",
                          ["a train.batch that more numbers divide", "tp x cp x pp that divides the ranks of a machine"])
    return out


def held(keep: contextlib.ExitStack, cfg: Config) -> None:
    """Holds the run's folders until `keep` closes; a machine that was lost may have them for a moment yet."""
    until = time.monotonic() + LEAVING
    while True:
        try:
            keep.enter_context(hold(cfg, launcher=True))
            return
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(1)
