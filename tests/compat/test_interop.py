# SPDX-License-Identifier: Apache-2.0
"""Ported imports work, and an adapter is met by what it does, with stand-ins, as none runs on MindSpore 2.10.

`hyper_parallel` as a package that is not installed: what is imported from it, what raises, and the command.
"""
import copy
import importlib
import itertools
import re
import subprocess
import sys
import types
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

import ms_dtensor
import ms_dtensor as md
from ms_dtensor import DTensor, Shard, init_device_mesh
from ms_dtensor.compat import msadapter, torch_names
from ms_dtensor.compat.hyper_parallel import register, unregister
from ms_dtensor.compat.hyper_parallel.names import homes, not_offered
from ms_dtensor.errors import ConfigError, LayoutError, MeshError
from ms_dtensor.ops.rules import RULES, Call, Operand
from tests.msrun import PATIENCE, python, run_ranks

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


# Every import from hyper_parallel in MindFormers 2.1.0 (the wheel), by module.
MINDFORMERS = {
    "": "DTensor DeviceMesh PipelineStage SkipDTensorDispatch init_device_mesh shard_module",
    "core.activation_checkpoint": "CheckpointPolicy SwapManager checkpoint_exclude_wrapper checkpoint_wrapper swap_wrapper",
    "core.context_parallel.async_context_parallel": "AsyncContextParallel",
    "core.context_parallel.async_dsa_context_parallel":
        "AsyncDSAIndexerContextParallel AsyncDSAIndexerLossContextParallel AsyncDSASparseAttentionContextParallel",
    "core.context_parallel.context_parallel": "ContextParallel",
    "core.context_parallel.dsa_context_parallel":
        "DSAIndexerContextParallel DSAIndexerLossContextParallel DSASequenceReplicateCache "
        "DSASparseAttentionContextParallel",
    "core.distributed_checkpoint": "get_current_layout get_global_layout",
    "core.dtensor": "DTensor",
    "core.dtensor.dtensor": "DTensor distribute_tensor",
    "core.dtensor.layout": "_infer_slice_area_by_rank",
    "core.dtensor.placement_types": "Partial Placement Replicate Shard",
    "core.dtensor.redistribute_infer": "DevMat RedistributionOperatorInfer",
    "core.fully_shard.api": "HSDPModule MixedPrecisionPolicy fully_shard",
    "core.fully_shard.utils": "CPUOffloadPolicy OffloadPolicy",
    "core.pipeline_parallel": "Schedule1F1B ScheduleGPipe ScheduleInterleaved1F1B",
    "core.pipeline_parallel.comm_compute_overlap": "CommComputeOverlap",
    "core.pipeline_parallel.hook_coordinator": "HookCoordinator HookRole",
    "core.pipeline_parallel.scheduler": "MetaStepType",
    "core.shard.sharding_plan": "ShardingPlan",
    "custom_ops.experimental":
        "npu_dense_lightning_indexer_grad_kl_loss npu_dense_lightning_indexer_softmax_lse npu_lightning_indexer "
        "npu_mhc_post npu_mhc_pre_sinkhorn npu_sparse_flash_mla npu_sparse_flash_mla_grad "
        "npu_sparse_lightning_indexer_grad_kl_loss npu_sparse_lightning_indexer_kl_loss_grad",
    "platform": "get_platform",
    "platform.mindspore.autograd_compat": "enable_mindspore_backward_compat",
    "platform.mindspore.pipeline_parallel._utils": "_MicroBatch",
}


@pytest.fixture
def registered():
    """The package under its name, for one test."""
    register()
    yield
    unregister()


@pytest.mark.parametrize("module", MINDFORMERS)
def test_all_that_mindformers_imports_is_there(module, registered):
    found = importlib.import_module(f"hyper_parallel.{module}".rstrip("."))
    assert [name for name in MINDFORMERS[module].split() if not hasattr(found, name)] == []
    with pytest.raises(AttributeError, match="has no 'NoSuchName'"):
        found.NoSuchName  # noqa: B018


def test_every_name_that_is_offered_is_one(registered):
    for module, names in homes().items():
        found = importlib.import_module(f"hyper_parallel.{module}".rstrip("."))
        for name in names:
            assert getattr(found, name) is not None, (module, name)
        assert set(names) <= set(dir(found))


