# SPDX-License-Identifier: Apache-2.0
"""Cells of users in a dry run, what MindSpore's own make of their parameters; and results of every form of the corpus."""
import importlib
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import ms_dtensor as md
import ms_dtensor.tools.forms
from ms_dtensor import comm
from ms_dtensor.core.tree import leaves, map_leaves
from ms_dtensor.debug import dry_run
from ms_dtensor.errors import ConfigError, DTensorError
from ms_dtensor.tools.forms.form import Form
from tests.tiers import sampled


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm((8,)), lambda: nn.GroupNorm(2, 8)], ids=["layer", "group"])
@pytest.mark.parametrize("lay_out", [lambda net, mesh: md.distribute_module(net, mesh), md.replicate],
                         ids=["module", "replicate"])
def test_what_is_cast_to_its_own_dtype_stays_a_leaf(norm, lay_out):
    """MindSpore's norms cast their parameters to the input's dtype: in a dry run these became results of that cast."""
    seen = []
    for world in (comm.fake_world(2), dry_run(world=2, device="CPU")):
        with world, comm.record() as events:
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            net, x = lay_out(norm(), mesh=mesh), md.ones(4, 8, device_mesh=mesh, placements=[md.Shard(0)])
            _, grads = md.value_and_grad(lambda x, net=net: net(x).sum(), None, net.trainable_params())(x)
            assert all(p._is_leaf for p in net.trainable_params())
        seen.append(([tuple(g.shape) for g in grads], [(e.op, e.bytes) for e in events if e.phase == "backward"]))
    assert seen[0] == seen[1] and seen[0][0] == [(8,), (8,)]


def test_parameters_that_are_kept_whole_are_gathered_again_if_they_were_written():
    """`unshard()`: each forward asks whether kept parameters were changed; the answer is not of what has no data."""
    seen = []
    for world in (comm.fake_world(2), dry_run(world=2, device="CPU")):
        with world:
            mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            net = nn.SequentialCell(mint.nn.Linear(8, 8), mint.nn.Linear(8, 8))
            for cell in (*net, net):
                md.fully_shard(cell, mesh=mesh)
            x = md.ones(4, 8, device_mesh=mesh, placements=[md.Shard(0)])
            with comm.record() as events:
                for cell in net:
                    cell.unshard()
                net(x)
                net(x)
                net[0].weight.fill_(0.5)
                net(x)
                _, grads = md.value_and_grad(lambda x, net=net: net(x).sum(), None, net.trainable_params())(x)
                md.optim.AdamW(net.trainable_params(), 1e-3)(grads)
                net(x)
        seen.append([f"{e.op} {e.bytes} {e.phase}" for e in events])
    assert seen[0] == seen[1]
    gathered = [n for n, event in enumerate(seen[0]) if event.startswith("all_gather")]
    assert gathered[:2] == [0, 1] and len(gathered) == 2 + 1 + 2, "both; what was written; both, once stepped"


@pytest.mark.parametrize("lay_out", [
    lambda net, mesh: md.distribute_module(net, mesh), lambda net, mesh: md.replicate(net, mesh=mesh),
    lambda net, mesh: md.replicate(net, mesh=mesh, zero1=True), lambda net, mesh: md.fully_shard(net, mesh=mesh),
    lambda net, mesh: md.parallelize_module(net, mesh, {"0": md.ColwiseParallel()})],
    ids=["module", "replicate", "zero1", "fully_shard", "styles"])
