# SPDX-License-Identifier: Apache-2.0
"""Plain MindSpore is what it was: the calls of `borders.py`, and the edges in one process. One whose internals differ is
refused by the probe's name, with the first DTensor, and nothing stays patched.
"""
import copy
import os
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import Shard, distribute_tensor, init_device_mesh
from ms_dtensor.dispatch import patches
from ms_dtensor.errors import ConfigError, MixedOperandError, OpRuleError
from ms_dtensor.internals import names, probes
from tests.internals.borders import CALLS, EAGER_ONLY, compare
from tests.msrun import ROOT, python
from tests.tiers import at_night


@pytest.fixture
def x():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    return distribute_tensor(Tensor(np.arange(6, dtype=np.float32).reshape(3, 2)), mesh, [Shard(0)])


@pytest.mark.parametrize("jitted", [False, True])
def test_plain_calls_are_byte_equal(jitted):
    wrong, refused = compare([*(CALLS if at_night() else CALLS[::7]), *([] if jitted else EAGER_ONLY)], jitted)
    assert not wrong, "\n".join(wrong)
    assert refused < (20 if at_night() else 8)
    assert len(CALLS) + len(EAGER_ONLY) > 300


@ms.jit
def _compiled(t):
    return ops.less(t, 1).astype(ms.float32) + mint.mul(t, t) + (t < 3)


def test_compiled_functions_on_plain_tensors_and_in_local_map(x):
    want = (np.arange(6).reshape(3, 2) < 1) + np.arange(6).reshape(3, 2) ** 2 + (np.arange(6).reshape(3, 2) < 3)
    np.testing.assert_array_equal(_compiled(x.to_local()).asnumpy(), want)
    np.testing.assert_array_equal(md.local_map(_compiled, [Shard(0)])(x).to_local().asnumpy(), want)


OTHER_MODES = """
import mindspore as ms
import ms_dtensor as md
from ms_dtensor.errors import OpRuleError
mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
x = md.ones((3, 2), mesh, [md.Shard(0)])
for mode in {modes}:
    def twice(t):
        return t * 2
    def captured(t):
        return x * 2
    twice, captured = (ms.jit(f, capture_mode=mode) for f in (twice, captured))
    for turn in range(2):
        for call in (lambda: twice(x), lambda: captured(x.to_local())):
            try:
                call()
            except OpRuleError as e:
                print(mode, turn, e.attempt, flush=True)
"""


