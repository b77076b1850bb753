# SPDX-License-Identifier: Apache-2.0
"""Real ranks: what one layout saved, every other loads bit for bit, optimizers too; one error on all ranks, no hang."""
import os

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_dtensor as md
from ms_dtensor import DTensor, checkpoint, comm, optim
from ms_dtensor.errors import CheckpointError
from tests.cases import case
from tests.checkpoint.programs import BY_RANKS, Net
from tests.operands import P, R, S, data, mesh_1d, placed
from tests.support import array, counted, refusal, same_on_all_ranks, shared_folder
from tests.tiers import sampled

LAYOUTS = BY_RANKS[4]
BUILD = {
    "AdamW": lambda ps: optim.AdamW(ps, 0.1), "Muon": lambda ps: optim.Muon(ps, 0.1),
    "Adafactor": lambda ps: optim.Adafactor(ps, 0.3), "nn.Adam": lambda ps: nn.Adam(ps, 0.1),
}


def stepped(layout, seed, build="AdamW"):
    """A model that is laid out, its optimizer after two steps, and an average."""
    net = Net(seed)
    LAYOUTS[layout](net)
    params = [p for p in net.trainable_params() if build[:2] != "nn" or p.dtype == ms.float32]  # it has no such kernels
    optimizer, ema = BUILD[build](params), optim.EMA(params, 0.5)
    for step in range(2):
        draw = np.random.default_rng(seed + step)
        grads = [Tensor(draw.normal(size=p.shape).astype(np.float32)).astype(p.dtype) for p in params]
        optimizer(tuple(placed(g, p.device_mesh, *p.layout.placements)
                        if isinstance(p, DTensor) and p.layout.order == tuple(range(p.layout.mesh.ndim)) else
                        _like(g, p) for g, p in zip(grads, params)))
        ema.update()
    return {"model": net, "optimizer": optimizer, "ema": ema, "step": seed, "words": ["a", None, True, 0.1 + seed]}


def _like(value, p):
    if not isinstance(p, DTensor):
        return value
    whole = DTensor.from_local(value, p.device_mesh, [R] * p.device_mesh.ndim)
    from ms_dtensor.dispatch.operands import redistribute
    return redistribute(whole, p.layout)


def values(state):
    """Every tensor's global values, by key, and the plain values."""
    from ms_dtensor.checkpoint.state import State
    held = State(state, "test")
    return {key: array(leaf.tensor).copy() for key, leaf in held.tensors.items()}, held.values


def _same(got, want, what):
    assert got[0].keys() == want[0].keys() and got[1] == want[1], what
    for key in want[0]:
        a, b = got[0][key], want[0][key]
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), (what, key)


@case(world_size=4, timeout=300)
def what_one_layout_saves_every_other_loads_bit_for_bit(world):
    saved = {}
    root = shared_folder()
    for layout in LAYOUTS:
        state = stepped(layout, 1)
        checkpoint.save(state, root / layout.replace(" ", "_"))
        saved[layout] = values(state)
    for shift, layout in enumerate(LAYOUTS):
        state = stepped(layout, 2)
        params = {p.name: (id(p), p.layout if isinstance(p, DTensor) else None) for p in state["model"].get_parameters()}
        for source in sampled(LAYOUTS, 5, shift):
            checkpoint.load(state, root / source.replace(" ", "_"))
            _same(values(state), saved[source], f"{source} -> {layout}")
        assert params == {p.name: (id(p), p.layout if isinstance(p, DTensor) else None)
                          for p in state["model"].get_parameters()}


@case(world_size=4, timeout=300)
def every_optimizer_comes_back_bit_for_bit(world):
    root = shared_folder()
    for shift, build in enumerate(list(BUILD)[1:]):
        state = stepped("fsdp=2 x tp=2", 1, build)
        want = values(state)
        checkpoint.save(state, root, step=3)
        for layout in sampled(("uneven, other orders", "whole on 4", "hsdp=2x2"), 3, shift):
            other = stepped(layout, 2, build)
            assert checkpoint.load(other, root).step == 3
            _same(values(other), want, f"{build} {layout}")


