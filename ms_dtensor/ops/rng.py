# SPDX-License-Identifier: Apache-2.0
"""One global stream of random numbers: element i of call c under seed s is the same number on every mesh.

Counter-based (Philox 4x64, ten rounds, NumPy's own C code): the key is (seed, call), the counter is the element's
index in the *global* tensor. A rank computes the numbers of its shard and no others, replicas compute the same ones,
and nothing is communicated but the seed, which the ranks of a mesh compare once. Numbers are made on the host on
every device, so that a run on CPU and one on Ascend agree. The seed and the number of calls made belong to the world
(each fake world has its own), can be saved, and must be the same on all ranks: every rank makes the same random calls
in the same order, also where its shard is empty.
"""
from __future__ import annotations

import itertools
import math
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
from mindspore import get_seed

from .. import comm
from ..errors import ConfigError

Box = tuple[tuple[int, int], ...]


class Key(NamedTuple):
    """What identifies one call's numbers."""

    seed: int
    call: int


class _State:
    __slots__ = ("_seed", "agreed", "call")

    def __init__(self):
        self.call = 0
        self._seed: int | None = None
        self.agreed: tuple[int, set] = (-1, set())  # a seed, and whose ranks have it

    @property
    def seed(self) -> int:
        """MindSpore's own, or 0, until a seed is given."""
        return (get_seed() or 0) if self._seed is None else self._seed

    @seed.setter
    def seed(self, value: int | None) -> None:
        self._seed = value


_alone = _State()  # before a world is started
_states: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # backend of a world -> state
_frozen: ContextVar[Key | None] = ContextVar("ms_dtensor_random_frozen", default=None)


def _state() -> _State:
    world = comm.current_world()
    if world is None:
        return _alone
    state = _states.get(world.backend)
    if state is None:
        state = _states[world.backend] = _State()
        if comm.world_key() is None:  # the real world goes on where the process was before it started
            state._seed, state.call = _alone._seed, _alone.call
    return state


def manual_seed(seed: int) -> None:
    """Starts the stream anew. Call it with the same seed on every rank.

    Args:
        seed: 0 to 2**64 - 1. Without a call it is that of `ms.set_seed`, or 0.

    Raises:
        ConfigError: not such an integer.

    Example:
        >>> import ms_dtensor as md
        >>> mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> md.manual_seed(3)
        >>> x = md.randn(4, device_mesh=mesh)
        >>> md.manual_seed(3)
        >>> bool((md.randn(4, device_mesh=mesh) == x).all())
        True
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 64:
        raise ConfigError(f"For 'manual_seed', 'seed' must be an integer from 0 to 2**64 - 1, but got {seed!r}.")
    state = _state()
    state.seed, state.call = int(seed), 0


def restart() -> None:
    """Starts the stream anew from the seed of `ms.set_seed`, which calls this once a DTensor has been made."""
    state = _state()
    state.seed, state.call = None, 0


def get_rng_state() -> dict[str, int]:
    """The stream's state: two integers, the same on every rank; to be saved with a checkpoint.

    Example:
        >>> import ms_dtensor as md
        >>> md.manual_seed(3)
        >>> md.get_rng_state()
        {'seed': 3, 'call': 0}
    """
    state = _state()
    return {"seed": state.seed, "call": state.call}


def set_rng_state(state: dict[str, int]) -> None:
    """Goes on from a state that `get_rng_state` gave.

    Example:
        >>> import ms_dtensor as md
        >>> md.set_rng_state({"seed": 3, "call": 7})
        >>> md.get_rng_state()
        {'seed': 3, 'call': 7}
    """
    try:
        seed, made = int(state["seed"]), int(state["call"])
    except (TypeError, KeyError, ValueError):
        raise ConfigError("For 'set_rng_state', 'state' must be what get_rng_state() returned, "
                          f"but got {state!r}.") from None
    own = _state()
    own.seed, own.call = seed, made


def next_key() -> Key:
    """The key of the next call; every rank takes it, whatever its shard holds."""
    frozen = _frozen.get()
    if frozen is not None:
        return frozen
    state = _state()
    key = Key(state.seed, state.call)
    state.call += 1
    return key


def rehearse(draw, shape: tuple[int, ...]) -> None:
    """Draws a number that nobody sees: what is wrong with a call is said on every rank, before the stream goes on."""
    draw(Key(0, 0), shape, ((0, 1),) * len(shape))


def agree(mesh) -> None:
    """Before a draw on a mesh: its ranks compare their seeds, once for each seed; `ms.set_seed(rank)` parts replicas.

    Raises:
        ConfigError: on all ranks of the mesh, if they differ.
    """
    state = _state()
    seed = state.seed
    if state.agreed[0] != seed:
        state.agreed = seed, set()
    if mesh in state.agreed[1] or mesh.size() == 1 or _frozen.get() is not None or comm.current_world() is None \
            or mesh.get_coordinate() is None:
        return
    streams = mesh.get_group().all_gather_object([seed, state.call])
    if any(s != streams[0] for s in streams):
        raise ConfigError("For a random DTensor, the ranks of the mesh are at different places of the random stream.",
                          "; ".join(f"rank {r}: seed {s}, {c} calls" for r, (s, c) in zip(mesh.rank_list, streams)),
                          "Shards and replicas are parts of one stream of numbers, so every rank has one seed.",
                          ("ms.set_seed(seed) or ms_dtensor.manual_seed(seed) with the same seed on every rank",
                           "for numbers that differ, draw a plain tensor with a NumPy generator, and DTensor.from_local"))
    state.agreed[1].add(mesh)


@contextmanager
def frozen(seed: int = 0):
    """Inside, every call draws the same numbers: how the verifier compares a random op's shards with the whole."""
    token = _frozen.set(Key(seed, 0))
    try:
        yield
    finally:
        _frozen.reset(token)


