# SPDX-License-Identifier: Apache-2.0
"""What MindFormers 2.1 calls and MindSpore's CPU has not, as small functions of what it has; `NAMED` says each, and why.

The wheel itself stays as it is: these names are put where it looks for them. Not here: what ms_dtensor is asked for.
"""
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_dtensor import DTensor
from ms_dtensor.comm.packing import write

NO_KERNEL = "no CPU kernel"
NAMED: dict[str, str] = {}  # what was put -> why

# packages that the wheel imports and a tiny model never uses
PACKAGES = ("requests urllib3 deprecated sentencepiece ftfy regex jieba rouge_chinese mindpet astunparse tiktoken "
            "setproctitle tensorboardX datasets pyarrow cv2 PIL nltk multiprocess dill pandas emoji evaluate megfile "
            "zmq tqdm tokenizers transformers huggingface_hub").split()


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


def _topk(x, k, dim=-1, largest=True, sorted=True):
    assert largest and dim in (-1, x.ndim - 1), (largest, dim)
    return ops.topk(x, k)


def _histc(x, bins=100, min=0, max=0):
    """Of whole numbers: how many are each of 0 to bins - 1; the last bin has `max`, too."""
    assert min == 0 and max == bins, (bins, min, max)
    return ops.bincount(x.reshape(-1).astype(ms.int32), minlength=bins)[:bins].astype(x.dtype)


def _scatter_(self, dim, index, value):
    """Of a mask, which has no gradient."""
    filled = self.asnumpy().copy()
    np.put_along_axis(filled, index.asnumpy(), value, dim)
    return self.copy_(Tensor(filled))


def _zero_(self):
    self[...] = 0  # a view is written, too
    return self


def _norm(x, p="fro", dim=None, keepdim=False, *, dtype=None):
    assert p == "fro", p
    return mint.sqrt(mint.sum(x * x, dim, keepdim=keepdim)).astype(dtype or x.dtype)


def _argsort(x, dim=-1, descending=False, stable=False):
    assert dim == -1 and x.ndim == 1 and not descending, (dim, x.shape)
    return Tensor(np.argsort(x.asnumpy(), kind="stable"), ms.int64)


def _sort(x, dim=-1, descending=False, stable=False):
    assert dim == -1 and x.ndim == 1 and not descending, (dim, x.shape)
    order = np.argsort(x.asnumpy(), kind="stable")
    return ops.gather(x, Tensor(order, ms.int32), 0), Tensor(order, ms.int64)


def _inplace_copy(dst, src):
    into, values = (x.to_local() if isinstance(x, DTensor) else x for x in (dst, src))
    write(into, values + 0)  # of a view its own values
    return dst


