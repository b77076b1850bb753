# SPDX-License-Identifier: Apache-2.0
"""Ported imports work, and an adapter is met by what it does; with stand-ins, as none runs on MindSpore 2.10."""
import importlib

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

import ms_dtensor
from ms_dtensor import DTensor, Shard, init_device_mesh
from ms_dtensor.compat import msadapter, torch_names
from ms_dtensor.errors import ConfigError
from ms_dtensor.ops.rules import RULES, Call, Operand
from tests.msrun import python

BASE = "ms_dtensor.compat.torch_names."


@pytest.mark.parametrize("path", sorted(torch_names.MODULES))
def test_every_promised_name_is_there(path):
    module = importlib.import_module(BASE + path)
    for name in dir(module):
        if name in ("fully_shard", "visualize_sharding") and not hasattr(ms_dtensor, name):
            continue  # pinned by their own tests
        assert callable(getattr(module, name)), name
    with pytest.raises(AttributeError, match="parity_api"):
        getattr(module, "no_such_name")  # noqa: B009  the name, as an import asks for it


def test_a_ported_program():
    from ms_dtensor.compat.torch_names.distributed.device_mesh import init_device_mesh as make_mesh
    from ms_dtensor.compat.torch_names.distributed.tensor import DTensor as Ported
    from ms_dtensor.compat.torch_names.distributed.tensor import Replicate, distribute_tensor, zeros
    from ms_dtensor.compat.torch_names.distributed.tensor.experimental import local_map
    from ms_dtensor.compat.torch_names.distributed.tensor.parallel import ColwiseParallel
    assert Ported is DTensor and ColwiseParallel is ms_dtensor.ColwiseParallel
    mesh = make_mesh("cpu", (1,), mesh_dim_names=("tp",))
    x = distribute_tensor(Tensor(np.ones((4, 2), np.float32)), mesh, [Shard(0)])
    y = local_map(lambda t: t + 1, out_placements=[Shard(0)], in_placements=([Shard(0)],))(x)
    out = (y + zeros(4, 2, device_mesh=mesh, placements=[Replicate()])).full_tensor()
    np.testing.assert_array_equal(out.asnumpy(), np.full((4, 2), 2.0))


def test_register_sharding():
    sharding = torch_names.register_sharding

    @sharding(["OneOwn", "OtherOwn"])
    def own(x, dim):
        return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim) if d != dim % x.ndim]
    try:
        x = Operand(0, (4, 6), "float32")
        for op in ("OneOwn", "OtherOwn"):
            spec = RULES[op](Call(op, {"inputs": (x, -1)}, (x,)))
            assert [repr(c) for c in spec.cases] == ["S(0) -> S(0)"] and spec.cases[0].even == ((0, 0, 4),)
    finally:
        for op in ("OneOwn", "OtherOwn"):
            ms_dtensor.unregister_rule(op)


class Box:
    """A leaf of an adapter that wraps tensors instead of inheriting them."""

    def __init__(self, tensor):
        self.ms_tensor = tensor


class Module:
    """A torch-style module, as any adapter has it."""

    def __init__(self, parameters=None, buffers=None, modules=None):
        self._parameters, self._buffers, self._modules = parameters or {}, buffers or {}, modules or {}


def model():
    w = Parameter(Tensor(np.arange(8, dtype=np.float32).reshape(4, 2)), name="w", requires_grad=False)
    return Module({"weight": w, "bias": None}, {"scale": Box(Tensor(np.float32(2.0)))},
                  {"inner": Module({"weight": w, "own": Parameter(Tensor(np.ones(3, np.float32)), name="own")}),
                   "none": None})


def test_leaves_are_distributed_in_place():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    m = model()
    assert [path for path, *_ in msadapter.leaves(m)] == ["weight", "scale", "inner.weight", "inner.own"]
    assert msadapter.distribute_leaves(m, mesh, {"weight": [Shard(0)]}) is m
    w, inner = m._parameters["weight"], m._modules["inner"]
    assert w is inner._parameters["weight"]  # still tied
    assert isinstance(w, DTensor) and isinstance(w, Parameter) and w.placements == (Shard(0),)
    assert w.name == "w" and not w.requires_grad and m._parameters["bias"] is None
    assert inner._parameters["own"].layout.is_replicated() and inner._parameters["own"].requires_grad
    assert isinstance(m._buffers["scale"], DTensor)
    g, = ms.grad(lambda: (inner._parameters["own"] * 3).sum(), None, [inner._parameters["own"]])()
    np.testing.assert_array_equal(g.asnumpy(), np.full(3, 3.0))


def test_refusals_leave_the_module_alone():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    m = model()
    with pytest.raises(ConfigError, match=r"names no leaf: \['wieght'\]"):
        msadapter.distribute_leaves(m, mesh, {"wieght": [Shard(0)]})
    m._buffers["odd"] = object()
    with pytest.raises(ConfigError, match="no MindSpore tensor"):
        msadapter.distribute_leaves(m, mesh)
    assert not isinstance(m._parameters["weight"], DTensor)
    with pytest.raises(ConfigError, match="no torch-style module"):
        list(msadapter.leaves(object()))


def test_adapters_say_why_not(tmp_path, monkeypatch):
    (tmp_path / "good_adapter.py").write_text("__version__ = '9.1'\n")
    (tmp_path / "bad_adapter.py").write_text("from mindspore.no_such_place import anything\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    good, bad, none = msadapter.adapters(("good_adapter", "bad_adapter", "no_adapter"))
    assert good.usable and str(good) == "good_adapter 9.1: usable"
    assert not bad.usable and "ModuleNotFoundError" in bad.reason
    assert not none.usable and "no module" in str(none)
    assert len(msadapter.adapters()) == len(msadapter.CANDIDATES)


def test_nothing_imports_them_otherwise():
    code = ("import sys, ms_dtensor, ms_dtensor.parallel; ms_dtensor.DTensor; "
            "print([m for m in sys.modules if m.startswith(('ms_dtensor.compat', 'msadapter'))])")
    out = python("-c", code, check=True)
    assert out.stdout.strip().splitlines()[-1] == "[]"