def bytes_are_written_once_evenly_and_only_those_needed_are_read(world, grid):
    root = shared_folder()
    value = np.random.default_rng(1).normal(size=(4096, 1024)).astype(np.float32)  # 16 MiB
    layouts = {"whole": [R, R], "rows": [S(0), R], "rows twice": [S(0), S(0)], "columns": [R, S(1)]}
    state = {name: placed(Tensor(value), grid, *lay) for name, lay in layouts.items()}
    with counted() as count:
        checkpoint.save(state, root / "a")
    assert set(count) == {("all_gather_object", "forward")}, "nothing but words is sent"
    sizes = [path.stat().st_size for path in sorted((root / "a").glob("*.safetensors"))]
    assert len(sizes) == 4 and sum(sizes) < 4 * value.nbytes + 4 * 4096 and max(sizes) < 1.02 * min(sizes), sizes
    from ms_dtensor.checkpoint.loading import _compared, _read
    for name, lay, share in (("whole", [S(0), S(0)], 4), ("columns", [R, S(0)], 2), ("rows", [S(0), S(0)], 4)):
        target = {name: md.zeros(4096, 1024, device_mesh=grid, placements=lay)}
        held, reader, found = _compared(target, root / "a", False, None, False)
        with reader:
            _read(held, reader, found.tensors)
        assert reader.bytes_read <= value.nbytes // share + (2 << 20), (name, reader.bytes_read)
        assert np.array_equal(array(target[name]), value)


def states_that_differ_or_have_no_place_are_refused_before_a_file_is_made(world):
    root, mesh = shared_folder(), mesh_1d(4)
    partial_sum = DTensor.from_local(data(1, 3, 2), mesh, [P])
    for state, words in (({"w": partial_sum}, ("Partial", "reduce_partial")),
                         ({"step": world.rank}, ("differ in 1 keys", "'step': rank 0 0; rank 1 1")),
                         ({"w": data(world.rank, 3)}, ("differ", "DTensor.from_local")),
                         ({f"w{world.rank % 2}": 1}, ("differ in 2 keys", "rank 1 has none")),
                         ({"f": sorted if world.rank == 2 else 1}, ("1 of 4 ranks failed, the first is rank 2", "code"))):
        with counted() as count:
            text = refusal(lambda state=state: checkpoint.save(state, root / "a"), CheckpointError)
        assert all(word in text for word in words), text
        same_on_all_ranks(world, text)
        assert not os.listdir(root) and {op for op, _ in count} == {"all_gather_object"}
    text = refusal(lambda: checkpoint.save({"w": 1}, root / "a", keep_last=world.rank + 1), CheckpointError)
    same_on_all_ranks(world, text)
    one = world.rank == 1
    for path, options, words in ((root / "a", {"step": world.rank}, ("differ: step", "rank 0 0; rank 1 1")),
                                 (root / "a", {"async_save": one}, ("differ: async_save",)),
                                 (root / f"d{world.rank}", {}, ("differ: path",)),
                                 (None if one else root / "a", {}, ("1 of 4 ranks failed, the first is rank 1", "'path' is")),
                                 ("a\0" if one else root / "a", {}, ("1 of 4 ranks failed, the first is rank 1", "'path' is"))):
        text = refusal(lambda path=path, options=options: checkpoint.save({"w": 1}, path, **options), CheckpointError)
        assert all(word in text for word in words) and not os.listdir(root), text
        same_on_all_ranks(world, text)
    state = {"random": checkpoint.RandomState()}
    np.random.seed(world.rank)
    text = refusal(lambda: checkpoint.save(state, root / "a"), CheckpointError)
    assert "np.random.seed(n)" in text and "ms.set_seed(n) on all ranks" in text, text
    ms.set_seed(1)
    for name in "ab":
        checkpoint.save(state | {"w": 1}, root / name)
    for load in (lambda: checkpoint.load({"w": 1}, root / "ab"[one], strict=False),
                 lambda: checkpoint.load({"w": 1} | ({} if one else state), root / "a", strict=False),
                 lambda: checkpoint.load({"w": 1}, root / "a", strict=one),
                 lambda: checkpoint.load({"w": 1}, root / "a", strict=False, cast=one),
                 lambda: checkpoint.load({"w": 1}, None if one else root / "a", strict=False)):
        same_on_all_ranks(world, refusal(load, CheckpointError))
    checkpoint.load(state | {"w": 1}, root / "b")
    for options in ({"max_shard_size": 7 if one else 1000}, {"dtype": "float16" if one else None}, {"config": {"a": one}},
                    {"dtype": "int8" if one else None}):
        net = nn.Dense(2, 3)
        text = refusal(lambda net=net, options=options: checkpoint.save_hf(net, root / "hf", **options), CheckpointError)
        same_on_all_ranks(world, text)
        assert not (root / "hf").exists()
    text = same_on_all_ranks(world, refusal(lambda: checkpoint.load({"w": 1}, root / "none"), CheckpointError))
    assert "there is no checkpoint" in text


