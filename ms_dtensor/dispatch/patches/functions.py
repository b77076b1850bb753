# SPDX-License-Identifier: Apache-2.0
"""Functions that take DTensors and never ask `__fallback__`: they are asked here, in their own name.

MindSpore 2.10 looks for `__fallback__` among an op's direct arguments. A list of tensors (`Stack`, `AddN`, `einsum`)
hides them, and `ops.rand_like` and its kin read the shape only. Each of these, called with a DTensor, becomes an op of
our own; with plain tensors it is MindSpore's own, untouched. Recomputation replays MindSpore's random state, and here
ours; MindSpore's seeds are ours, too. A name that user code imported from `mindspore.ops` before the first DTensor was
made keeps the plain function. Installed and removed together with `dispatch/patches/`.
"""
from __future__ import annotations

import functools
import importlib
import inspect
from contextvars import ContextVar

import mindspore as ms
from mindspore import Tensor, mint
from mindspore.nn.layer import rnns

from ...core.layout import Layout
from ...core.tree import first_dtensor, leaves
from ...errors import ConfigError
from ...internals.names import NoFallbackGuard
from ...ops import rng
from .. import class_loss, modes, policy
from ..dispatcher import plain_tree
from ..labels import check_labels, looked_up
from ..operands import replicate_constant, wrap


def _einsum(equation, operands, *rest):
    operands = tuple(operands) if isinstance(operands, tuple | list) else (operands, *rest)
    return "einsum", {"equation": equation, "operands": operands}


def _einsum_primitive(self, operands):
    return _einsum(self.equation, operands)


def _stack(self, tensors):
    return "stack", {"tensors": tuple(tensors), "dim": self.axis}


def _add_n(self, tensors):
    return "add_n", {"tensors": tuple(tensors)}


def _full_like(input, fill_value, *, dtype=None):
    return "full_like", {"input": input, "fill_value": fill_value, "dtype": dtype}


def _rand_like(input, seed=None, *, dtype=None):
    return "rand_like", {"input": input, "dtype": dtype}


def _randn_like(input, seed=None, *, dtype=None):
    return "randn_like", {"input": input, "dtype": dtype or ms.float32}


def _randint_like(input, low, high, seed=None, *, dtype=None):
    return "randint_like", {"input": input, "low": low, "high": high, "dtype": dtype}


def _bernoulli(input, p=0.5, seed=None):
    return "bernoulli_like", {"input": input, "p": p}


def _multinomial(input, num_samples, replacement=True, seed=None):
    return "multinomial", {"input": input, "num_samples": num_samples, "replacement": replacement, "dtype": ms.int32}


def _resize(self, image, size):
    size = size.asnumpy().tolist() if isinstance(size, Tensor) else size
    return "resize_to", {"input": image, "size": tuple(size), "kind": self.name, "align_corners": self.align_corners,
                         "half_pixel_centers": self.half_pixel_centers}


def _log_cumsum_exp(self, x, axis):
    return "logcumsumexp", {"input": x, "dim": int(axis), "exclusive": self.exclusive, "reverse": self.reverse}


_EVERYWHERE = ("mindspore.ops.function", "mindspore.ops.functional", "mindspore.ops")
_MATH, _RANDOM, _ARRAY = ((f"mindspore.ops.function.{home}_func", *_EVERYWHERE) for home in ("math", "random", "array"))


def _affine(shape):
    return lambda a: {"weight": (shape(a), 1), "bias": (shape(a), 0)}


