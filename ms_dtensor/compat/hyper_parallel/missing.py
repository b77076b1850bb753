# SPDX-License-Identifier: Apache-2.0
"""What hyper_parallel has and we do not offer: there to be imported and subclassed, an error when it is used."""
from __future__ import annotations

from ...errors import ConfigError


class _Refuses(type):
    """A class that cannot be made an instance of, called, or asked for an attribute."""

    def __call__(cls, *args, **kwargs):
        raise cls._refusal(cls.__name__)  # type: ignore[attr-defined]

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise cls._refusal(f"{cls.__name__}.{name}")  # type: ignore[attr-defined]


def missing(module: str, name: str, instead: str) -> type:
    """A stand-in of that name, which raises when it is used.

    Args:
        module: where hyper_parallel has it.
        name: a class's or a function's.
        instead: what to use.

    Example:
        >>> from ms_dtensor.compat.hyper_parallel.missing import missing
        >>> swap_wrapper = missing("hyper_parallel.core.activation_checkpoint", "swap_wrapper", "checkpoint_wrapper")
        >>> swap_wrapper(None)
        Traceback (most recent call last):
            ...
        ms_dtensor.errors.ConfigError: For 'hyper_parallel', 'swap_wrapper' is not offered.
          on:   hyper_parallel.core.activation_checkpoint
          rule: ms_dtensor stands in for hyper_parallel here, and has no equal of it.
          fix:  checkpoint_wrapper
    """
    def refusal(used: str) -> ConfigError:
        return ConfigError(f"For 'hyper_parallel', '{used}' is not offered.", module,
                           "ms_dtensor stands in for hyper_parallel here, and has no equal of it.", instead)
    return _Refuses(name, (), {"_refusal": staticmethod(refusal), "__module__": module})
