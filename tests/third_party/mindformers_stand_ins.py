# SPDX-License-Identifier: Apache-2.0
"""What MindFormers 2.1 calls and MindSpore's CPU has not, as small functions of what it has; `NAMED` says each, and why.

The wheel itself stays as it is: these names are put where it looks for them. Not here: what ms_dtensor is asked for.
"""
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

NO_KERNEL = "no CPU kernel"
NAMED: dict[str, str] = {}  # what was put -> why

# packages that the wheel imports and a tiny model never uses
PACKAGES = ("requests urllib3 deprecated sentencepiece ftfy regex jieba rouge_chinese mindpet astunparse tiktoken "
            "setproctitle tensorboardX datasets pyarrow cv2 PIL nltk multiprocess dill pandas emoji evaluate megfile "
            "zmq").split()


class _Anything(types.ModuleType):
    """A package of which every name is a class that does nothing; `deprecated` is a decorator of some."""

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        if name == "__version__":
            return "9.9.9"
        if name == "deprecated":
            return lambda *args, **kwargs: lambda function: function
        found = type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, *a, **k: None,
                                "__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]):
        self.names = names

    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if top in self.names else None

    def create_module(self, spec):
        module = _Anything(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def packages() -> None:
    """Empty packages in the place of those that are not installed."""
    absent = {name for name in PACKAGES if importlib.util.find_spec(name) is None}
    sys.meta_path.append(_Finder(absent))
    NAMED.update(dict.fromkeys(sorted(absent), "not installed"))


def _put(holder, name: str, function, why: str = NO_KERNEL) -> None:
    setattr(holder, name, function)
    NAMED[f"{getattr(holder, '__name__', holder)}.{name}"] = why


def _arange(start=0, end=None, step=1, dtype=None):
    values = np.arange(start) if end is None else np.arange(start, end, step)
    return Tensor(values, dtype)


def _addcmul(x, a, b, value=1):
    return x + a * b * value


def _split(x, split_size_or_sections, dim=0):
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - at) for at in range(0, x.shape[dim], sizes)]
    starts = np.cumsum([0, *sizes[:-1]])
    return tuple(mint.narrow(x, dim, int(at), size) for at, size in zip(starts, sizes))


def _swiglu(x, dim=-1):
    gate, up = mint.chunk(x, 2, dim)
    return mint.nn.functional.silu(gate) * up


def kernels() -> None:
    """Functions of MindSpore; before the wheel is imported, which keeps some of them."""
    _put(mint, "full", lambda size, value, dtype=None: Tensor(np.full(size, value), dtype or ms.float32))
    _put(mint, "index_select", lambda x, dim, index: ops.gather(x, index, dim))
    _put(mint, "tril", lambda x, diagonal=0: x * Tensor(np.tril(np.ones(x.shape), diagonal), x.dtype))
    _put(mint, "arange", _arange)
    _put(mint, "outer", lambda a, b: a.reshape(-1, 1) * b.reshape(1, -1))
    _put(mint, "scatter_add",
         lambda x, dim, index, src: ops.tensor_scatter_elements(x, index, src, axis=dim, reduction="add"))
    _put(mint, "zeros_like", lambda x, dtype=None: ops.zeros(x.shape, dtype or x.dtype))
    _put(mint, "stack", lambda tensors, dim=0: mint.cat([mint.unsqueeze(t, dim) for t in tensors], dim))
    _put(mint, "repeat_interleave", lambda x, times, dim: ops.repeat_elements(x, times, dim))
    _put(mint, "addcmul", _addcmul)
    _put(mint, "split", _split, "MindSpore's CPU gradient reads a strided cotangent as a contiguous one")
    _put(ops, "swiglu", _swiglu)
    _put(Tensor, "mul_", lambda x, other: x.copy_(x * other), "MindSpore's CPU leaves the tensor as it was")


class Attention:
    """`FlashAttentionScore` in layout BNSD, written out."""

    def __init__(self, head_num, scale_value=1.0, input_layout="BNSD", **kwargs):
        self.heads, self.scale = head_num, scale_value
        assert input_layout == "BNSD", input_layout

    def __call__(self, query, key, value, attn_mask=None, **kwargs):
        assert query.shape[1] == self.heads, (query.shape, self.heads)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = (ops.repeat_elements(t, shared, 1) for t in (key, value))
        score = mint.matmul(query.float(), mint.transpose(key.float(), 2, 3)) * self.scale
        if attn_mask is not None:
            mask = attn_mask if attn_mask.ndim > 2 else attn_mask[:score.shape[2], :score.shape[3]]
            score = score + mask.float() * -1e9
        return None, None, None, mint.matmul(mint.softmax(score, -1), value.float()).astype(query.dtype)


def _rms_norm(x, weight, eps):
    y = x.float()
    y = y * mint.rsqrt(mint.mean(y * y, -1, keepdim=True) + eps)
    return y.astype(x.dtype) * weight.astype(x.dtype), None


def after_import() -> None:
    """Names that the wheel's modules hold."""
    from mindformers.pynative.base_models.gpt import parallelize
    from mindformers.pynative.layers import flash_attention, layer_norm
    from mindformers.pynative.optimizer import muon
    from mindformers.pynative.transformers import attention

    # what it casts attention's operands to, if they are in float32; the rounding, 1e-4 of a gradient, hides what is compared
    wide = types.SimpleNamespace(**{**vars(attention.mstype), "float16": ms.float32})
    _put(attention, "mstype", wide, "Ascend's FlashAttentionScore takes 16 bits only; this one takes float32")
    wider = types.SimpleNamespace(**{**vars(muon.mstype), "bfloat16": ms.float32})
    _put(muon, "mstype", wider, "its Newton-Schulz rounds to 16 bits, which hides what is compared; this one does not")
    _put(muon, "_enable_muon_cube_math_type", lambda: None, "a setting of Ascend's cube units")
    for holder in (flash_attention, parallelize):
        _put(holder, "FlashAttentionScore", Attention)
    _put(layer_norm, "rms_norm", _rms_norm)
