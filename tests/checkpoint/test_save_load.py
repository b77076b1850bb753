# SPDX-License-Identifier: Apache-2.0
"""One process: every kind of state comes back; what does not fit is refused before anything is written."""
import os
import re
from collections import namedtuple

import mindspore as ms
import ml_dtypes
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.experimental.optim import ASGD, NAdam
from safetensors.numpy import load_file

import ms_dtensor as md
from ms_dtensor import checkpoint, optim
from ms_dtensor.checkpoint.reader import read_index
from ms_dtensor.checkpoint.state import State
from ms_dtensor.errors import CheckpointError

DTYPES = [np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64, np.float16,
          np.float32, np.float64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def numbers(dtype, shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) * 50).astype(np.float32).astype(dtype)


def test_arrays_of_every_dtype_and_form_come_back(tmp_path):
    big = np.random.default_rng(0).normal(size=(3, 700, 1000)).astype(np.float32)
    state = {np.dtype(d).name: numbers(d, (3, 5)) for d in DTYPES}
    state |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3)), "one": np.ones((1, 1, 1)), "big": big,
              "turned": big.transpose(2, 0, 1), "cut": big[:, ::7, 3:900], "back": big[::-1]}
    checkpoint.save(state, tmp_path / "a")
    target = {key: np.zeros(a.shape, a.dtype) for key, a in state.items()}
    target["big"] = np.zeros((1000, 700, 3), np.float32).T  # not contiguous here either
    checkpoint.load(target, tmp_path / "a")
    for key, a in state.items():
        assert target[key].tobytes() == a.tobytes(), key


def test_any_safetensors_reader_opens_a_shard(tmp_path):
    checkpoint.save({"w": numbers(np.float32, (3, 5)), "n": {"b": np.arange(4)}}, tmp_path / "a")
    theirs = load_file(tmp_path / "a" / "shard-00000-of-00001.safetensors")
    assert set(theirs) == {"w", "n.b"} and np.array_equal(theirs["w"], numbers(np.float32, (3, 5)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "bool", "int64", "float64"])
def test_tensors_are_written_in_place(tmp_path, dtype):
    value = Tensor(numbers(np.float32, (6, 5)) > 0 if dtype == "bool" else numbers(np.float32, (6, 5))).astype(
        getattr(ms, "bool_" if dtype == "bool" else dtype))
    checkpoint.save({"w": value, "p": Parameter(value, name="x")}, tmp_path / "a")
    zero = Tensor(np.zeros((6, 5), np.float32)).astype(value.dtype)
    param, view = Parameter(zero.copy(), name="p"), zero.copy().reshape(3, 10)[1:]
    target = {"w": zero, "p": param}
    checkpoint.load(target, tmp_path / "a")
    assert target["w"] is zero and target["p"] is param and param.name == "p"
    for x in (zero, param):
        assert np.array_equal(x.astype(ms.float32).asnumpy(), value.astype(ms.float32).asnumpy())
    checkpoint.save({"v": Tensor(numbers(np.float32, (2, 10))).astype(value.dtype)}, tmp_path / "b")
    checkpoint.load({"v": view}, tmp_path / "b")
    want = Tensor(numbers(np.float32, (2, 10))).astype(value.dtype).astype(ms.float32).asnumpy()
    assert np.array_equal(view.astype(ms.float32).asnumpy(), want)


Pair = namedtuple("Pair", "x y")


