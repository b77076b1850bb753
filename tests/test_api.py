# SPDX-License-Identifier: Apache-2.0
"""The public surface: names and signatures are frozen, what is promised is importable, and the parity table is true.

After a deliberate change: UPDATE_SNAPSHOTS=1 pytest tests/test_api.py
"""
import importlib
import inspect
import os
import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import ms_dtensor as md
from ms_dtensor import DTensor, Partial, Replicate, Shard

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "snapshots" / "api.txt"
FROZEN = ("ms_dtensor", "ms_dtensor.parallel", "ms_dtensor.optim", "ms_dtensor.pipeline", "ms_dtensor.checkpoint",
          "ms_dtensor.verify", "ms_dtensor.registry", "ms_dtensor.interop.msadapter")
OWN = {"ms_dtensor.registry": ("Registration", "parse_cases", "register_rule", "unregister_rule"),
       "ms_dtensor.interop.msadapter": ("Adapter", "adapters", "as_mindspore", "distribute_leaves", "leaves", "swap_leaves")}

PROMISED = {
    "ms_dtensor": """
        DeviceMesh init_device_mesh Shard Replicate Partial Layout DTensor distribute_tensor distribute_module ones zeros
        empty full rand randn manual_seed value_and_grad grad SkipDTensorDispatch implicit_replication redistribution_policy
        local_map register_rule DFunction parallelize_module ParallelStyle ColwiseParallel RowwiseParallel SequenceParallel
        PrepareModuleInput PrepareModuleOutput PrepareModuleInputOutput loss_parallel replicate""",
    "ms_dtensor.parallel": "parallelize_module ParallelStyle ColwiseParallel RowwiseParallel loss_parallel replicate",
    "ms_dtensor.verify": "check_rule",
    "ms_dtensor.optim": "clip_grad_norm_ AdamW SGD Adafactor Muon EMA cosine linear wsd step_if_finite",
    "ms_dtensor.pipeline": "Action Actions gpipe one_f_one_b interleaved zb_h1 zbv dualpipe_v simulate lower check draw",
    "ms_dtensor.checkpoint": "save load latest verify convert wait",
    "ms_dtensor.debug": "visualize_sharding",
    "ms_dtensor.comm": "get_backend set_cpu_backend register_backend fake_world",
}
METHODS = {
    DTensor: """from_local to_local redistribute full_tensor reduce_partial device_mesh placements layout shape local_shape
        dtype ndim size numel to float half bfloat16 astype detach clone item asnumpy""",
    md.DeviceMesh: """ndim shape size mesh mesh_dim_names device_type rank_list flatten get_coordinate get_local_rank
        get_rank get_group from_group __enter__ __getitem__""",
    md.Layout: "mesh placements shape dtype local_shape local_offset gradient",
    md.DFunction: "apply forward backward _op_name in_placements out_placements",
    Shard: "is_shard is_replicate is_partial", Replicate: "is_shard", Partial: "is_partial reduce_op",
}


def _signature(value) -> str:
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


def surface() -> str:
    """Every public name, one per line, with its signature; of classes also their members."""
    lines = []
    for module_name in FROZEN:
        module = importlib.import_module(module_name)
        for name in sorted(OWN.get(module_name) or module.__all__):
            value = getattr(module, name)
            where = f"{module_name}.{name}"
            if module_name != "ms_dtensor" and getattr(md, name, None) is value:
                lines.append(f"{where} = ms_dtensor.{name}")
            elif inspect.isclass(value):
                lines.append(f"class {where}{_signature(value)}")
                parts = [c for c in value.__mro__[1:] if c.__module__[:11] == "ms_dtensor." and not hasattr(md, c.__name__)]
                for key, member in sorted({k: v for c in (*parts, value) for k, v in vars(c).items()}.items()):
                    again = (name, key) == ("FusedShard", "dim")  # Python 3.10 makes a slot of an inherited field again
                    if not key.startswith("_") and not again:
                        plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                        lines.append(f"    {where}.{key}" + (_signature(plain) if callable(plain) else ""))
            else:
                lines.append(f"{where}{_signature(value)}" if callable(value) else where)
    return "\n".join(lines) + "\n"


def test_names_and_signatures_are_frozen():
    now = surface()
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(now, encoding="utf-8")
    frozen = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    gone = [line for line in frozen if line not in now.splitlines()]
    new = [line for line in now.splitlines() if line not in frozen]
    assert not gone and not new, "the public surface changed; UPDATE_SNAPSHOTS=1 if that is meant:\n" + "\n".join(
        [*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)])


@pytest.mark.parametrize("module", PROMISED)
def test_promised_names_are_importable(module):
    for name in PROMISED[module].split():
        assert callable(getattr(importlib.import_module(module), name)), name


@pytest.mark.parametrize("cls", METHODS, ids=lambda c: c.__name__)
def test_promised_members(cls):
    for name in METHODS[cls].split():
        assert hasattr(cls, name), name


def test_everything_public_is_documented():
    for name in md.__all__:
        value = getattr(md, name)
        assert name == "__version__" or (inspect.getdoc(value) or "").strip(), name


# -- the parity table ----------------------------------------------------------------------------------------------------
TABLE = ROOT / "docs" / "parity_api.md"