def ranks_whose_keys_come_in_another_order_save_and_load_one_state(world):
    """As keys out of a `set()` do, whose order differs by process."""
    root, mesh, shared = shared_folder(), mesh_1d(4), data(9, 3)
    items = [(f"w{i}", placed(data(i, 5 + i, 3), mesh, S(0))) for i in range(12)]
    items += [("plain", data(3, 40)), ("n", 1), ("m", 2), ("tied", shared), ("a_tie", shared)]
    np.random.default_rng(world.rank).shuffle(items)
    state = dict(items)
    for asynchronous in (False, True):
        checkpoint.save(state, root / "a", async_save=asynchronous)
        checkpoint.wait()
        assert checkpoint.verify(root / "a") == []
        zero = {key: x if isinstance(x, int) else x * 0 for key, x in items}
        checkpoint.load(zero, root / "a")
        assert all(array(zero[key]).tobytes() == array(state[key]).tobytes() for key in sorted(state) if len(key) > 1)
    more = [("extra0", 1), ("extra1", 2), ("extra2", data(1, 2))]
    np.random.default_rng(world.rank).shuffle(more)
    assert checkpoint.load(state | dict(more), root / "a", strict=False).missing == ("extra2", "extra0", "extra1")


def copies_on_meshes_of_their_own_are_one_tensor_if_they_are_equal(world, grid):
    """tp on mesh["tp"] of a 2x2 mesh, nothing on dp."""
    from ms_dtensor import fully_shard, parallelize_module
    from tests.checkpoint.programs import STYLES, fill, program
    root = shared_folder()
    net = Net(1)
    parallelize_module(net, grid["tp"], STYLES)
    optimizer = optim.AdamW(net.trainable_params(), 0.1)
    state = {"model": net, "optimizer": optimizer, "step": 3}
    fill({"model": net, "optimizer": optimizer, "step": 0, "words": ["", {"deep": 0.0}]})
    want = {key: value.copy() for key, value in values(state)[0].items()}
    for asynchronous in (False, True):
        checkpoint.save(state, root / "a", async_save=asynchronous)
        checkpoint.wait()
        assert checkpoint.verify(root / "a") == []
        from ms_dtensor.checkpoint.reader import Reader
        with Reader(root / "a") as reader:
            assert all(reader.array(key).tobytes() == value.tobytes() for key, value in want.items())
            assert sum(t.nbytes for t in reader.index.tensors.values()) == sum(v.nbytes for v in want.values())
            assert reader.index.file_count() == 4, "all ranks write a share"
    other = Net(2)  # onto one mesh of all ranks, and back onto meshes of their own
    parallelize_module(other, grid["tp"], STYLES)
    for cell in (other.up, other.down, other):
        fully_shard(cell, mesh=grid["dp"])
    into = {"model": other, "optimizer": optim.AdamW(other.trainable_params(), 0.1), "step": 0}
    checkpoint.load(into, root / "a")
    assert all(values(into)[0][key].tobytes() == value.tobytes() for key, value in want.items())
    again = program("tp=4")
    checkpoint.load({"model": again["model"]}, root / "a", strict=False)
    checkpoint.load(state, root / "a")
    if world.rank >= 2:  # the second copy goes its own way
        net.down.weight.set_data(net.down.weight * 1.5)
    text = same_on_all_ranks(world, refusal(lambda: checkpoint.save(state, root / "b"), CheckpointError))
    assert "copies of a tensor that differ" in text and "'model.down.weight'" in text and "rank 0" in text and "rank 2" in text
    assert "up.weight" not in text and not (root / "b").exists(), text
    odd = md.DeviceMesh("cpu", [[0, 1], [0, 2], [0, 3], [0, 3]][world.rank])
    x = DTensor.from_local(data(1, 3), odd, [R])
    text = same_on_all_ranks(world, refusal(lambda: checkpoint.save({"x": x}, root / "b"), CheckpointError))
    assert "no copies of each other" in text, text