class Position:
    """As a data loader tells it."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "seen": [self.at, "b"]}

    def load_state_dict(self, state):
        assert state["seen"] == [state["at"], "b"]
        self.at = state["at"]


def test_plain_values_nested_in_anything_come_back(tmp_path):
    def state(k):
        return {"a": k, "b": [k, {"c": None if k else 1, "d": (k, "x" * k)}], "e": Pair(k, 0.1 * k), 3: True,
                "nan": float("nan"), "data": Position(k), "np": np.float32(k + 0.1), "inf": -float("inf") * (k or 1),
                "big": 2 ** 200 + k, "none": [], "ü.ß": "é" * k}
    checkpoint.save(state(5), tmp_path / "a")
    target = state(0)
    inner, data = target["b"][1], target["data"]
    checkpoint.load(target, tmp_path / "a")
    want = state(5)
    assert target["data"] is data and data.at == 5 and target["b"][1] is inner
    assert isinstance(target["np"], np.float32) and isinstance(target["e"], Pair) and np.isnan(target["nan"])
    for s in (target, want):
        del s["data"], s["nan"]
    assert target == want


class Net(nn.Cell):
    def __init__(self, seed):
        super().__init__()
        self.first, self.second, self.norm = nn.Dense(3, 4), nn.Dense(3, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", Tensor(np.full(2, seed, np.float32)))
        for p in self.get_parameters():
            p.set_data(Tensor(numbers(np.float32, p.shape, seed)))


def contents(net):
    return {name: x.asnumpy().copy() for name, x in net.state_dict().items()}


@pytest.mark.parametrize("build", [lambda ps: nn.Adam(ps, 0.1), lambda ps: nn.Momentum(ps, [0.1, 0.2, 0.3], 0.9),
                                   optim.AdamW, optim.SGD, optim.Adafactor, optim.Muon,
                                   lambda ps: optim.SGD(ps, momentum=0.9), NAdam, ASGD])
def test_a_cell_and_its_optimizer(tmp_path, build):
    def made(seed):
        net = Net(seed)
        optimizer = build(net.trainable_params())
        for step in range(seed, 3):  # another number of steps
            optimizer(tuple(Tensor(numbers(np.float32, p.shape, seed + step)) for p in net.trainable_params()))
        return net, optimizer
    net, optimizer = made(1)
    checkpoint.save({"net": net, "opt": optimizer}, tmp_path / "a")
    other, second = made(2)
    ids = {name: id(p) for name, p in other.parameters_and_names()}
    checkpoint.load({"net": other, "opt": second}, tmp_path / "a")
    assert ids == {name: id(p) for name, p in other.parameters_and_names()} and other.second.weight is other.first.weight
    for a, b in ((net, other),):
        assert all(np.array_equal(contents(a)[k], contents(b)[k]) for k in contents(a))
    for n, o in ((net, optimizer), (other, second)):  # the next step shows all of the state
        o(tuple(Tensor(numbers(np.float32, p.shape, 9)) for p in n.trainable_params()))
    assert all(np.array_equal(contents(net)[k], contents(other)[k]) for k in contents(net))
    assert getattr(optimizer, "step", 0) == getattr(second, "step", 0)


@pytest.mark.parametrize(("here", "there"), [(0, "seven"), (False, "no"), (False, 1), (1, True), ("a", 1), (0.5, False),
                                             (np.int32(3), 0.5), (np.bool_(1), 2)])
def test_a_plain_value_of_another_type_is_refused_and_all_stays(tmp_path, here, there):
    checkpoint.save({"x": there, "w": np.ones(2)}, tmp_path / "a")
    state = {"x": here, "w": np.zeros(2)}
    with pytest.raises(CheckpointError, match=f"'x' is .* here, in the checkpoint {re.escape(repr(there))}"):
        checkpoint.load(state, tmp_path / "a")
    assert state["x"] is here and not state["w"].any()


@pytest.mark.parametrize(("here", "there"), [(None, 3), (3, None), (0.0, 3), (3, 0.5), (np.int64(3), 4), (np.float32(0), 2)])
def test_none_and_kinds_of_numbers_go_together(tmp_path, here, there):
    checkpoint.save({"x": there}, tmp_path / "a")
    checkpoint.load(state := {"x": here}, tmp_path / "a")
    assert state["x"] == there


def test_the_order_of_a_states_keys_means_nothing(tmp_path):
    """Of a set it differs by process: ranks then plan other files, and a load finds other keys missing."""
    shared = np.ones(2)
    state = {"layers.10.w": np.ones(3), "b": shared, "layers.2.w": np.zeros(3), "a": shared, "y": 1, "x": 2}
    told = [State(dict(items), "save") for items in (state.items(), reversed(state.items()))]
    assert list(told[0].tensors) == list(told[1].tensors) == ["a", "layers.2.w", "layers.10.w"]
    assert list(told[0].values) == list(told[1].values) == ["x", "y"] and told[0].tied == told[1].tied == {"b": "a"}


def test_a_cell_alone_and_ties_that_differ(tmp_path):
    net, other = Net(1), Net(2)
    checkpoint.save(net, tmp_path / "a")
    assert read_index(tmp_path / "a").tied == {"second.weight": "first.weight"}
    other.second.weight = Parameter(Tensor(np.zeros((4, 3), np.float32)), name="untied")
    checkpoint.load(other, tmp_path / "a")
    assert np.array_equal(other.second.weight.asnumpy(), net.first.weight.asnumpy())
    other.second.weight.set_data(Tensor(np.zeros((4, 3), np.float32)))
    checkpoint.save(other, tmp_path / "b")
    with pytest.raises(CheckpointError, match="one tensor here, in the checkpoint there are 'first.weight' and 'second"):
        checkpoint.load(net, tmp_path / "b")
    checkpoint.load(net, tmp_path / "b", strict=False)


def test_keys_shapes_and_dtypes_that_do_not_fit_are_refused_whole(tmp_path):
    w = numbers(np.float32, (3, 2))
    checkpoint.save({"w": w, "step": 4, "b": np.arange(3)}, tmp_path / "a")

    def state(**more):
        return {"w": np.zeros((3, 2), np.float32), "step": 0, "b": np.zeros(3, np.int64), **more}
    for wrong, text in ((state(more=1), "only the program has 'more'"), ({"w": w, "step": 0}, "only the checkpoint has 'b'"),
                        (state(w=np.zeros((2, 3), np.float32)), r"'w' is float32\[2, 3\] here, float32\[3, 2\]"),
                        (state(w=np.zeros((3, 2))), "'w' is float64 here, float32 in the checkpoint"),
                        (state(w=1), "'w' is 1 here, in the checkpoint a tensor"),
                        (state(step=np.zeros(1)), "'step' is a tensor here, in the checkpoint 4")):
        before = repr(wrong)
        with pytest.raises(CheckpointError, match=text):
            checkpoint.load(wrong, tmp_path / "a")
        assert repr(wrong) == before
    with pytest.raises(CheckpointError, match="no kinds of numbers that convert"):
        checkpoint.load(state(b=np.zeros(3)), tmp_path / "a", cast=True)
    done = checkpoint.load(target := {"v": np.zeros((3, 2)), "x": 5}, tmp_path / "a", strict=False, cast=True,
                           key_map=lambda key: {"v": "w"}.get(key, key))
    assert done.missing == ("x",) and done.unused == ("b", "step") and np.array_equal(target["v"], w.astype(float))
    half = {"w": Parameter(Tensor(np.zeros((3, 2)), ms.bfloat16), name="w")}
    checkpoint.load(half, tmp_path / "a", strict=False, cast=True)
    assert np.array_equal(half["w"].astype(ms.float32).asnumpy(), w.astype(ml_dtypes.bfloat16).astype(np.float32))
    frozen = state()
    frozen["w"].flags.writeable = False
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoint.load(frozen, tmp_path / "a")


class Endless:
    def state_dict(self):
        return {"me": self}

    def load_state_dict(self, state):
        pass


CYCLE: dict = {"a": {}}
CYCLE["a"]["b"] = CYCLE


@pytest.mark.parametrize(("state", "text"), [
    ({"f": len}, "'f' is a builtins.builtin_function_or_method"), ({"a": {"b": 1}, "a.b": 2}, "two things are called 'a.b'"),
    ({(1, 2): 3}, r"has the key \(1, 2\)"), (5, "'state' is a int"), ({"c": np.zeros(2, complex)}, "real and imaginary"),
    ({"o": np.array(["x"])}, "the tensor 'o' is str"), ({"": 1}, "something is called ''"),
    ({"\ud800": np.ones(1)}, r"something is called '\\ud800'"), ({"n": -10 ** 1000}, "'n' is a number of 3322 bits"),
    ({"__metadata__": 1}, "called '__metadata__'"), ({"m": np.ma.array([1., 2.], mask=[0, 1])}, "'m' is a masked array"),
    (CYCLE, "the state at 'a.b' is in itself"), (Endless(), "the state at 'me' is in itself")])
def test_what_has_no_place_in_a_checkpoint_is_refused(tmp_path, state, text):
    with pytest.raises(CheckpointError, match=text):
        checkpoint.save(state, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_arguments_are_checked(tmp_path):
    for options in ({"step": -1}, {"step": True}, {"step": 1 << 62}, {"keep_last": 0, "step": 1}, {"keep_last": 2},
                    {"keep_every": 2, "step": 1}):
        with pytest.raises(CheckpointError, match="For 'save'"):
            checkpoint.save({"a": 1}, tmp_path / "a", **options)
    checkpoint.save({"a": 1}, tmp_path, step=np.int64(5), keep_last=np.int32(1))
    for key_map in (3, {"a": 3}, lambda key: None):
        with pytest.raises(CheckpointError, match="'key_map'"):
            checkpoint.load({"a": 0}, tmp_path, key_map=key_map)
    for path in ("", b"run", "a\0b", None, 3):
        for call in (checkpoint.save, checkpoint.load):
            with pytest.raises(CheckpointError, match="'path' is"):
                call({"a": 1}, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005"]


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">f8", ">u8", "<f4"])
def test_arrays_of_another_byte_order_keep_their_values(tmp_path, dtype):
    value = np.arange(6).reshape(2, 3).astype(dtype)
    checkpoint.save({"x": value, "turned": value.T}, tmp_path / "a")
    assert load_file(tmp_path / "a" / "shard-00000-of-00001.safetensors")["x"].tolist() == value.tolist()
    for there in (value.dtype, value.dtype.newbyteorder()):
        target = {"x": np.zeros((2, 3), there), "turned": np.zeros((3, 2), there)}
        checkpoint.load(target, tmp_path / "a")
        assert target["x"].tolist() == value.tolist() and target["turned"].tolist() == value.T.tolist()


def test_a_matrix_has_two_dims_in_all_of_its_parts(tmp_path):
    checkpoint.save({"m": np.array([[1., 2.], [3., 4.]]).view(np.matrix)}, tmp_path / "m")
    checkpoint.load(target := {"m": np.zeros((2, 2)).view(np.matrix)}, tmp_path / "m")
    assert target["m"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("have", "want"), [
    (np.array([1, 300]), np.int8), (np.array([-1, 3]), np.uint64), (np.array([2 ** 63], np.uint64), np.int64),
    (np.array([1, 1e10]), np.float16), (np.array([1e300]), np.float32), (np.array([1e300]), ml_dtypes.bfloat16),
    (np.array([1e6]), ml_dtypes.float8_e4m3fn), (np.array([1e30], ml_dtypes.bfloat16), np.float16)])
def test_a_cast_refuses_values_that_do_not_fit(tmp_path, have, want):
    checkpoint.save({"w": have, "small": (have * 0 + 1).astype(have.dtype)}, tmp_path / "a")
    zero = np.zeros(have.shape, want)
    with pytest.raises(CheckpointError, match=f"tensor 'w', the value .* is out of the range of {np.dtype(want).name}"):
        checkpoint.load({"w": zero, "small": zero.copy()}, tmp_path / "a", cast=True)
    with pytest.raises(CheckpointError, match="out of the range"):
        checkpoint.convert(tmp_path / "a", tmp_path / "b.safetensors", dtype="float16") if have.dtype.kind == "f" and abs(
            have).max() > 1e7 else checkpoint.load({"w": zero}, tmp_path / "a", cast=True, strict=False)
    checkpoint.load(target := {"small": zero.copy()}, tmp_path / "a", cast=True, strict=False)
    assert target["small"].astype(float).tolist() == np.ones(have.shape).tolist()


def test_a_cast_keeps_what_is_not_finite(tmp_path):
    checkpoint.save({"w": np.array([np.inf, -np.inf, np.nan, 0.1])}, tmp_path / "a")
    checkpoint.load(target := {"w": np.zeros(4, np.float16)}, tmp_path / "a", cast=True)
    assert np.array_equal(target["w"], np.array([np.inf, -np.inf, np.nan, 0.1], np.float16), equal_nan=True)


def test_an_index_larger_than_any_is_not_read(tmp_path):
    checkpoint.save({"a": 1}, tmp_path / "a")
    os.truncate(tmp_path / "a" / "index.json", (1 << 30) + 1)
    with pytest.raises(CheckpointError, match="the index has 1073741825 bytes"):
        checkpoint.load({"a": 1}, tmp_path / "a")


def test_leaves_keep_their_gradients_and_a_dtensors_memo_goes(tmp_path):
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    w = Parameter(md.distribute_tensor(Tensor(numbers(np.float32, (3, 2))), mesh, [md.Shard(0)]), name="w")
    checkpoint.save({"w": w}, tmp_path / "a")
    w.set_data(w * 0)
    checkpoint.load({"w": w}, tmp_path / "a")
    loss, grads = md.value_and_grad(lambda: (w * w).sum(), None, [w])()
    assert np.allclose(grads[0].full_tensor().asnumpy(), 2 * numbers(np.float32, (3, 2)))


@pytest.mark.parametrize("draw", [lambda: ms.ops.randn(3), lambda: ms.ops.standard_normal((3,)),
                                  lambda: ms.ops.dropout(ms.ops.ones(64), 0.5)])
def test_the_streams_of_plain_ops_go_on_where_they_are_seeded(tmp_path, draw, monkeypatch):
    seeds = md.internals.names.seeds
    monkeypatch.setattr(seeds, "_GLOBAL_SEED", seeds._GLOBAL_SEED)
    monkeypatch.setattr(seeds, "_KERNEL_SEED", dict(seeds._KERNEL_SEED))
    ms.set_seed(3)
    ms.ops.ones(1) + draw().sum()
    state = {"random": checkpoint.RandomState()}
    checkpoint.save(state, tmp_path / "a")
    first = [draw().asnumpy().tolist() for _ in range(2)]
    ms.set_seed(4)
    draw()
    checkpoint.load(state, tmp_path / "a")
    assert [draw().asnumpy().tolist() for _ in range(2)] == first and first[0] != first[1] and ms.get_seed() == 3


def test_random_streams_go_on(tmp_path):
    def draw():
        return md.randn(3, device_mesh=mesh).asnumpy().tolist(), np.random.normal(), np.random.normal()
    mesh = md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    np.random.normal()  # a second one is kept ready
    state = {"random": checkpoint.RandomState()}
    checkpoint.save(state, tmp_path / "a")
    first, second, of_mindspore = draw(), draw(), ms.get_rng_state().asnumpy().copy()
    ms.manual_seed(77)
    assert not np.array_equal(ms.get_rng_state().asnumpy(), of_mindspore)
    checkpoint.load(state, tmp_path / "a")
    assert (draw(), draw()) == (first, second) and first != second
    assert np.array_equal(ms.get_rng_state().asnumpy(), of_mindspore)