# -- the numbers of a box -----------------------------------------------------------------------------------------
_RUN_COST, _WORD_COST = 2e-5, 5e-9  # seconds to start a run of consecutive words, and per word
_PIECE = 1 << 15


def words(key: Key, shape: tuple[int, ...], box: Box | None = None) -> np.ndarray:
    """64 random bits for each element of `box` in a global tensor of `shape`; the element's row-major index counts."""
    box = tuple((0, n) for n in shape) if box is None else box
    extents = tuple(hi - lo for lo, hi in box)
    if 0 in extents:
        return np.empty(extents, np.uint64)
    strides = [math.prod(shape[d + 1:]) for d in range(len(shape))]
    # One run of words covers the hull of the box in the trailing dims; the leading dims are looped over.
    hulls = [1 + sum((n - 1) * s for n, s in zip(extents[d:], strides[d:])) for d in range(len(shape) + 1)]
    level = min(range(len(shape) + 1), key=lambda d: math.prod(extents[:d]) * (_RUN_COST + hulls[d] * _WORD_COST))
    inner = sum(lo * s for (lo, _), s in zip(box[level:], strides[level:]))
    out = np.empty((*extents[:level], *extents[level:]), np.uint64)
    view_strides = tuple(8 * s for s in strides[level:])
    for at in itertools.product(*(range(n) for n in extents[:level])):
        first = inner + sum((lo + i) * s for (lo, _), i, s in zip(box, at, strides))
        run = _run(key, first, hulls[level])
        out[at] = np.lib.stride_tricks.as_strided(run, extents[level:], view_strides)
    return out


def _run(key: Key, first: int, count: int) -> np.ndarray:
    block, skip = divmod(first, 4)
    source = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([block, 0, 0, 0], np.uint64))
    return source.random_raw(skip + count)[skip:]


def uniform(key: Key, shape, box: Box | None = None, dtype=np.float32) -> np.ndarray:
    """Uniform numbers in [0, 1): multiples of 2**-24, or of 2**-53 for float64."""
    if dtype == np.float64:
        return _each(lambda raw: (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53, key, shape, box, np.float64)
    return _each(lambda raw: (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24), key, shape, box, np.float32)


def normal(key: Key, shape, box: Box | None = None, dtype=np.float32) -> np.ndarray:
    """Standard normal numbers, by Box and Muller from the two ends of an element's word; nothing beyond 6.7 sigma."""
    kind, bits = (np.float64, 32) if dtype == np.float64 else (np.float32, 24)
    scale, mask = kind(2.0**-bits), np.uint64((1 << bits) - 1)

    def convert(raw):
        radius = np.sqrt(kind(-2) * np.log(((raw >> np.uint64(64 - bits)).astype(kind) + kind(1)) * scale))
        return radius * np.cos((raw & mask).astype(kind) * (kind(2 * math.pi) * scale))
    return _each(convert, key, shape, box, kind)


def _each(convert, key: Key, shape, box, dtype) -> np.ndarray:
    """`convert` of every word, in pieces that stay in the cache."""
    raw = words(key, shape, box)
    out = np.empty(raw.shape, dtype)
    flat_in, flat_out = raw.reshape(-1), out.reshape(-1)
    for at in range(0, raw.size, _PIECE):
        flat_out[at:at + _PIECE] = convert(flat_in[at:at + _PIECE])
    return out


def exponential(key: Key, shape, box: Box | None = None, dtype=np.float32) -> np.ndarray:
    """Numbers of the exponential distribution with rate 1."""
    return -np.log1p(-uniform(key, shape, box, dtype))


def integers(key: Key, shape, low: int, high: int, box: Box | None = None) -> np.ndarray:
    """int64 numbers in [low, high); each within 2**-32 of equally likely for ranges below 2**32."""
    if not all(isinstance(v, int | np.integer) and -1 << 63 <= v <= 1 << 63 for v in (low, high)):
        raise ConfigError(f"For 'randint', 'low' and 'high' must be integers of 64 bits, but got {low!r} and {high!r}.")
    if high <= low:
        raise ConfigError(f"For 'randint', 'low' must be below 'high', but got {low} and {high}.")
    raw, span = words(key, shape, box), high - low
    if span <= 1 << 32:
        picked = ((raw >> np.uint64(32)) * np.uint64(span)) >> np.uint64(32)
    else:
        picked = raw % np.uint64(span)
    return (picked.astype(np.int64) + low).astype(np.int64)


def keep_mask(key: Key, shape, keep: float, box: Box | None = None) -> np.ndarray:
    """True with probability `keep`."""
    return uniform(key, shape, box) < np.float32(keep)