# (module, or module:class; attribute; what the call means in our terms)
_FUNCTIONS = (
    ("mindspore.ops.functional_overload", "einsum", _einsum),  # behind mint.einsum
    ("mindspore.ops.operations.math_ops:Einsum", "__call__", _einsum_primitive),
    ("mindspore.ops.operations.array_ops:Stack", "__call__", _stack),
    ("mindspore.ops.operations.math_ops:AddN", "__call__", _add_n),
    ("mindspore.ops.operations.math_ops:CumulativeLogsumexp", "__call__", _log_cumsum_exp),  # its axis is a tensor
    ("mindspore.ops.auto_generate:ResizeNearestNeighborV2", "__call__", _resize),
    ("mindspore.ops.auto_generate:ResizeBicubic", "__call__", _resize),
    *((module, "full_like", _full_like) for module in _ARRAY),
    *((module, "bernoulli", _bernoulli) for module in _MATH),
    *((module, "rand_like", _rand_like) for module in _RANDOM),
    *((module, "randn_like", _randn_like) for module in _RANDOM),
    *((module, "randint_like", _randint_like) for module in _RANDOM),
    *((module, "multinomial", _multinomial) for module in _RANDOM),
)
# (module, attribute, what MindSpore would fill in as a plain tensor: argument -> (shape, value))
_NN = ("mindspore.ops.function.nn_func", "mindspore.ops.function", "mindspore.ops", "mindspore.mint.nn.functional")
_FILLED = (
    *((module, "layer_norm", _affine(lambda a: a["normalized_shape"])) for module in _NN),
    *((module, "group_norm", _affine(lambda a: a["input"].shape[1])) for module in _NN),
    (_NN[0], "_nllloss_nd", lambda a: {"weight": (a["input"].shape[0 if a["input"].ndim == 1 else 1], 1)}),
)
# (module, attribute) of functions in whose Python MindSpore makes constants of the whole shape, the same on every rank
_WITH_CONSTANTS = (
    ("mindspore.ops.function.math_func", "_is_sign_inf"), *((module, "count_nonzero") for module in _MATH),
    *((module, "threshold") for module in _NN[:3]),
    *((f"mindspore.ops{module}", "pinv") for module in (".function.linalg_func", ".function", "")),
)
# losses whose labels, integers, and class weights may be plain inside `loss_parallel()`: (module, or module:class;
# attribute; the labels' place): as many as the global shapes say, so a shard cannot pass for the whole
_LABELLED = (
    *((module, name, 1) for module in (*_NN, "mindspore.mint.nn", "mindspore.ops.functional")
      for name in ("cross_entropy", "nll_loss", "cross_entropy_ext", "nll_loss_ext")),
    ("mindspore.ops.operations.nn_ops:SparseSoftmaxCrossEntropyWithLogits", "__call__", 2),
)


def _asking(original, meaning):
    @functools.wraps(original)
    def call(*args, **kwargs):
        first = first_dtensor(args, kwargs, "_run_own_op")
        if first is None:
            return original(*args, **kwargs)
        if modes.mode.get().skip:
            return original(*plain_tree(args), **plain_tree(kwargs))
        op, arguments = meaning(*args, **kwargs)
        return first._run_own_op(op, arguments)
    return call


