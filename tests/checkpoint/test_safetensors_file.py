# SPDX-License-Identifier: Apache-2.0
"""A safetensors file of ours is one for the `safetensors` package, and the other way round; a broken one is refused."""
import json
import os
import resource
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from ms_dtensor.checkpoint.safetensors_file import CODES, DTYPES, SafetensorsFile, write_safetensors
from ms_dtensor.errors import CheckpointError

RNG = np.random.default_rng(0)
# one of the package's own ways of reading is NumPy, which has no bfloat16 and no float8
COMMON = [d for d in DTYPES.values() if not d.name.startswith(("bfloat", "float8"))]


def array(shape, dtype):
    return RNG.integers(0, 2, shape).astype(dtype) if dtype.kind == "b" else (RNG.random(shape) * 9).astype(dtype)


def write(path, arrays, metadata=None):
    return write_safetensors(path, {n: (a.dtype.name, a.shape, [a]) for n, a in arrays.items()}, metadata).tensors


def test_what_we_write_is_read_by_the_package_and_by_us(tmp_path):
    arrays = {f"a.{d.name}": array((3, i % 4, 5), d) for i, d in enumerate(COMMON)} | {
        "scalar": np.array(2.5, np.float32), "flag": np.array([True, False, True])}
    placed = write(tmp_path / "x", arrays, {"format": "pt", "ü": "é"})
    assert all(e.begin % DTYPES[CODES[e.dtype]].itemsize == 0 for e in placed.values())
    with safe_open(tmp_path / "x", "numpy") as theirs:
        assert set(theirs.keys()) == set(arrays) and theirs.metadata() == {"format": "pt", "ü": "é"}
        for name, a in arrays.items():
            got = theirs.get_tensor(name)
            assert got.dtype == a.dtype and got.shape == a.shape and got.tobytes() == a.tobytes()
    ours = SafetensorsFile(tmp_path / "x")
    assert ours.tensors == placed and ours.metadata == {"format": "pt", "ü": "é"}
    for name, a in arrays.items():
        assert ours.read(name).tobytes() == a.tobytes() == bytes(ours.raw(name)) and ours.read(name).shape == a.shape


def test_what_the_package_writes_is_read(tmp_path):
    arrays = {f"a.{d.name}": array((3, 7), d) for d in COMMON if d.name != "complex64"}
    save_file(arrays, tmp_path / "x", {"format": "np"})
    ours = SafetensorsFile(tmp_path / "x")
    found = {n: (e.dtype, e.shape) for n, e in ours.tensors.items()}
    assert found == {n: (a.dtype.name, a.shape) for n, a in arrays.items()}
    assert all(ours.read(n).tobytes() == a.tobytes() for n, a in arrays.items())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_small_floats_keep_their_bytes(tmp_path, dtype):
    a = array((5, 6), np.dtype(dtype))
    write(tmp_path / "x", {"a": a})
    assert SafetensorsFile(tmp_path / "x").read("a", (slice(1, 4), slice(2, 5))).tobytes() == a[1:4, 2:5].tobytes()
    torch = pytest.importorskip("torch", reason="the package reads these dtypes only for torch")
    from safetensors.torch import load_file
    assert bytes(load_file(tmp_path / "x")["a"].view(torch.uint8).numpy()) == a.tobytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_box_is_numpys(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    a = array(shape, np.dtype(data.draw(st.sampled_from([np.float32, np.int16, ml_dtypes.bfloat16]))))
    path = tmp_path_factory.getbasetemp() / "box"
    write(path, {"odd": np.zeros(3, bool), "a": a})
    index = tuple(slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
                  for n in shape[:data.draw(st.integers(0, len(shape)))])
    got = SafetensorsFile(path).read("a", index)
    assert got.shape == a[index].shape and got.tobytes() == a[index].tobytes()


def test_a_column_of_a_large_tensor_leaves_no_pages_behind(tmp_path):
    """64 MB of rows; a tenth of each is read. What stays is the copy."""
    a = np.arange(16 << 20, dtype=np.float32).reshape(1, 4096, 4096)
    write(tmp_path / "x", {"a": a})
    file, before = SafetensorsFile(tmp_path / "x"), resident()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = file.read("a", (slice(None), slice(None), slice(7, 416)))
    assert np.array_equal(got, a[:, :, 7:416]) and resident() - before < got.nbytes + (4 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < (got.nbytes + (48 << 20)) >> 10


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- what is refused ---------------------------------------------------------------------------------------------------
def header(entries, data=b"\0" * 8, length=None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype="F32", shape=(2,), data_offsets=(0, 8), **more):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets), **more}}