def rows():
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith(("| theirs", "|---")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_parity_table_has_no_empty_cell_and_its_tests_exist():
    count = 0
    for cells in rows():
        assert len(cells) == 3 and all(cells), cells
        for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", cells[2]):
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert re.search(rf"(def|class) {name}\b", text), f"{path}::{name}"
        assert "::" in cells[2] or cells[2].startswith("why not:"), cells
        count += 1
    assert count > 100


# -- small promises that no other test pins -------------------------------------------------------------------------------
@pytest.fixture
def mesh():
    return md.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def x(mesh):
    return md.distribute_tensor(Tensor(np.arange(8, dtype=np.float32).reshape(4, 2)), mesh, [Shard(0), Replicate()])


def test_shapes_and_sizes_are_global(x):
    assert x.shape == (4, 2) and x.local_shape == (4, 2) and x.ndim == 2 and x.dim() == 2 and len(x) == 4
    assert x.size() == (4, 2) and x.size(1) == 2 and x.size == 8 and x.numel() == 8
    assert x.dtype == ms.float32 and x.device_mesh is x.layout.mesh and x.placements == (Shard(0), Replicate())


@pytest.mark.parametrize("cast, dtype", [(lambda t: t.float(), "float32"), (lambda t: t.half(), "float16"),
                                         (lambda t: t.bfloat16(), "bfloat16"), (lambda t: t.astype(ms.int32), "int32"),
                                         (lambda t: t.to(ms.float16), "float16")])
def test_casts_keep_the_layout(x, cast, dtype):
    out = cast(x)
    assert isinstance(out, DTensor) and out.placements == x.placements and out.layout.dtype == dtype


def test_detach_and_clone_keep_the_layout(x):
    for out in (x.detach(), x.clone()):
        assert out.layout is x.layout
    np.testing.assert_array_equal(md.grad(lambda t: (t.detach() * t).sum())(x).full_tensor().asnumpy(),
                                  x.full_tensor().asnumpy())


def test_alias_and_axis_keyed_placements(mesh):
    t = Tensor(np.ones((4, 2), np.float32))
    for form in ((Shard(-2), Replicate()), ("dp", "None"), {"dp": Shard(0)}):
        assert md.distribute_tensor(t, mesh, form).placements == (Shard(0), Replicate())
    assert md.distribute_tensor(t, mesh, (("dp", "tp"), "None")).placements == (Shard(0), Shard(0))
    assert md.distribute_tensor(t, mesh).layout.is_replicated()


def test_default_mesh(mesh):
    with mesh:
        assert md.ones(4, 2).device_mesh == mesh
        assert DTensor.from_local(Tensor(np.ones(2, np.float32))).device_mesh == mesh
        assert md.distribute_tensor(Tensor(np.ones(2, np.float32))).layout.is_replicated()


def test_factories_take_all_forms(mesh):
    for make in (md.ones, md.zeros, md.empty, md.rand, md.randn):
        for out in (make(4, 2, device_mesh=mesh, placements=[Shard(0), Replicate()]),
                    make((4, 2), mesh, [Shard(0), Replicate()]), make((4, 2), dtype=ms.float16, device_mesh=mesh)):
            assert out.shape == (4, 2) and isinstance(out, DTensor)
    assert md.full((2, 2), 3.0, device_mesh=mesh).full_tensor().asnumpy().tolist() == [[3, 3], [3, 3]]
    assert md.ones(3, dtype=ms.float16, device_mesh=mesh).layout.dtype == "float16"


def test_already_distributed(x, mesh):
    assert md.distribute_tensor(x, mesh, x.placements) is x
    with pytest.raises(md.errors.LayoutError):
        md.distribute_tensor(x, mesh, [Replicate(), Replicate()])


# -- PyTorch's behaviours, case by case ------------------------------------------------------------------------------------
BEHAVIOURS = ROOT / "docs" / "parity_behaviours.md"


def test_every_ported_behaviour_has_a_case():
    found = re.findall(r"^\| (.+) \| `([\w/]+\.py)::(\w+)`(?: \([^|]*\))? \|$", BEHAVIOURS.read_text(encoding="utf-8"), re.M)
    rows = [line for line in BEHAVIOURS.read_text(encoding="utf-8").splitlines()
            if line.startswith("|") and not line.startswith(("| behaviour", "|---"))]
    assert len(found) == len(rows) >= 120, [row for row in rows if not any(row.startswith(f"| {f[0]} |") for f in found)]
    assert len({name for *_, name in found}) >= 75  # a case stands for some rows, not for a page
    for _, path, name in found:
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\({'world' if 'cases_' in path else ''}", text, re.M), f"{path}::{name}"


STYLES = {
    md.ColwiseParallel: ({}, "input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True"),
    md.RowwiseParallel: ({}, "input_layouts=Shard(-1), output_layouts=Replicate(), use_local_output=True"),
    md.SequenceParallel: ({}, "sequence_dim=1, use_local_output=False"),
    md.PrepareModuleInput: ({}, "input_layouts=(), desired_input_layouts=(), input_kwarg_layouts={}, "
                                "desired_input_kwarg_layouts={}, use_local_output=False"),
    md.PrepareModuleOutput: ({"output_layouts": Shard(0), "desired_output_layouts": Replicate()},
                             "output_layouts=(Shard(0),), desired_output_layouts=(Replicate(),), use_local_output=True"),
    md.FusedColwiseParallel: ({"parts": (8, 4, 4), "units": 2},
                              "(8, 4, 4), units=2, input_layouts=Replicate(), use_local_output=True, split_output=True")}


@pytest.mark.parametrize("style", STYLES, ids=lambda c: c.__name__)
def test_styles_have_pytorchs_defaults_and_say_what_they_are(style):
    arguments, text = STYLES[style]
    assert repr(style(**arguments)) == f"{style.__name__}({text})" and style.src_data_rank == 0


def test_prepared_inputs_and_outputs_say_what_they_are():
    both = repr(md.PrepareModuleInputOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()))
    assert both.startswith("PrepareModuleInputOutput(PrepareModuleInput(") and "use_local_output=True" in both