def test_other_capture_modes_refuse_too(tmp_path):
    """In a process of their own: they leave MindSpore's interpreter state as it should not be left."""
    script = tmp_path / "modes.py"
    modes = ("trace", "bytecode") if sys.version_info < (3, 12) else ("trace",)  # MindSpore 2.10 has no bytecode mode there
    script.write_text(OTHER_MODES.replace("{modes}", repr(modes)))
    told = python(script, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout
    argument = "For 'ms.jit', an argument is a DTensor."
    capture = {"trace": "For 'ms.jit', a result is a DTensor.",
               "bytecode": "For 'ms.jit', what the function captures is a DTensor."}
    wanted = [f"{mode} {turn} {text}" for mode in modes for turn in range(2) for text in (argument, capture[mode])]
    assert told.splitlines() == wanted, told


def test_an_array_that_meets_a_dtensor_is_named(x):
    array = np.ones((3, 2), np.float32)
    for mixing in (lambda: array + x, lambda: x + array):
        with pytest.raises(MixedOperandError, match="For 'add', a numpy.ndarray meets a DTensor") as error:
            mixing()
        assert "distribute_tensor" in str(error.value)


GUARD = names.NoFallbackGuard


def one_form_asks_nobody(patch):
    exp = mint.exp

    def guarded(x):
        with GUARD():
            return exp(x)
    patch.setattr(mint, "exp", guarded)


def the_guard_stays(patch):
    class Staying:
        entered: list = []

        def __enter__(self):
            self.entered.append(GUARD())
            self.entered[-1].__enter__()

        def __exit__(self, *failure):
            if len(self.entered) > 1:  # the outermost one is never left
                self.entered.pop().__exit__(*failure)
    patch.setattr(probes, "NoFallbackGuard", Staying)
    patch.setattr(probes, "FORMS", {})  # which would find it first
    return lambda: [guard.__exit__(None, None, None) for guard in Staying.entered]


def classes_have_another_layout(patch):
    class Slotted(probes._Asked):
        __slots__ = ("more",)
    patch.setattr(probes, "_Asked", Slotted)
    patch.setattr(probes, "PROBES", probes.PROBES[2:])  # the two before call the class they know


def an_alias_is_a_copy(patch):
    make = Tensor._make_subclass
    patch.setattr(Tensor, "_make_subclass", staticmethod(lambda cls, x: make(cls, ops.stop_gradient(x).copy())))


def callbacks_are_dropped(patch):
    patch.setattr(probes.executor, "queue_backward_final_callback", lambda fn: None, raising=False)


def a_node_is_skipped(patch):
    patch.setattr(probes._Triple, "backward", staticmethod(lambda ctx, g: g))


def gradients_take_another_door(patch):
    patch.setattr(names.composite, "_pynative_executor", copy.copy(probes.executor))


def every_value_is_a_leaf(patch):
    patch.setattr(Tensor, "_is_leaf", property(lambda x: True), raising=False)


PLANTED = {
    one_form_asks_nobody: "the_hook_is_asked", the_guard_stays: "the_guard_guards",
    classes_have_another_layout: "a_class_can_be_assigned",
    an_alias_is_a_copy: "an_alias_is_the_same_value_to_autograd", callbacks_are_dropped: "nodes_hooks_and_callbacks_run",
    a_node_is_skipped: "nodes_hooks_and_callbacks_run", gradients_take_another_door: "gradients_pass_one_door",
    every_value_is_a_leaf: "tensors_tell_their_state",
}


@pytest.fixture
def unpatched():
    patches.uninstall()
    probes.check_internals.cache_clear()
    yield
    probes.check_internals.cache_clear()
    patches.install()


def test_every_probe_has_a_plant():
    assert {f"_{probe}" for probe in PLANTED.values()} == {probe.__name__ for probe in probes.PROBES}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_a_planted_change_is_refused_by_name(plant, unpatched):
    mesh, x = md.init_device_mesh("cpu", (1,)), Tensor([1.0, 2.0])
    with pytest.MonkeyPatch.context() as patch:
        restore = plant(patch)
        try:
            with pytest.raises(ConfigError, match=f"probe '{PLANTED[plant]}'"):
                md.distribute_tensor(x, mesh, [md.Shard(0)])
        finally:
            if restore:
                restore()
        assert "__fallback__" not in Tensor.__dict__
    assert md.distribute_tensor(x, mesh, [md.Shard(0)]).sum().item() == 3.0


def test_this_mindspore_passes_also_while_a_forward_is_recorded(unpatched):
    def loss(x):
        d = md.DTensor.from_local(x, md.init_device_mesh("cpu", (1,)), [md.Shard(0)])
        return (d * d).sum()
    assert ms.grad(loss)(Tensor([1.0, 2.0])).tolist() == [2.0, 4.0]


def test_a_missing_name_is_refused_by_name():
    for module, name in (("mindspore.nowhere", "x"), ("mindspore", "_no_such_thing")):
        with pytest.raises(ConfigError, match=f"has no {module}.{name}"):
            names._private(module, name)


@pytest.fixture
def graph_mode(cpu):
    yield lambda: ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_context(mode=ms.PYNATIVE_MODE)


def test_graph_mode_is_named_before_anything_is_probed(graph_mode):
    mesh = init_device_mesh("cpu", (1,))
    patches.uninstall()
    probes.check_internals.cache_clear()
    graph_mode()
    try:
        with pytest.raises(ConfigError, match="is in GRAPH_MODE(.|\n)*set_context.mode=ms.PYNATIVE_MODE"):
            distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        patches.install()


def test_graph_mode_set_after_distribution_is_named(graph_mode):
    net = md.parallelize_module(nn.SequentialCell(nn.Dense(4, 4), nn.ReLU()), init_device_mesh("cpu", (1,)),
                                {"0": md.ColwiseParallel(use_local_output=False)})
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 1e-3))

    def loss(x):
        return net(x).mean()
    graph_mode()
    for call in (net, step, ms.value_and_grad(loss, None, net.trainable_params()), ms.grad(loss)):
        with pytest.raises(OpRuleError, match="For 'GRAPH_MODE'(.|\n)*set_context.mode=ms.PYNATIVE_MODE"):
            call(ms.ops.ones((2, 4)))


def test_a_jitted_function_refuses_a_dtensor(cpu):
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(ms.Tensor([[1.0, 2.0]]), mesh, [Shard(0)])
    double = ms.jit(lambda t: t * 2)
    with pytest.raises(OpRuleError, match="For 'ms.jit', an argument is a DTensor"):
        double(x)
    assert (x * 2).sum().item() == 6.0