BROKEN = {
    "empty": (b"", "0 bytes"),
    "short": (b"\0" * 9, "9 bytes"),
    "no header": (header(b""), "'{'"),
    "header beyond the file": (header(one(), length=10 ** 6), "would have 1000000 bytes"),
    "header of 2**63": (header(one(), length=2 ** 63), "would have 9223372036854775808 bytes"),
    "list": (header([1]), "'{'"),
    "no JSON": (header(b'{"a": '), "no JSON"),
    "two values": (header(b"{} {}"), "no JSON"),
    "no UTF-8": (header(b'{"\xff": 1}'), "no UTF-8 at byte 2"),
    "twice": (header(b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": '
                     b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'), "'a' twice"),
    "shape twice": (header(b'{"a": {"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}'), "'shape' twice"),
    "deep": (header(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "huge number": (header(b'{"a": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'), "5000 digits"),
    "fraction": (header(one(shape=(2.0,))), "2.0"),
    "NaN": (header(b'{"a": NaN}'), "NaN"),
    "entry is a number": (header({"a": 3}), "entry of 'a'"),
    "key missing": (header({"a": {"dtype": "F32", "shape": [2]}}), "entry of 'a'"),
    "key too many": (header(one(more=1)), "entry of 'a'"),
    "dtype unknown": (header(one(dtype="F33")), "'dtype' of 'a' is 'F33'"),
    "dtype a list": (header(one(dtype=["F32"])), "'dtype' of 'a'"),
    "negative size": (header(one(shape=(-2, -1))), "'shape' of 'a' is [-2, -1]"),
    "size is a bool": (header(one(shape=(2, True))), "'shape' of 'a'"),
    "33 dims": (header(one(shape=[1] * 33)), "'shape' of 'a'"),
    "product overflows": (header(one(shape=(2 ** 33, 2 ** 33))), "larger than any memory"),
    "product wraps to the right size": (header(one(shape=(2 ** 63, 2, 2))), "larger than any memory"),
    "empty but impossible": (header(one(shape=(0, 2 ** 62), data_offsets=(0, 0)), b""), "larger than any memory"),
    "offsets backwards": (header(one(data_offsets=(8, 0))), "'data_offsets' of 'a'"),
    "offsets beyond": (header(one(data_offsets=(8, 16))), "'data_offsets' of 'a' are [8, 16]; the file has 8"),
    "three offsets": (header(one(data_offsets=(0, 8, 8))), "'data_offsets' of 'a'"),
    "wrong size": (header(one(shape=(3,))), "'a' has 8 bytes; F32 of [3] needs 12"),
    "rest": (header(one(), b"\0" * 9), "1 bytes at its end"),
    "cut": (header(one(), b"\0" * 7), "'data_offsets'"),
    "gap": (header(one(data_offsets=(1, 9)), b"\0" * 9), "a gap"),
    "overlap": (header({**one(), "b": one(data_offsets=(4, 12))["a"]}, b"\0" * 12), "'b' begins at byte 4 of the "
                "data, where byte 8 is next: an overlap"),
    "metadata": (header({"__metadata__": {"a": 1}}, b""), "'__metadata__'"),
    "metadata is a text": (header({"__metadata__": "a"}, b""), "'__metadata__'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused(tmp_path, kind):
    data, says = BROKEN[kind]
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError) as told:
        SafetensorsFile(tmp_path / "x")
    assert says in str(told.value) and str(tmp_path / "x") in str(told.value) and len(str(told.value)) < 1000


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, says in (("none", "No such file"), (".", "no regular file"), ("pipe", "no regular file"),
                       ("loop", "symbolic links")):
        with pytest.raises(CheckpointError, match=says):
            SafetensorsFile(tmp_path / name)


def test_a_file_cut_after_it_was_opened_is_named(tmp_path):
    write(tmp_path / "x", {"a": np.arange(5000.0)})
    file = SafetensorsFile(tmp_path / "x")
    os.truncate(tmp_path / "x", 5000)
    with pytest.raises(CheckpointError, match="has 5000 now"):
        file.read("a")


def test_reading_what_is_not_there_is_refused(tmp_path):
    write(tmp_path / "x", {"a": np.arange(6.0)})
    file = SafetensorsFile(tmp_path / "x")
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        file.read("b")
    for index in ((slice(0, 4, 2),), (slice(0, 4), slice(0, 1)), (slice(4, 0, -1),)):
        with pytest.raises(CheckpointError, match="no box"):
            file.read("a", index)


def test_writing_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="came with 8 bytes"):
        write_safetensors(tmp_path / "x", {"a": ("float32", (3,), [b"1234", np.zeros(1, np.float32)])})
    with pytest.raises(CheckpointError, match="'object'"):
        write_safetensors(tmp_path / "x", {"a": ("object", (3,), [])})
    with pytest.raises(CheckpointError, match="Is a directory"):
        write_safetensors(tmp_path, {})


def test_mutated_headers_never_do_anything_but_load_or_refuse(tmp_path):
    """A slice of the fuzz; a mutant that still loads must read as arrays of what its header says."""
    draw = np.random.default_rng(5)
    a, b, c = array((3, 4), DTYPES["F32"]), array((2, 0), DTYPES["I8"]), array((5,), DTYPES["F16"])
    write(tmp_path / "x", {"a": a, "b.c": b, "d": c}, {"k": "v"})
    good, loaded = (tmp_path / "x").read_bytes(), 0
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(draw.integers(1, 4)):
            at = int(draw.integers(len(bad)))
            match draw.integers(4):
                case 0:
                    bad[at] = draw.integers(256)
                case 1:
                    del bad[at:at + int(draw.integers(1, 9))]
                case 2:
                    bad[at:at] = bytes(bad[at:at + int(draw.integers(1, 30))])
                case _:
                    bad[at:at + 1] = draw.choice([b"9", b"-", b"[", b"{", b'"', b"1e5", b"\\u0000", b"\xff"])
            if not bad:
                bad = bytearray(b"x")
        (tmp_path / "y").write_bytes(bad)
        try:
            file = SafetensorsFile(tmp_path / "y")
        except CheckpointError:
            continue
        loaded += 1
        assert sum(file.read(name).nbytes for name in file.tensors) <= len(bad)
    assert 0 < loaded < 1400