def _filling(original, constants):
    """`original`, with the constants it would make for missing arguments laid out like its input."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args, **kwargs):
        x = args[0] if args else kwargs.get("input")
        if x is None or getattr(x, "_layout", None) is None:
            return original(*args, **kwargs)
        if modes.mode.get().skip:
            return original(*plain_tree(args), **plain_tree(kwargs))
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name, (shape, value) in constants(given.arguments).items():
            if given.arguments[name] is None:
                shape = (shape,) if isinstance(shape, int) else tuple(shape)
                with NoFallbackGuard():
                    whole = ms.ops.full(shape, value, dtype=ms.float32).astype(x.dtype)  # bfloat16 has no kernel
                given.arguments[name] = wrap(whole, Layout(x._layout.mesh, None, shape, x._layout.dtype))
        return original(*given.args, **given.kwargs)
    return call


def _replicating(original):
    """`original`, what it makes of plain tensors taken for replicated ones."""
    @functools.wraps(original)
    def call(*args, **kwargs):
        if first_dtensor(args, kwargs) is None:
            return original(*args, **kwargs)
        with modes.implicit_replication():
            return original(*args, **kwargs)
    return call


def _labelling(original, at: int):
    """`original`, with plain labels and weights laid out as the same on all ranks, which `loss_parallel()` says they are.

    Labels out of range are refused on all ranks; a negative one counts from the last class, as on one device. A cross
    entropy that `loss_parallel(logits, labels)` computes, too, is computed so, which communicates less than op by op.
    Labels may be of any integer dtype, and logits bfloat16, inside the block or not; the loss has the logits' dtype.
    """
    name = original.__name__
    signature = inspect.signature(original) if name in ("cross_entropy", "cross_entropy_ext") else None

    @functools.wraps(original)
    def call(*args, **kwargs):
        one, in_block = first_dtensor(args, kwargs), modes.mode.get().no_gather
        if one is None:
            return original(*args, **kwargs)
        if in_block:
            mesh = one._layout.mesh
            args = *args[:at], *(_whole(x, mesh, bool(i)) for i, x in enumerate(args[at:at + 2])), *args[at + 2:]
            kwargs = {k: _whole(x, mesh, k == "weight") if k in ("target", "weight") else x for k, x in kwargs.items()}
        if signature is None:
            return run(in_block, args, kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        a = given.arguments
        logits, target = a["input"], a["target"]
        if getattr(target, "_layout", None) is not None:
            a["target"] = looked_up(target)
        if in_block and class_loss.fits(**a):
            loss = class_loss.class_loss(name, logits, a["target"], a["ignore_index"], a["reduction"],
                                         a["label_smoothing"], -logits.shape[1])
        else:
            if logits.dtype == ms.bfloat16:  # MindSpore's own refuses it
                a.update({k: a[k].float() for k in ("input", "target", "weight")
                          if a[k] is not None and a[k].dtype == ms.bfloat16})
            loss = run(in_block, given.args, given.kwargs)
        return loss if loss.dtype == logits.dtype else loss.astype(logits.dtype)

    def run(in_block, args, kwargs):
        if in_block and name != "__call__" and not _labels_checked.get():
            return _on_checked_labels(original, args, kwargs)
        return original(*args, **kwargs)
    return call


_labels_checked: ContextVar[bool] = ContextVar("ms_dtensor_labels_checked", default=False)  # by the loss around this one


def _on_checked_labels(original, args, kwargs):
    given = dict(zip(("input", "target", "weight", "ignore_index"), args)) | kwargs
    x, labels = given.get("input"), given.get("target")
    if getattr(labels, "_layout", None) is not None and not labels.is_floating_point() and x is not None and x.shape:
        classes = x.shape[1 if len(x.shape) > 1 else 0]
        check_labels(original.__name__, labels, classes, given.get("ignore_index", -100), -classes)
    token = _labels_checked.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _labels_checked.reset(token)


def _whole(x, mesh, weight: bool):
    return replicate_constant(x, mesh) if x.__class__ is Tensor and (weight or not x.is_floating_point()) else x


def _clip_by_global_norm(x, clip_norm=1.0, use_norm=None):
    """Of DTensors in any mix of layouts: one reduction for each; MindSpore's would meet a plain constant."""
    if use_norm is not None or isinstance(clip_norm, bool) or not clip_norm > 0:
        raise ConfigError(f"For 'clip_by_global_norm', 'clip_norm' must be positive and 'use_norm' None, but got "
                          f"{clip_norm!r} and {use_norm!r}.")
    if isinstance(x, Tensor):
        return _clip_by_global_norm((x,), clip_norm)[0]
    squares: dict = {}
    for g in x:
        square = mint.square(g.astype(ms.float32)).sum()
        key = getattr(square, "_layout", None)
        squares[key] = squares[key] + square if key in squares else square
    partial = [key.describe() for key in squares if key is not None and key.has_partial()]
    if partial:
        policy.check("clip_by_global_norm", "the norms of all ranks have to be put together", "\n".join(partial),
                     ("ms_dtensor.optim.clip_grad_norm_", 'with redistribution_policy("auto"): around this call'))
    whole = [square if key is None else square.redistribute() for key, square in squares.items()]
    if len({None if key is None else key.mesh for key in squares}) > 1:
        whole = [square if getattr(square, "_layout", None) is None else square.to_local() for square in whole]
    norm = mint.maximum(mint.sqrt(sum(whole[1:], whole[0])), Tensor(clip_norm, ms.float32))
    return tuple((g * clip_norm / norm).astype(g.dtype) for g in x)


def _count_nonzero(x, axis=(), keep_dims=False, dtype=ms.int32):
    """MindSpore's compares with plain zeros."""
    return x.count_nonzero(axis=axis, keep_dims=keep_dims, dtype=dtype)


