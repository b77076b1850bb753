# SPDX-License-Identifier: Apache-2.0
"""Published weights into a module and out of it, in one process; what does not fit is told before anything is read."""
import json
import os
import resource
import signal
import threading
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from safetensors.numpy import load_file, save_file

from ms_dtensor.checkpoint import load_hf, save_hf
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from ms_dtensor.checkpoint.weights import INDEX, Weights
from ms_dtensor.errors import CheckpointError
from tests.msrun import python

NAMES = {"body.*.weight": "model.layers.*.proj.weight", "body.*.bias": "model.layers.*.proj.bias",
         "tail.head": "lm_head.weight", "experts.*": "model.experts.*.*.weight"}


class Net(nn.Cell):
    """Two matrices with biases, a row of matrices, and a head that may be tied."""

    def __init__(self, dtype=ms.float32, tied: bool = False):
        super().__init__()
        self.body = nn.CellList([nn.Dense(4, 6, dtype=dtype), nn.Dense(6, 4, dtype=dtype)])
        self.experts = nn.Cell()
        self.experts.insert_param_to_cell("up", ms.Parameter(ms.ops.zeros((3, 2, 4), dtype), name="up"))
        self.tail = nn.Cell()
        head = self.body[0].weight if tied else ms.Parameter(ms.ops.zeros((5, 4), dtype), name="head")
        self.tail.insert_param_to_cell("head", head, check_name_contain_dot=False)


def tensors(dtype=np.float32, tied: bool = False) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    shapes = {"model.layers.0.proj.weight": (6, 4), "model.layers.0.proj.bias": (6,), "model.layers.1.proj.weight": (4, 6),
              "model.layers.1.proj.bias": (4,), **{f"model.experts.up.{i}.weight": (2, 4) for i in range(3)}}
    shapes |= {} if tied else {"lm_head.weight": (5, 4)}
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def save_sharded(folder: Path, arrays: dict[str, np.ndarray], places: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    if places is None:
        places = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(arrays)}
    for file in set(places.values()):
        save_file({n: arrays[n] for n, at in places.items() if at == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1.5e3}, "weight_map": places}))
    return folder


def values(net) -> dict[str, np.ndarray]:
    return {name: p.asnumpy().astype(np.float32) for name, p in net.parameters_and_names()}


def assert_holds(net, want: dict[str, np.ndarray]) -> None:
    got = values(net)
    assert np.array_equal(got.pop("experts.up"), np.stack([want[f"model.experts.up.{i}.weight"] for i in range(3)]))
    for name, theirs in (("body.0.weight", "model.layers.0.proj.weight"), ("body.1.bias", "model.layers.1.proj.bias")):
        assert np.array_equal(got[name], want[theirs])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_folder_of_files_is_loaded_and_saved_again(tmp_path, dtype):
    want, net = tensors(dtype), Net()
    held = net.body[0].weight
    load_hf(net, save_sharded(tmp_path / "in", want), NAMES)
    assert net.body[0].weight is held
    assert_holds(net, want)
    save_hf(net, tmp_path / "out", NAMES, config={"model_type": "none"}, max_shard_size=120)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert index["weight_map"] == {n: f.name for f in files for n in load_file(f)}
    assert index["metadata"]["total_size"] == sum(4 * a.size for a in want.values())
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p not in files) == ["config.json", INDEX]
    again = {name: array for f in files for name, array in load_file(f).items()}
    assert set(again) == set(want) and all(np.array_equal(again[n], want[n].astype(np.float32)) for n in want)


def test_bfloat16_in_and_out(tmp_path):
    """A module in bfloat16 takes float32 rounded; a float32 module written in bfloat16 comes back rounded."""
    want, net, low = tensors(), Net(), Net(ms.bfloat16)
    load_hf(net, save_sharded(tmp_path / "in", want), NAMES)
    load_hf(low, tmp_path / "in", NAMES)
    rounded = {name: ms.Tensor(a).astype(ms.bfloat16).astype(ms.float32).asnumpy() for name, a in want.items()}
    assert_holds(low, rounded)
    save_hf(net, tmp_path / "out", NAMES, dtype="bfloat16")
    assert {e.dtype for e in SafetensorsFile(tmp_path / "out/model.safetensors").tensors.values()} == {"bfloat16"}
    back = Net()
    load_hf(back, tmp_path / "out", NAMES)
    assert_holds(back, rounded)