class GroupedMatmul:
    """Rows of one operand in groups, each group by its own matrix; `group_list` says where each group ends."""

    def __init__(self, split_item=3, group_type=0, **kwargs):
        assert (split_item, group_type) == (3, 0), (split_item, group_type)

    def __call__(self, x, weight, *others):
        ends = [int(end) for end in others[-1].asnumpy()]
        starts = [0, *ends[:-1]]
        rows, = x
        matrices, = weight
        parts = [mint.matmul(mint.narrow(rows, 0, start, end - start), matrices[i])
                 for i, (start, end) in enumerate(zip(starts, ends)) if end > start]
        return (mint.cat(parts, 0),)


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
    _put(mint, "ones_like", lambda x, dtype=None: ops.ones(x.shape, dtype or x.dtype))
    _put(mint, "stack", lambda tensors, dim=0: mint.cat([mint.unsqueeze(t, dim) for t in tensors], dim))
    _put(mint, "repeat_interleave", lambda x, times, dim: ops.repeat_elements(x, times, dim))
    _put(mint, "addcmul", _addcmul)
    _put(mint, "topk", _topk)
    _put(mint, "norm", _norm)
    _put(mint, "mm", lambda a, b: mint.matmul(a, b))
    for name in ("addmm", "baddbmm"):
        _put(mint, name, lambda x, a, b, *, beta=1, alpha=1: x * beta + mint.matmul(a, b) * alpha)
    _put(mint, "gather", lambda input, dim, index: ops.gather_elements(input, dim, index))
    _put(mint, "histc", _histc)
    _put(mint, "floor_divide", lambda x, y: ops.floor_div(x, y))
    _put(mint, "fmod", lambda x, y: ops.floor_mod(x, y))
    _put(mint, "argsort", _argsort)
    _put(mint, "sort", _sort)
    _put(mint, "cumsum", lambda x, dim, dtype=None: ops.cumsum(x, dim).astype(dtype or x.dtype))
    _put(mint, "split", _split, "MindSpore's CPU gradient reads a strided cotangent as a contiguous one")
    _put(ops, "swiglu", _swiglu)
    _put(Tensor, "scatter_", _scatter_)
    to_empty = nn.Cell.to_empty
    _put(nn.Cell, "to_empty", lambda cell: to_empty(cell, device="CPU"), "on CPU, without a device, plain ones stay on meta")
    _put(Tensor, "zero_", _zero_)
    _put(Tensor, "detach", lambda x: ops.stop_gradient(x), "the reference runs without the backward compat that has it")
    _put(Tensor, "clone", lambda x: x + 0)
    _put(Tensor, "add_", lambda x, other: x.copy_(x + other), "MindSpore's CPU leaves the tensor as it was")
    _put(Tensor, "mul_", lambda x, other: x.copy_(x * other), "MindSpore's CPU leaves the tensor as it was")


class Attention:
    """`FlashAttentionScore` in layouts BNSD and BSH, written out."""

    def __init__(self, head_num, scale_value=1.0, input_layout="BNSD", **kwargs):
        self.heads, self.scale, self.layout = head_num, scale_value, input_layout
        assert input_layout in ("BNSD", "BSH"), input_layout

    def __call__(self, query, key, value, attn_mask=None, **kwargs):
        if self.layout == "BSH":
            width = query.shape[2] // self.heads
            parts = [x.reshape((*x.shape[:2], -1, width)).transpose((0, 2, 1, 3)) for x in (query, key, value)]
            out = self._of_heads(*parts, attn_mask).transpose((0, 2, 1, 3))
            return None, None, None, out.reshape((*out.shape[:2], -1))
        return None, None, None, self._of_heads(query, key, value, attn_mask)

    def _of_heads(self, query, key, value, attn_mask):
        assert query.shape[1] == self.heads, (query.shape, self.heads)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = (ops.repeat_elements(t, shared, 1) for t in (key, value))
        score = mint.matmul(query.float(), mint.transpose(key.float(), 2, 3)) * self.scale
        if attn_mask is not None:
            mask = attn_mask if attn_mask.ndim > 2 else attn_mask[:score.shape[2], :score.shape[3]]
            score = score + mask.float() * -1e9
        return mint.matmul(mint.softmax(score, -1), value.float()).astype(query.dtype)


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
    from mindformers.pynative.transformers.moe import experts

    # what it casts attention's operands to, if they are in float32; the rounding, 1e-4 of a gradient, hides what is compared
    wide = types.SimpleNamespace(**{**vars(attention.mstype), "float16": ms.float32})
    _put(attention, "mstype", wide, "Ascend's FlashAttentionScore takes 16 bits only; this one takes float32")
    wider = types.SimpleNamespace(**{**vars(muon.mstype), "bfloat16": ms.float32})
    _put(muon, "mstype", wider, "its Newton-Schulz rounds to 16 bits, which hides what is compared; this one does not")
    _put(muon, "inplace_copy", _inplace_copy, "MindSpore's CPU takes the whole of a view's memory in copy_, or leaves it")
    _put(muon, "_enable_muon_cube_math_type", lambda: None, "a setting of Ascend's cube units")
    for holder in (flash_attention, parallelize):
        _put(holder, "FlashAttentionScore", Attention)
    _put(layer_norm, "rms_norm", _rms_norm)
    _put(experts, "GroupedMatmul", GroupedMatmul)