def _recurrent(original):
    """`nn.RNN` and its kin, with the zeros of their first state laid out like the input."""
    @functools.wraps(original)
    def construct(self, x, hx=None, seq_length=None):
        if hx is None and getattr(x, "_layout", None) is not None and not modes.mode.get().skip:
            with NoFallbackGuard():
                zeros = ms.ops.zeros((len(self.w_ih_list), x.shape[0 if self.batch_first else 1], self.hidden_size), x.dtype)
            hx = replicate_constant(zeros, x._layout.mesh)
            hx = (hx, hx) if self.is_lstm else hx
        return original(self, x, hx, seq_length)
    return construct


def _lstm_layer(original):
    """`nn.LSTM` step by step, as with `seq_length`; the CPU's kernel of a whole layer takes the weights as one vector."""
    @functools.wraps(original)
    def construct(self, x, *rest):
        ours = getattr(x, "_layout", None) is not None and not modes.mode.get().skip
        return rnns._DynamicRNNBase("LSTM")(x, *rest) if ours else original(self, x, *rest)
    return construct


def _with_dtensors(original, ours):
    @functools.wraps(original)
    def call(x, *args, **kwargs):
        found = not modes.mode.get().skip and any(getattr(t, "_layout", None) is not None for t in leaves(x, Tensor))
        return (ours if found else original)(x, *args, **kwargs)
    return call


def _copysign(original):
    """`ops.copysign` with a number, which MindSpore makes a plain tensor of the other's shape."""
    @functools.wraps(original)
    def copysign(x, other):
        plain = isinstance(other, int | float) or (isinstance(other, Tensor) and getattr(other, "_layout", None) is None)
        if plain and getattr(x, "_layout", None) is not None and not getattr(other, "shape", ()):
            other = ms.ops.full_like(x, float(other), dtype=ms.float32)
        return original(x, other)
    return copysign


def _both_states(get):
    """Recompute's saving of random state, with ours beside MindSpore's."""
    return lambda: (get(), rng.get_rng_state())


def _to_both_states(put):
    """Recompute's restoring of it."""
    def restore(state):
        if isinstance(state, tuple):
            rng.set_rng_state(state[1])
            state = state[0]
        return put(state)
    return restore


def _restarting(original):
    """`ms.set_seed`, by a function that it calls: the stream of DTensors starts anew from MindSpore's seed."""
    @functools.wraps(original)
    def reset():
        rng.restart()
        return original()
    return reset


def _seeding(original):
    """`ms.manual_seed`: a seed for the default generator is one for DTensors."""
    @functools.wraps(original)
    def manual_seed(self, seed):
        out = original(self, seed)
        if self is ms.default_generator:
            rng.manual_seed(seed)
        return out
    return manual_seed


def _holder(path: str):
    module, _, name = path.partition(":")
    holder = importlib.import_module(module)
    return getattr(holder, name) if name else holder


def doors() -> list[tuple]:
    """The redirections that fit this MindSpore, and those that every MindSpore must have."""
    found = [(_holder(path), name, door) for path, name, door in (
        *((path, name, functools.partial(_asking, meaning=meaning)) for path, name, meaning in _FUNCTIONS),
        *((path, name, functools.partial(_filling, constants=constants)) for path, name, constants in _FILLED),
        *((path, name, _replicating) for path, name in _WITH_CONSTANTS),
        *((path, name, functools.partial(_labelling, at=at)) for path, name, at in _LABELLED),
        *((path, "clip_by_global_norm", functools.partial(_with_dtensors, ours=_clip_by_global_norm))
          for path in ("mindspore.ops.function.clip_func", *_EVERYWHERE)))]
    seeds, recompute = (importlib.import_module(f"mindspore.common.{name}") for name in ("seed", "recompute"))
    return [*(door for door in found if hasattr(*door[:2])),
            *((_holder(path), "count_nonzero", functools.partial(_with_dtensors, ours=_count_nonzero)) for path in _MATH),
            *((_holder(path), "copysign", _copysign) for path in (*_MATH, f"{_EVERYWHERE[1]}:tensor_operator_registry")),
            (rnns._RNNBase, "construct", _recurrent), (rnns._DynamicLSTMCPUGPU, "construct", _lstm_layer),
            (seeds, "_reset_op_seed", _restarting), (ms.Generator, "manual_seed", _seeding),
            (recompute, "get_rng_state", _both_states), (recompute, "set_rng_state", _to_both_states)]