def test_tied_weights_are_one(tmp_path):
    """Of a tied head either name will do, both if they agree; it is written once."""
    want = tensors(tied=True)
    body, head = "model.layers.0.proj.weight", "lm_head.weight"
    without = {n: a for n, a in want.items() if n != body}
    for i, given in enumerate(({**want}, {**without, head: want[body]}, {**want, head: want[body]})):
        net = Net(tied=True)
        load_hf(net, save_sharded(tmp_path / str(i), given), NAMES)
        assert_holds(net, want)
        save_hf(net, tmp_path / f"out{i}", NAMES)
        assert set(load_file(tmp_path / f"out{i}/model.safetensors")) == set(want)
    with pytest.raises(CheckpointError, match="ties what"):
        load_hf(Net(tied=True), save_sharded(tmp_path / "two", {**want, head: want[body] + 1}), NAMES)


def test_all_that_does_not_fit_is_one_error_and_nothing_is_read(tmp_path, monkeypatch):
    given = tensors()
    given["model.layers.0.proj.bias"] = np.zeros(7, np.float32)
    given["model.layers.1.proj.bias"] = np.zeros(4, np.int32)
    del given["lm_head.weight"], given["model.experts.up.1.weight"]
    given |= {f"model.more.{i}": np.zeros(1, np.float32) for i in range(9)}
    net = Net()
    before = values(net)
    monkeypatch.setattr(SafetensorsFile, "read", None)
    with pytest.raises(CheckpointError) as told:
        load_hf(net, save_sharded(tmp_path / "in", given), NAMES)
    for text in ("2 missing: ", "lm_head.weight", "model.experts.up.1.weight", "9 not for this module: model.more.0, ",
                 "and 4 more", "2 of another shape or kind: ", "model.layers.0.proj.bias [7] for body.0.bias [6]",
                 "model.layers.1.proj.bias int32 for body.1.bias float32", "nothing has been read"):
        assert text in str(told.value)
    assert all(np.array_equal(before[n], v) for n, v in values(net).items())


def test_parameters_without_values_yet_get_them(tmp_path):
    """Of `no_init_parameters`."""
    with nn.utils.no_init_parameters():
        net = nn.Dense(4, 6)
    want = {"weight": np.random.default_rng(0).random((6, 4), np.float32), "bias": np.arange(6, dtype=np.float32)}
    save_file(want, tmp_path / "a.safetensors")
    load_hf(net, tmp_path / "a.safetensors")
    assert all(np.array_equal(values(net)[name], want[name]) for name in want)


def test_what_is_to_be_ignored_is(tmp_path):
    want, net = tensors(), Net()
    given = {**want, "model.layers.0.rotary.inv_freq": np.zeros(2, np.float32)}
    load_hf(net, save_sharded(tmp_path / "in", given), NAMES, ignore=["model.layers.*.rotary.inv_freq"])
    assert_holds(net, want)


def test_a_key_map_is_checked(tmp_path):
    folder = save_sharded(tmp_path / "in", tensors())
    for key_map, says in (({**NAMES, "tail.head": "lm_head.*.*"}, "do not go together"),
                          ({"tail.head": "x"}, "no name for 5 of 6"),
                          ({"body.1.bias": "lm_head.weight", **NAMES}, "two parameters one name")):
        with pytest.raises(CheckpointError, match=says):
            load_hf(Net(), folder, key_map)