REFUSED = [(module, name) for module, names in not_offered().items() for name in names]


@pytest.mark.parametrize(("module", "name"), REFUSED, ids=[f"{m}.{n}" for m, n in REFUSED])
def test_what_is_not_offered_raises_when_it_is_used(module, name, registered):
    found = getattr(importlib.import_module(f"hyper_parallel.{module}"), name)
    below = types.new_class("Below", (found,))
    assert not isinstance(3, found)
    for used in (found, below, lambda: found.ANYTHING, lambda: found(1, two=2)):
        with pytest.raises(ConfigError, match="is not offered") as e:
            used()
        assert not_offered()[module][name] in str(e.value) and f"hyper_parallel.{module}" in str(e.value)


def test_the_package_comes_and_goes(monkeypatch):
    with pytest.raises(ModuleNotFoundError):
        import hyper_parallel
    register()
    register()  # again changes nothing
    import hyper_parallel
    import hyper_parallel.core.dtensor.dtensor as dtensor
    assert hyper_parallel.DTensor is md.DTensor is dtensor.DTensor and hyper_parallel.core.dtensor.dtensor is dtensor
    unregister()
    assert not [name for name in sys.modules if name.split(".")[0] == "hyper_parallel"]
    monkeypatch.setitem(sys.modules, "hyper_parallel", types.ModuleType("hyper_parallel"))
    with pytest.raises(ConfigError, match="has been imported"):
        register()


def test_meshes_of_the_word_npu_are_where_mindspore_computes(registered, caplog):
    import hyper_parallel
    mesh = hyper_parallel.init_device_mesh("npu", (1,), mesh_dim_names=("world",))
    assert mesh.device_type == "cpu" and "read as 'cpu'" in caplog.text
    both = mesh._unflatten(0, (1, 1), ("dp", "tp"), backend_override={"dp": "fake"})
    assert isinstance(both, hyper_parallel.DeviceMesh) and both["dp", "tp"]._flatten("loss").mesh_dim_names == ("loss",)
    with pytest.raises(MeshError, match="cannot be kept"):
        mesh._unflatten(0, (1, 1), ("dp", "tp"), backend_override={"dp": "hccl"})


def test_where_shards_lie_by_its_names(registered):
    """Pieces by rank, gathers in order, for each way to cut a matrix over two axes, against the layout's own boxes."""
    layouts = importlib.import_module("hyper_parallel.core.dtensor.layout")
    infer = importlib.import_module("hyper_parallel.core.dtensor.redistribute_infer")
    mesh = md.DeviceMesh("cpu", [[4, 1, 0], [2, 3, 5]], mesh_dim_names=("dp", "tp"))
    places = [md.Replicate(), md.Shard(0), md.Shard(1)]
    for placed, order in itertools.product(itertools.product(places, places), (None, ("tp", "dp"))):
        layout = md.Layout(mesh, placed, (12, 6), order=order)
        assert (layout.rank_list, layout.mesh_shape, layout.alias_placements) == ((4, 1, 0, 2, 3, 5), (2, 3), placed)
        for i, at in enumerate(itertools.product(range(2), range(3))):
            assert layouts._infer_slice_area_by_rank((2, 3), layout.tensor_map, i, (12, 6)) == list(layout.local_box(at))
        other = copy.deepcopy(layout)
        other.set_placements([md.Replicate()] * 2)
        other.placement_to_tensor_map(2)
        other.reset_partial()
        assert other.tensor_map == (-1, -1) and layout.placements == placed
        ops = infer.RedistributionOperatorInfer(
            dev_mat=layout.mesh_shape, in_tensor_map=list(layout.tensor_map), out_tensor_map=list(other.tensor_map)
        ).infer_ops_list(3, layout.rank_list)
        pieces = {rank: [*layout.local_box(divmod(i, 3))] for i, rank in enumerate(layout.rank_list)}
        for name, (dim, size, ranks) in ops:  # neighbours, whose pieces make one together
            assert name == "all_concat" and size == len(ranks) and 3 in ranks
            ends = [pieces[r][dim] for r in ranks]
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ends)), (layout, ops)
            for held in pieces.values():
                start, width = held[dim][0], (held[dim][1] - held[dim][0]) * size
                held[dim] = (start // width * width, start // width * width + width)
        assert pieces[3] == [(0, 12), (0, 6)], (layout, ops)
    assert md.Layout(mesh, [md.Shard(0), md.Replicate()], (12, 6)).get_global_shape((6, 6)) == (12, 6)
    partial = copy.deepcopy(md.Layout(mesh, [md.Partial(), md.Shard(0)], (6,)))
    partial.reset_partial()
    assert partial.placements == (md.Replicate(), md.Shard(0))
    with pytest.raises(LayoutError, match="more than gathers"):
        infer.RedistributionOperatorInfer([2, 3], [1, -1], [-1, 1])
    with pytest.raises(LayoutError, match="does not split evenly"):
        layouts._infer_slice_area_by_rank((2, 3), [0], 0, (4,))


def test_layouts_have_its_names_while_it_is_registered():
    layout = md.Layout(md.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), [md.Shard(0)], (4, 2))
    assert not hasattr(layout, "rank_list") and copy.deepcopy(layout) is layout
    register()
    assert layout.get_split_id(0) == 0 and layout.get_global_shape((4, 2)) == (4, 2) and layout.alias_tensor_map
    assert copy.deepcopy(layout) is not layout
    unregister()
    assert not hasattr(layout, "rank_list") and copy.deepcopy(layout) is layout


PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "from_mindformers_2_1.md"


def test_every_row_of_the_page_has_a_test_and_every_name_a_row():
    text = PAGE.read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[-1] != "test"]
    assert len(rows) > 25 and text.count("|---|---|---|") == 2
    for theirs, ours, test in rows:
        path, _, name = test.strip("`").partition("::")
        text = (PAGE.parents[2] / "tests" / path).read_text("utf-8")
        given = "" if name.startswith("test_") else "world"  # a test of pytest's, or a case of ranks
        assert name and re.search(rf"^def {name}\({given}", text, re.M), test
        refused = [n for names in not_offered().values() for n in names if f"`{n}`" in theirs]
        assert bool(refused) == ours.startswith("not offered"), theirs
        assert not refused or name == "test_what_is_not_offered_raises_when_it_is_used", theirs
    listed = " ".join(re.findall(r"`[^`]*`", " ".join(theirs for theirs, _, _ in rows)))
    assert [n for names in MINDFORMERS.values() for n in names.split() if not re.search(rf"\b{n}\b", listed)] == []


SCRIPT = """
import sys
from hyper_parallel.core.dtensor.placement_types import Shard
import beside
if __name__ == "__main__":
    print(Shard(beside.DIM), sys.argv[1:])
    sys.exit(7)
"""


def test_a_script_runs_unedited(tmp_path):
    (tmp_path / "beside.py").write_text("DIM = 1\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "ms_dtensor", "run", "--as", "hyper_parallel"]
    done = subprocess.run([*run, str(tmp_path / "train.py"), "--as", "x"], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout.strip()) == (7, "Shard(1) ['--as', 'x']"), done.stderr
    gone = subprocess.run([*run, str(tmp_path / "none.py")], capture_output=True, text=True, timeout=PATIENCE)
    assert gone.returncode == 2 and "there is no file" in gone.stderr


ON_RANKS = """
import sys
from hyper_parallel import DTensor, init_device_mesh
from hyper_parallel.core.dtensor.placement_types import Shard
from mindspore import Tensor
from tests.msrun import report
mesh = init_device_mesh("npu", (2,), mesh_dim_names=("dp",))
whole = DTensor.from_local(Tensor([mesh.get_rank() + 1.0]), mesh, [Shard(0)]).full_tensor()
report([whole.asnumpy().tolist(), sys.argv[1:]])
"""


def test_the_pages_command_runs_a_script_on_ranks(tmp_path):
    (tmp_path / "train.py").write_text(ON_RANKS)
    msrun, _, words = re.search("^msrun .*", PAGE.read_text("utf-8"), re.M)[0].partition(" python -m ms_dtensor ")
    assert msrun == "msrun --worker_num=8 --local_worker_num=8 --join=True"  # so does `run_ranks` begin, but for the number
    told = run_ranks("ms_dtensor", 2, words.split(), log_dir=tmp_path)
    assert told == [[[[1.0, 2.0], ["--config", "train.yaml"]]]] * 2
