# SPDX-License-Identifier: Apache-2.0
"""A MindSpore whose internals differ is refused by the probe's name, with the first DTensor, and nothing stays patched."""
import copy

import mindspore as ms
import pytest
from mindspore import Tensor, mint, ops

import ms_dtensor as md
from ms_dtensor.dispatch import patches
from ms_dtensor.errors import ConfigError
from ms_dtensor.internals import names, probes

pytestmark = pytest.mark.usefixtures("cpu")
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