def ranks_that_run_in_other_folders_write_where_the_first_one_says(world):
    root, mesh, here = shared_folder(), mesh_1d(4), os.getcwd()
    state = {"w": placed(data(1, 8, 3), mesh, S(0))}
    os.makedirs(root / str(world.rank))
    os.chdir(root / str(world.rank))
    try:
        for asynchronous in (False, True):
            checkpoint.save(state, "a", async_save=asynchronous)
            checkpoint.load(state, root / "0" / "a")
            assert not os.listdir(root / "1")
    finally:
        os.chdir(here)


def parameters_that_are_kept_whole_are_gathered_anew_after_a_load(world):
    root, x = shared_folder(), data(3, 4, 6)[world.rank:world.rank + 1]
    state = stepped("fsdp=4", 1)
    want = array(state["model"](x))
    checkpoint.save(state, root / "a")
    other = stepped("fsdp=4", 2)
    for cell in (other["model"].up, other["model"].down, other["model"]):
        cell.unshard()
    assert not np.array_equal(array(other["model"](x)), want)
    checkpoint.load(other, root / "a")
    assert np.array_equal(array(other["model"](x)), want)


def one_ranks_failure_is_raised_on_all_and_the_previous_checkpoint_stays(world):
    from ms_dtensor.checkpoint import saving
    root, mesh = shared_folder(), mesh_1d(4)
    first, second = ({"w": placed(data(i, 8, 3), mesh, S(0))} for i in (1, 2))
    checkpoint.save(first, root, step=1)
    real = saving.write

    def full(*arguments):
        raise OSError(28, "No space left on device")
    for asynchronous in (False, True):
        for rank in (0, 3):
            saving.write = full if world.rank == rank else real
            try:
                if asynchronous:
                    saved = checkpoint.save(second, root, step=2, async_save=True)
                    text = refusal(saved.wait, CheckpointError)
                else:
                    text = refusal(lambda: checkpoint.save(second, root, step=2), CheckpointError)
            finally:
                saving.write = real
            assert f"1 of 4 ranks failed, the first is rank {rank}" in text and "No space left" in text, text
            same_on_all_ranks(world, text)
            assert sorted(os.listdir(root)) == ["latest", "step-00000001"], os.listdir(root)
    saving.write = full if world.rank == 1 else real
    checkpoint.save(second, root, step=3, async_save=True)
    saving.write = real
    text = refusal(lambda: checkpoint.save(second, root, step=4), CheckpointError)
    assert "rank 1" in text and "No space left" in text, "the next save tells"
    checkpoint.save(second, root, step=4)
    assert checkpoint.load(first, root).step == 4 and np.array_equal(array(first["w"]), array(second["w"]))


def a_shard_that_one_rank_finds_damaged_is_an_error_on_all(world):
    root, mesh = shared_folder(), mesh_1d(4)
    value = data(1, 8, 300)
    checkpoint.save({"w": placed(value, mesh, S(0))}, root / "a")
    path = root / "a" / "shard-00002-of-00004.safetensors"
    if world.rank == 0:
        whole = bytearray(path.read_bytes())
        whole[-5] ^= 1
        path.write_bytes(whole)
    target = {"w": md.zeros(8, 300, device_mesh=mesh, placements=[S(0)])}
    for spoil in (lambda: None, lambda: path.write_bytes(path.read_bytes()[:-4]), path.unlink):
        if world.rank == 0:
            spoil()
        comm.group(tuple(range(4))).barrier()
        text = same_on_all_ranks(world, refusal(lambda: checkpoint.load(target, root / "a"), CheckpointError))
        assert "1 of 4 ranks failed, the first is rank 2" in text and path.name in text, text


def an_asynchronous_save_holds_the_values_of_its_moment(world):
    root, state = shared_folder(), stepped("fsdp=2 x tp=2", 1)
    want = values(state)
    saving = checkpoint.save(state, root, step=1, async_save=True)
    other = stepped("fsdp=2 x tp=2", 2)
    for p, q in zip(state["model"].get_parameters(), other["model"].get_parameters()):
        p.copy_(q)
    saving.wait()
    assert saving.done and checkpoint.latest(root) == root / "step-00000001"
    checkpoint.load(other, root)
    _same(values(other), want, "asynchronous")
    checkpoint.save(other, root, step=2, async_save=True, keep_last=1)
    assert checkpoint.load(other, root).step == 2, "a load waits for the save under way"
    assert sorted(os.listdir(root)) == ["latest", "step-00000002"]
