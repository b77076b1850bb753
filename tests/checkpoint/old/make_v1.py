# SPDX-License-Identifier: Apache-2.0
"""Made `v1`, a checkpoint of two ranks in the first format; only the library of then (commit aa981e9) can run it.

    git worktree add /tmp/then aa981e9 && PYTHONPATH=/tmp/then python tests/checkpoint/old/make_v1.py NEW_FOLDER
"""
import sys
from pathlib import Path

import ml_dtypes
import numpy as np


def arrays() -> dict[str, np.ndarray]:
    """What is in it: of several pieces, cut unevenly and by columns, of odd dtypes, without dims, without elements."""
    count = np.arange(70_000)
    return {"large": (count % 7).astype(np.float32).reshape(700, 100), "rows": (count[:15] * 0.5).reshape(5, 3),
            "columns": (count[:12] - 6).astype(np.int32).reshape(3, 4), "half": (count[:9] / 4).astype(ml_dtypes.bfloat16),
            "flag": count[:3] % 2 == 0, "scalar": np.array(2.5), "none": np.zeros((0, 3), np.float16)}


VALUES = {"step": 7, "name": "ü", "rate": 0.1, "least": float("-inf"), "done": False, "nothing": None}


def main(folder: Path) -> None:
    from ms_dtensor import DeviceMesh, Layout, Replicate, Shard
    from ms_dtensor.checkpoint.index import NAME, VERSION, Index, dump
    from ms_dtensor.checkpoint.plan import Request, assign, held_boxes, whole_box
    from ms_dtensor.checkpoint.state import Leaf
    from ms_dtensor.checkpoint.writer import file_name, merged, write

    assert VERSION == 1
    folder.mkdir()
    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
    cut = {"rows": [Shard(0)], "columns": [Shard(1)], "large": [Shard(0)], "half": [Replicate()]}
    values = arrays()
    leaves = {key: Leaf(key, array) for key, array in values.items()}
    plan = assign([Request(key, leaf.itemsize, held_boxes(Layout(mesh, cut[key], leaf.shape)) if key in cut else
                           whole_box(leaf.shape, (0, 1))) for key, leaf in leaves.items()])
    told = [write(folder / file_name(rank, 2), plan[rank], leaves,
                  lambda part: values[part.key][tuple(slice(*e) for e in part.box)], "1" * 32) for rank in (0, 1)]
    (folder / NAME).write_bytes(dump(Index("1" * 32, 7, "0.1.0", *merged(plan, told, leaves), VALUES, {"tied": "rows"})))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