def record_opened(monkeypatch):
    """The paths that this thread opens: another one starts ranks beside the tests, with ``/dev/null`` as their input."""
    opened, real, here = set(), os.open, threading.get_ident()

    def record(path, *rest, **more):
        if threading.get_ident() == here:
            opened.add(str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", record)
    return opened


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "", ".", 3, None,
                                  "x.bin", "a\0.safetensors", "none.safetensors"])
def test_an_index_leads_nowhere_else(tmp_path, name, monkeypatch):
    save_file(tensors(), tmp_path / "out.safetensors")
    folder = save_sharded(tmp_path / "in", tensors())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    opened = record_opened(monkeypatch)
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        Weights(folder)
    assert all(Path(path).resolve().parent == folder for path in opened)


def test_mutated_indexes_are_refused_or_right(tmp_path, monkeypatch):
    """A slice of the fuzz: no other error, nothing opened outside the folder."""
    folder = save_sharded(tmp_path / "in", tensors())
    good, draw, loaded, opened = (folder / INDEX).read_bytes(), np.random.default_rng(2), 0, record_opened(monkeypatch)
    for _ in range(600):
        bad = bytearray(good)
        for _ in range(draw.integers(1, 4)):
            at = int(draw.integers(len(bad) - 1))
            words = [b"../", b"/", b'"', b"9" * 30, b"[", b"{", b"\\u002e", b"\0", b"\xff", b"", b"1.5", b"null"]
            bad[at:at + int(draw.integers(0, 3))] = words[draw.integers(len(words))]
        (folder / INDEX).write_bytes(bad)
        try:
            loaded += len(Weights(folder).tensors) == len(tensors())
        except CheckpointError as e:
            assert len(str(e)) < 2000
    assert 0 < loaded < 300 and {Path(path).parent for path in opened} == {folder}