def test_a_model_that_was_made_before_keeps_its_values(lay_out):
    """It had none behind the block; what is made inside has none, also where the user gives data."""
    net, x = nn.SequentialCell(mint.nn.Linear(8, 8), nn.LayerNorm((8,))), Tensor(np.ones((4, 8), np.float32))
    want, seen = net(x).asnumpy(), net.__dict__.keys() | net[0].__dict__.keys()
    with dry_run(world=2, device="CPU"):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(ConfigError, match="'0.weight' was made before the block.\n.*on: .*\n.*rule: .*\n.*fix: "):
            lay_out(net, mesh)
        inside = nn.SequentialCell(mint.nn.Linear(8, 8))
        inside[0].bias = Parameter(Tensor(np.ones(8, np.float32)), name="bias")
        lay_out(inside, mesh)
    assert net(x).asnumpy().tolist() == want.tolist() and seen == net.__dict__.keys() | net[0].__dict__.keys()
    with comm.fake_world(2):
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        lay_out(net, mesh)
        assert np.isfinite(net[0].weight.full_tensor().asnumpy()).all()


@pytest.mark.parametrize("kind", [ms.float16, ms.bfloat16], ids=["f16", "bf16"])
def test_products_of_several_dtypes_are_refused_as_mindspore_refuses_them(kind):
    """Of bfloat16 a host computes in float32, so it takes both; a device does not."""
    seen = []
    for world in (comm.fake_world(2), dry_run(world=2, device="CPU"), dry_run(world=2, device="Ascend")):
        with world:
            mesh = md.init_device_mesh("npu" if len(seen) == 2 else "cpu", (2,), mesh_dim_names=("dp",))
            x = md.ones(4, 8, device_mesh=mesh, placements=[md.Shard(0)])
            w, b = md.ones(3, 8, device_mesh=mesh, dtype=kind), md.ones(3, device_mesh=mesh, dtype=kind)
            refused = 0
            for product in (lambda x, w, b: mint.nn.functional.linear(x, w), lambda x, w, b: x @ w.T,
                            lambda x, w, b: mint.nn.functional.linear(x, w.astype(ms.float32), b),
                            lambda x, w, b: mint.bmm(x.reshape(4, 1, 8), w.T.expand((4, 8, 3)))):
                product(x, w.astype(ms.float32), b.astype(ms.float32))
                try:
                    product(x, w, b)
                except TypeError as error:
                    assert "same" in str(error)
                    refused += 1
            seen.append(refused)
    assert seen == ([4, 4, 4] if kind == ms.float16 else [0, 0, 4])


# -- shapes and dtypes of every form of the corpus ---------------------------------------------------------------------
FAMILIES = sorted(file.stem for file in Path(ms_dtensor.tools.forms.__file__).parent.glob("forms_*.py"))
NOT_KNOWN = {  # MindSpore's own Python chooses by how it was called, or has no kernel here
    "x.cumsum(axis=) of integers", "auto_generate.grouped_matmul", "auto_generate.grouped_matmul(bias)",
    "auto_generate.GroupedMatmul", "auto_generate.grouped_matmul(list)", "auto_generate.grouped_matmul(list, bias)",
    "auto_generate.GroupedMatmul(list)"}


def results(form: Form, args: tuple, make) -> list[tuple]:
    made = form.fn(*(map_leaves(make, a, np.ndarray) for a in args))
    return [(tuple(x.shape), x.dtype) for x in leaves((made,), Tensor)]


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_what_kernels_say(family):
    """At push every twentieth form; a form whose result only data tell, or that this CPU has no kernel for, is not asked."""
    forms = [f for f in importlib.import_module(f"ms_dtensor.tools.forms.{family}").FORMS if f.raises is None]
    wrong, asked = [], 0
    for form in sampled(forms, 20):
        for args in form.variants()[:2]:
            try:
                want = results(form, args, Tensor)
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):  # MindSpore's own refusals
                continue
            with dry_run(world=1, device="CPU"):
                mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
                try:
                    got = results(form, args, lambda a, mesh=mesh: md.DTensor.from_local(Tensor(a), mesh))
                except DTensorError:
                    continue
            asked += 1
            if got != want and form.name not in NOT_KNOWN:
                wrong.append(f"{form.name}: {got}, with kernels {want}")
    assert not wrong, "\n".join(wrong)
    assert asked or family not in ("forms_arithmetic", "forms_logic", "forms_reduce"), "of some others a CPU has no kernels"
