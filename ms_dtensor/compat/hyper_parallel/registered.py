# SPDX-License-Identifier: Apache-2.0
"""`hyper_parallel` as a package that is not installed: programs that import it run on ms_dtensor, unedited.

`register()` puts modules of the table in `names.py` under these names; each name is looked up when it is asked for. What is
not offered can be imported and raises when it is used; a name that hyper_parallel has and nobody listed is an ImportError.
"""
from __future__ import annotations

import importlib
import importlib.util
import sys
import types

from ...comm import mindspore_collectives
from ...dispatch.patches.checkpoints import take_pieces
from ...errors import ConfigError
from ...internals.target import on_cpu
from .counters import counters_are_each_ranks_own
from .inferred import names_on_layouts
from .missing import missing
from .names import homes, not_offered

_PACKAGE = "hyper_parallel"


class _Module(types.ModuleType):
    """One module of the package: where its names are."""

    def __init__(self, path: str, offered: dict[str, tuple[str, str]], refused: dict[str, str]):
        super().__init__(path, f"{path}, as ms_dtensor has it.")
        self.__dict__.update(_offered=offered, _refused=refused, __path__=[], __package__=path,
                             __spec__=importlib.util.spec_from_loader(path, loader=None, is_package=True))

    def __getattr__(self, name: str):
        if name in self._offered:
            home, other = self._offered[name]
            value = getattr(importlib.import_module(home), other)
        elif name in self._refused:
            value = missing(self.__name__, name, self._refused[name])
        else:
            raise AttributeError(f"ms_dtensor stands in for {self.__name__!r} and has no {name!r}")
        self.__dict__[name] = value
        return value

    def __dir__(self):
        return sorted({*self._offered, *self._refused})


def register() -> None:
    """From here on `import hyper_parallel` gives what ms_dtensor has under its names. `unregister` takes it back.

    On CPU MindSpore's collectives run on our groups, too: `comm.mindspore_collectives`. `load_param_into_net` takes a plain
    value that has the shape of a DTensor's shard, and not of the whole, for this rank's shard. A plain tensor is added in
    place to a replicated parameter without a gradient as what this rank counts; ranks differ from there on.

    Raises:
        ConfigError: hyper_parallel itself has been imported.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel import register, unregister
        >>> register()
        >>> from hyper_parallel.core.dtensor.placement_types import Shard
        >>> Shard(0)
        Shard(0)
        >>> unregister()
    """
    there = sys.modules.get(_PACKAGE)
    if isinstance(there, _Module):
        return
    if there is not None:
        raise ConfigError("For 'register', hyper_parallel itself has been imported.", str(getattr(there, "__file__", there)),
                          "One package has the name in a process.",
                          ("call register() first", "python -m ms_dtensor run --as hyper_parallel script.py"))
    offered, refused = homes(), not_offered()
    paths = {""}
    for path in {*offered, *refused}:
        parts = path.split(".")
        paths |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    for path in sorted(paths):
        name = f"{_PACKAGE}.{path}".rstrip(".")
        module = sys.modules[name] = _Module(name, offered.get(path, {}), refused.get(path, {}))
        above, _, last = name.rpartition(".")
        if above:
            sys.modules[above].__dict__[last] = module
    names_on_layouts(True)
    counters_are_each_ranks_own(True)
    take_pieces(True)
    if on_cpu():
        mindspore_collectives()


def unregister() -> None:
    """Takes `register` back. What has been imported by then stays with who imported it.

    Example:
        >>> import sys
        >>> from ms_dtensor.compat.hyper_parallel import register, unregister
        >>> register(), unregister(), "hyper_parallel" in sys.modules
        (None, None, False)
    """
    found = [name for name, module in sys.modules.items() if isinstance(module, _Module)]
    for name in found:
        del sys.modules[name]
    names_on_layouts(False)
    counters_are_each_ranks_own(False)
    take_pieces(False)
    if found and on_cpu():
        mindspore_collectives().disable()
