# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor`: what it can do, and the commands. Each is imported when it is called."""
from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ..core.refused import refused
from ..core.version import __version__
from ..errors import DTensorError

HELP = """\
ms_dtensor {version}: distributed tensors for MindSpore.

usage: python -m ms_dtensor COMMAND ...

  doctor [CONFIG]     looks whether this machine is ready to train (this recipe), and says how to mend what is not
  plot RUN_DIR...     draws loss, throughput, communication and memory of runs that train.py recorded; --text: here
  suggest CONFIG      ranks a model's plans on so many ranks of a machine, by what a step costs there
  memory CONFIG       what a rank of a plan needs, and the quickest plan that fits if it is too much
  verify [FAMILY...]  proves the rule behind every public call form, on this machine and this MindSpore
  run --as LIB FILE   runs a program that imports hyper_parallel, unedited, with ms_dtensor in its place
  bench               measures a cluster's links, devices, files and dispatch, of a hostfile or of this machine
  calibrate           under msrun: measures what the planner's costs are here, for MS_DTENSOR_COSTS
  pipeline            makes or reads a pipeline schedule, checks, simulates and draws it
  ckpt ls PATH        what a checkpoint holds, or which steps a folder has
  ckpt diff A B       how two checkpoints differ, whatever layouts they were saved in
  ckpt verify PATH    reads every byte of a checkpoint and names what is wrong
  ckpt convert A B    a checkpoint into a safetensors file, or such files into a checkpoint

`python -m ms_dtensor COMMAND --help` explains one. All take --json. Exit codes: 0 all is well, 1 something is
wrong with what was looked at, 2 it could not be done.

To train a Llama, in a checkout (the wheel is the library alone):
  scripts/run_llama.sh 8 quickstart                   8 ranks of this machine
  scripts/run_llama.sh --help                         more, also several machines
"""
COMMANDS = {"doctor": ".doctor", "plot": ".plot", "suggest": ".predict", "memory": ".predict", "verify": ".verify",
            "run": ".run", "bench": ".bench.run", "calibrate": ".calibrate", "pipeline": "..pipeline.cli",
            "ckpt": "..checkpoint.cli"}


def piped(arguments: Sequence[str]) -> int:
    """`main`, whose reader may leave before the end, as `head` does, and whose user may, by Ctrl-C."""
    try:
        code = main(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        return 1
    except KeyboardInterrupt:
        if arguments[0] == "run":
            raise  # of a program, whose traceback is its own
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if arguments[0] == "run" or error.filename is None:
            raise  # the same; or of no path that somebody gave
        return refused(DTensorError(f"For '{arguments[0]}', a path cannot be used.",
                                    f"{error.strerror}: {error.filename}"[:200], "The system refused it.",
                                    "another path, or its rights"), "--json" in arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if command in ("-h", "--help", "help"):
        print(HELP.format(version=__version__), end="")
        return 0
    if command in ("-V", "--version"):
        print(__version__)
        return 0
    if command not in COMMANDS:
        *most, last = COMMANDS
        argparse.ArgumentParser(prog="python -m ms_dtensor").error(
            f"'{command[:60]}' is no command; known are {', '.join(most)} and {last}. See python -m ms_dtensor --help")
    module = importlib.import_module(COMMANDS[command], __package__)
    return module.main(arguments if command in ("ckpt", "suggest", "memory") else rest)  # which are told how they are called