def test_folders_that_are_no_weights(tmp_path):
    def refused(says, **files):
        folder = tmp_path / says.replace(" ", "_").replace("'", "")
        folder.mkdir()
        for file, data in files.items():
            (folder / file.replace("__", ".")).write_bytes(data)
        with pytest.raises(CheckpointError, match=says):
            Weights(folder)

    one = tmp_path / "one.safetensors"
    write_safetensors(one, {"a": ("float32", (2,), [np.float32([1, 2])])})
    data = one.read_bytes()
    places = b'{"weight_map": {"a": "x.safetensors"}}'
    refused("no safetensors file")
    refused("only pickles", pytorch_model__bin=b"")
    refused("2 files and no", a__safetensors=data, b__safetensors=data)
    refused("both", model__safetensors=data, model__safetensors__index__json=b"{}")
    refused("has no 'weight_map'", model__safetensors__index__json=b"{}")
    refused("of 'model.safetensors.index.json': it is no JSON", model__safetensors__index__json=b'{"a')
    refused("it has 'a' twice", model__safetensors__index__json=b'{"weight_map": {"a": "x", "a": "x"}}')
    refused("does not have 'b', which", model__safetensors__index__json=places.replace(b'"a"', b'"b"'), x__safetensors=data)
    write_safetensors(one, {"a": ("float32", (2,), [np.float32([1, 2])]), "c": ("float32", (1,), [np.float32([3])])})
    refused("has 'c', of which the index says nothing", model__safetensors__index__json=places,
            x__safetensors=one.read_bytes())
    with pytest.raises(CheckpointError, match="No such file"):
        Weights(tmp_path / "nowhere")
    (tmp_path / "c.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="MindSpore cannot read"):
        Weights(tmp_path / "c.ckpt")


def test_a_link_is_followed_as_in_hugging_faces_cache(tmp_path):
    (tmp_path / "snapshot").mkdir()
    save_file(tensors(), tmp_path / "blob")
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blob")
    net = Net()
    load_hf(net, tmp_path / "snapshot", NAMES)
    assert_holds(net, tensors())


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_mindspores_own_files(tmp_path, form):
    want, net, other = tensors(), Net(), Net()
    load_hf(net, save_sharded(tmp_path / "in", want), NAMES)
    ms.save_checkpoint(net, str(tmp_path / f"a.{form}"), format=form)
    names = {n: p.name for n, p in net.parameters_and_names()}  # MindSpore's files go by the parameters' own names
    load_hf(other, tmp_path / f"a.{form}", names)
    assert_holds(other, want)


# -- writing -----------------------------------------------------------------------------------------------------------
def test_a_folder_with_weights_is_not_written_into(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", INDEX):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text("")
        with pytest.raises(CheckpointError, match="has weights already"):
            save_hf(Net(), folder, NAMES)


def test_a_save_that_fails_leaves_no_weights(tmp_path, monkeypatch):
    """A disk that is full after 300 bytes; then the same folder is saved into again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"model.safetensors', the file cannot be written: File too large"):
            save_hf(Net(), tmp_path / "out", NAMES, config={"a": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*(tmp_path / "out").iterdir()]
    with pytest.raises(CheckpointError, match="no safetensors file"):
        Weights(tmp_path / "out")
    save_hf(Net(), tmp_path / "out", NAMES, config={"a": 1})
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(("options", "text"), [
    ({"dtype": "int8"}, "'dtype' is 'int8'"), ({"dtype": "f32"}, "'dtype' is 'f32'"), ({"dtype": ["float32"]}, "'dtype' is"),
    ({"max_shard_size": -1}, "'max_shard_size' is -1"), ({"max_shard_size": 0}, "'max_shard_size' is 0"),
    ({"max_shard_size": 2.5}, "'max_shard_size' is 2.5"), ({"config": {"a": float("nan")}}, "'config' is no JSON"),
    ({"config": {"a": object()}}, "'config' is no JSON")])
def test_arguments_of_a_save_are_checked_before_anything_is_written(tmp_path, options, text):
    with pytest.raises(CheckpointError, match=text):
        save_hf(Net(), tmp_path / "out", NAMES, **options)
    assert not [*tmp_path.iterdir()]


def test_values_out_of_a_dtypes_range_are_refused(tmp_path):
    net = Net()
    net.tail.head.set_data(ms.Tensor(np.full((5, 4), 1e10, np.float32)))
    with pytest.raises(CheckpointError, match="'lm_head.weight', the value 10000000000.0 is out of the range of float16"):
        save_hf(net, tmp_path / "out", NAMES, dtype="float16")
    assert not [*(tmp_path / "out").iterdir()]
    save_hf(net, tmp_path / "out", NAMES, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="tensor 'lm_head.weight'.*out of the range of float16"):
        load_hf(Net(ms.float16), tmp_path / "out", NAMES)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        save_hf(Net(), tmp_path / "out", NAMES)


def test_a_load_needs_no_memory_beside_the_parameters(tmp_path):
    """96 MB of float32 from bfloat16 in a file of 144 MB; the peak is taken from before the load."""
    code = """
import sys, numpy as np, mindspore as ms, ml_dtypes
from pathlib import Path
from mindspore import nn
ms.set_device("CPU")
from ms_dtensor.checkpoint import load_hf
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
net = nn.Cell()
net.insert_param_to_cell("w", ms.Parameter(ms.Tensor(np.ones((3000, 8192), np.float32)), name="w"))
small = nn.Dense(2, 2, has_bias=False)
load_hf(small, sys.argv[1] + "/small.safetensors", {"weight": "w"})
Path("/proc/self/clear_refs").write_text("5")
before = peak()
load_hf(net, sys.argv[1] + "/large.safetensors", {"w": "w"}, ignore=["other"])
print("GREW", peak() - before)
"""
    large = np.ones((3000, 8192), ms.Tensor([0.0], ms.bfloat16).asnumpy().dtype)
    write_safetensors(tmp_path / "large.safetensors", {"w": ("bfloat16", large.shape, [large]), "other": (
        "float32", large.shape, [np.zeros(large.shape, np.float32)])})
    write_safetensors(tmp_path / "small.safetensors", {"w": ("float32", (2, 2), [np.ones(4, np.float32)])})
    run = python("-c", code, str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split("GREW")[1]) < 40
