# SPDX-License-Identifier: Apache-2.0
"""Real ranks: published weights into parameters of any layout and out of them; what fails on one rank is raised on all."""
import os
from pathlib import Path

import ml_dtypes
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_dtensor import DTensor, FusedShard, Layout, comm
from ms_dtensor.checkpoint import hf, load_hf, save_hf
from ms_dtensor.checkpoint.folder import claimed
from ms_dtensor.checkpoint.safetensors_file import SafetensorsFile, put, write_safetensors
from ms_dtensor.checkpoint.weights import Weights
from ms_dtensor.dispatch.operands import wrap
from ms_dtensor.errors import CheckpointError
from tests.operands import P, R, S, mesh_1d, mesh_2d
from tests.support import counted, refusal, shared_folder

NAMES = {"experts": "model.experts.*.weight", "*": "model.*.weight"}


def layouts() -> dict[str, Layout]:
    grid, line = mesh_2d(), mesh_1d()
    return {"whole": Layout(grid, [R, R], (3, 5)), "rows": Layout(grid, [S(0), R], (5, 3)),
            "columns": Layout(line, [S(1)], (3, 7)), "both": Layout(grid, [S(0), S(1)], (5, 3), "float16"),
            "doubly": Layout(grid, [S(0), S(0)], (7, 2)), "turned": Layout(grid, [S(0), S(0)], (7, 2), order=("tp", "dp")),
            "fused": Layout(grid, [R, FusedShard(0, (4, 2, 6))], (12, 3)), "few": Layout(line, [S(0)], (2, 3), "bfloat16"),
            "number": Layout(grid, [R, R], ()), "counts": Layout(line, [S(0)], (9,), "int32"),
            "experts": Layout(grid, [S(1), S(0)], (5, 4, 3))}


def wanted(name: str, layout: Layout) -> np.ndarray:
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(layout.dtype, layout.dtype)
    return (np.random.default_rng(len(name)).standard_normal(layout.shape) * 9).astype(kind)


def module() -> nn.Cell:
    """Parameters in all these layouts, of zeros, and a plain one."""
    cell = nn.Cell()
    for name, layout in layouts().items():
        local = Tensor(np.zeros(layout.local_shape(), np.float32)).astype(_dtype(layout.dtype))
        cell.insert_param_to_cell(name, Parameter(wrap(local, layout), name=name))
    cell.insert_param_to_cell("plain", Parameter(Tensor(np.zeros(4, np.float32)), name="plain"))
    return cell


def _dtype(name: str):
    import mindspore as ms
    return getattr(ms, name)


def written() -> dict[str, np.ndarray]:
    """What a file of these weights holds."""
    out = {"model.plain.weight": np.arange(4, dtype=np.float32)}
    for name, layout in layouts().items():
        array = wanted(name, layout)
        if name == "experts":
            out |= {f"model.experts.{i}.weight": row for i, row in enumerate(array)}
        else:
            out[f"model.{name}.weight"] = array
    return out


def weights_of_any_layout_come_in_and_go_out(world):
    root, want = shared_folder(), written()
    if world.rank == 0:
        write_safetensors(f"{root}/model.safetensors", {n: (a.dtype.name, a.shape, [a]) for n, a in want.items()})
    comm.group(range(4)).barrier()
    net = module()
    with counted() as count:
        load_hf(net, root, NAMES)
    assert set(op for op, _ in count) == {"all_gather_object"}, "no data travel"
    for name, layout in layouts().items():
        got = net._params[name]
        whole = put(np.empty(layout.shape, np.float32), got.full_tensor().asnumpy(), name)
        assert np.array_equal(whole, put(np.empty(layout.shape, np.float32), wanted(name, layout), name)), name
    save_hf(net, f"{root}/out", NAMES, max_shard_size=150)
    saved = Weights(f"{root}/out")
    assert set(saved.tensors) == set(want) and len(list(os.scandir(f"{root}/out"))) > 5
    for name, array in want.items():
        assert saved.tensors[name].dtype == array.dtype.name and saved.read(name).tobytes() == array.tobytes(), name


def what_fails_on_one_rank_is_raised_on_all(world):
    root, net = shared_folder() / "weights", module()
    write, read = hf.write_safetensors, SafetensorsFile.read

    def full(path, *rest):
        if world.rank == 2:
            raise CheckpointError(f"For '{path}', the file cannot be written: No space left on device.")
        return write(path, *rest)

    def vanished(self, *rest):
        if world.rank == 1:
            raise CheckpointError(f"For '{self.path}', the file cannot be read any more.")
        return read(self, *rest)
    hf.write_safetensors = full
    try:
        _raises("rank 2: For '", "No space left", lambda: save_hf(net, root, NAMES, max_shard_size=150))
    finally:
        hf.write_safetensors = write
    assert not [e.name for e in os.scandir(root) if e.name != ".partial"], "nothing under its name"
    other = claimed(Path(root) / ".partial", Path(root), "save_hf") if world.rank == 0 else None  # an export at work
    _raises("another save is writing", "", lambda: save_hf(net, root, NAMES, max_shard_size=150))
    if other is not None:
        os.close(other)
    save_hf(net, root, NAMES, max_shard_size=150)
    SafetensorsFile.read = vanished
    try:
        _raises("rank 1: For '", "read any more", lambda: load_hf(net, root, NAMES))
    finally:
        SafetensorsFile.read = read
    load_hf(net, root, NAMES)
    _raises("has weights already", "", lambda: save_hf(net, root, NAMES))
    _raises("missing: more", "", lambda: load_hf(net, root, {"plain": "more", **NAMES}))
    summand = nn.Cell()
    summand.insert_param_to_cell("w", Parameter(DTensor.from_local(Tensor(np.array([3, -5], np.float32)), mesh_1d(), [P]),
                                                name="w"))
    _raises("is Partial", "", lambda: save_hf(summand, f"{root}/more"))


def _raises(text: str, more: str, call) -> None:
    said = refusal(call, CheckpointError)
    assert text in said and more in said, said
