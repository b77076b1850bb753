# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in MindSpore's own formats; parameters, nets and tensors as Python objects; seeds."""
import copy
import os
import pickle
import threading

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import ms_dtensor as md
from ms_dtensor import FusedColwiseParallel, comm
from tests.surface.table import Net, Plain, random, row, rows, seeded, shared_path, values

FILES, PARAMETERS, TENSORS, SEEDS = "checkpoints", "parameters and nets", "tensors in Python", "random numbers"


def pair(s, net, optimizer=None):
    """Loss of a step; with an optimizer it is made."""
    loss, grads = ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, net.trainable_params())(*s.batch())
    if optimizer is not None:
        optimizer(grads)
    return loss


def moved(net, factor=-1.0):
    """Other values in every parameter."""
    for p in net.get_parameters():
        p.set_data(p.value() * factor)
    return net


def in_file(name):
    """What plain MindSpore reads, as arrays."""
    return {key: p.asnumpy() for key, p in ms.load_checkpoint(name).items()}


# -- checkpoints ----------------------------------------------------------------------------------------------------------
def saved_and_loaded(s, name, **options):
    net = s.net()
    ms.save_checkpoint(net, shared_path(s, name), **options)
    fmt = {"format": options["format"]} if "format" in options else {}
    read = ms.load_checkpoint(shared_path(s, name), **fmt)
    other = moved(s.net())
    missing = ms.load_param_into_net(other, read)
    return {k: p.asnumpy() for k, p in read.items()}, missing, values(other), pair(s, other)


rows(FILES, {
    "ms.save_checkpoint(net), load_checkpoint, load_param_into_net": lambda s: saved_and_loaded(s, "net.ckpt"),
    "the same as safetensors": lambda s: saved_and_loaded(s, "net.safetensors", format="safetensors"),
    "save_checkpoint(crc_check=True)": lambda s: saved_and_loaded(s, "crc.ckpt", crc_check=True),
})


@row(FILES, "ms.load_checkpoint(file, net)")
def load_into_net(s):
    ms.save_checkpoint(s.net(), shared_path(s, "into.ckpt"))
    net = moved(s.net())
    ms.load_checkpoint(shared_path(s, "into.ckpt"), net)
    return values(net)


@row(FILES, "save_checkpoint(choice_func=, append_dict=), filter_prefix")
def save_some(s, net):
    ms.save_checkpoint(net, shared_path(s, "some.ckpt"), choice_func=lambda name: "head" not in name,
                       append_dict={"epoch": 3, "lr": 0.25})
    read = ms.load_checkpoint(shared_path(s, "some.ckpt"), filter_prefix="norm")
    other = moved(s.net())
    return sorted(read), read["epoch"].asnumpy(), ms.load_param_into_net(other, read), values(other)


@row(FILES, "save_checkpoint of a list of parameters, of a list of dicts, of parameters_dict()")
def save_lists(s, net):
    ms.save_checkpoint(net.trainable_params(), shared_path(s, "list.ckpt"))
    ms.save_checkpoint([{"name": "mine." + p.name, "data": p} for p in net.get_parameters()], shared_path(s, "dicts.ckpt"))
    ms.save_checkpoint(net.parameters_dict(), shared_path(s, "dict.ckpt"))
    return [in_file(shared_path(s, name)) for name in ("list.ckpt", "dicts.ckpt", "dict.ckpt")]


@row(FILES, "net and optimizer: stop after three steps, go on in a new process's objects")
def resume(s, net):
    optimizer = nn.Adam(net.trainable_params(), 0.02)
    losses = [pair(s, net, optimizer) for _ in range(3)]
    ms.save_checkpoint(optimizer, shared_path(s, "optimizer.ckpt"))
    ms.save_checkpoint(net, shared_path(s, "resumed.ckpt"))
    net = moved(s.net())
    optimizer = nn.Adam(net.trainable_params(), 0.02)
    missing = (ms.load_param_into_net(net, ms.load_checkpoint(shared_path(s, "resumed.ckpt"))),
               ms.load_param_into_net(optimizer, ms.load_checkpoint(shared_path(s, "optimizer.ckpt"))))
    losses += [pair(s, net, optimizer) for _ in range(3)]
    return losses, missing, values(net), values(optimizer), in_file(shared_path(s, "optimizer.ckpt"))


@row(FILES, "a file of one device into the mesh, and the mesh's file into one device")
def across(s):
    plain = Plain().net()
    name = shared_path(s, f"plain{os.environ.get('RANK_ID', '0')}.ckpt")
    ms.save_checkpoint(plain, name)
    net = moved(s.net())
    ms.load_checkpoint(name, net)
    ms.save_checkpoint(moved(net, 2.0), shared_path(s, "twice.ckpt"))
    ms.load_checkpoint(shared_path(s, "twice.ckpt"), plain)
    return values(net), values(plain)


@row(FILES, "float32 file into a float16 net")
def other_dtype(s):
    ms.save_checkpoint(s.net(), shared_path(s, "wide.ckpt"))
    net = s.net()
    for p in net.get_parameters():
        p.set_dtype(ms.float16)
    ms.load_checkpoint(shared_path(s, "wide.ckpt"), net)
    return values(net)


@row(FILES, "load_param_into_net of another net's parameters_dict()")
def from_parameters(s, net):
    other = moved(s.net())
    missing = ms.load_param_into_net(net, other.parameters_dict())
    return missing, values(net)


@row(FILES, "save_checkpoint(async_save=True)")
def save_async(s, net):
    ms.save_checkpoint(net, shared_path(s, "async.ckpt"), async_save=True)
    ms.async_ckpt_thread_status()
    for thread in threading.enumerate():
        if thread.name == "asyn_save_ckpt":
            thread.join()
    if s.mesh is not None:
        s.mesh.get_group().barrier()
    return in_file(shared_path(s, "async.ckpt"))


class Attention(nn.Cell):
    """One projection for q, k and v."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Dense(6, 24), nn.Dense(8, 5)

    def construct(self, x):
        q, k, v = self.qkv(x) if self.fused else mint.split(self.qkv(x), 8, -1)
        return self.out(q * ops.tanh(k) + v)


@row(FILES, "a fused projection, in the model's own order")
def fused(s):
    def build():
        cell = seeded(Attention())
        cell.fused = s.mesh is not None and "tp" in s.mesh.mesh_dim_names
        return s.net(cell, {"qkv": FusedColwiseParallel((8, 8, 8), units=4, use_local_output=False)})
    net, x = build(), s.data(random(5, 8, 6))
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())
    losses = []
    for _ in range(3):
        loss, grads = step(x)
        optimizer(grads)
        losses.append(loss)
    ms.save_checkpoint(net, shared_path(s, "fused.ckpt"))
    ms.save_checkpoint(optimizer, shared_path(s, "moments.ckpt"))
    other = build()
    ms.load_checkpoint(shared_path(s, "fused.ckpt"), other)
    return losses, in_file(shared_path(s, "fused.ckpt")), in_file(shared_path(s, "moments.ckpt")), other(x)


@row(FILES, "Cell.state_dict and load_state_dict")
def state_dict(s, net):
    other = moved(s.net())
    told = other.load_state_dict(net.state_dict())
    return list(net.state_dict()), str(told), values(other)


# -- parameters and nets --------------------------------------------------------------------------------------------------
@row(PARAMETERS, "names, shapes and dtypes of all lists of parameters")
def listed(net):
    net.norm.gamma.requires_grad = False
    return [[(p.name, p.shape, str(p.dtype), p.requires_grad, p.size, p.ndim) for p in ps] for ps in (
        net.parameters_dict().values(), net.get_parameters(), net.trainable_params(), net.untrainable_params(),
        [p for _, p in net.parameters_and_names()], net.up.get_parameters(), net.get_parameters(expand=False))]


@row(PARAMETERS, "update_parameters_name")
def renamed(s, net):
    net.update_parameters_name("student.")
    return [p.name for p in net.get_parameters()], list(net.parameters_dict()), pair(s, net)


@row(PARAMETERS, "set_train, set_grad, requires_grad")
def modes(net, x, y):
    net.set_train()
    net.set_grad()
    flags = [net.training, net.up.training, net.requires_grad]
    net.set_train(False)
    net.down.weight.requires_grad = False
    grads = ms.grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, net.trainable_params())(x, y)
    return flags, net.training, [p.name for p in net.trainable_params()], grads


@row(PARAMETERS, "Cell.to_float(float16) of two layers", rtol=2e-3)  # sums of float16 products in another order
def to_float(net, x, y):
    net.up.to_float(ms.float16)
    net.down.to_float(ms.float16)
    return ms.value_and_grad(lambda x, y: ((net(x).float() - y) ** 2).mean(), None, net.trainable_params())(x, y)


@row(PARAMETERS, "Parameter.clone, copy, set_data, value, assign_value")
def cloned(net):
    w = net.up.weight
    zeros, ones, same = w.clone(init="zeros"), w.clone("ones"), w.clone()
    same.set_data(w * 2)
    w.set_data(w + 1)
    ops.assign(net.head.bias, net.head.bias * 3)
    ops.assign_add(net.head.weight, net.head.weight)
    copied = copy.copy(w)
    return zeros, ones, same, w.value(), copied, w.copy(), values(net)


@row(PARAMETERS, "copy.deepcopy of a parameter and of a net (a target network)")
def deep_copied(s, net):
    target, weight = copy.deepcopy(net), copy.deepcopy(net.up.weight)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    pair(s, net, optimizer)
    for p, q in zip(target.get_parameters(), net.get_parameters()):
        p.set_data(p * 0.9 + q * 0.1)
    return pair(s, target), values(target), values(net), weight, weight.name


@row(PARAMETERS, "pickle of parameters and tensors, on the same mesh")
def pickled(s, net):
    params = pickle.loads(pickle.dumps(list(net.get_parameters())))
    x = pickle.loads(pickle.dumps(s.data(random(3, 8, 5))))
    return [(p.name, p.requires_grad, p) for p in params], x


@row(PARAMETERS, "ParameterTuple, its clone; CellList of deep copies")
def tuples(s, net):
    moments = ms.ParameterTuple(net.trainable_params()).clone(prefix="moment", init="zeros")
    blocks = nn.CellList([copy.deepcopy(net.head) for _ in range(2)])
    x = s.data(random(4, 8, 7))
    return [(m.name, m) for m in moments], [block(x) for block in blocks]


@row(PARAMETERS, "Cell.apply, insert_child_to_cell, a parameter given anew")
def applied(s, net):
    seen = []
    net.apply(lambda cell: seen.append(type(cell).__name__))
    net.insert_child_to_cell("extra", net.head)
    net.head.weight.set_data(net.head.weight * 2)
    return [name for name in seen if "Dense" in name or "Norm" in name], net.extra(s.data(random(4, 8, 7)))


@row(PARAMETERS, "register_buffer, moved with the net")
def buffers(s):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", Tensor(random(7, 5)))

        def construct(self, x):
            return super().construct(x) * self.scale
    net = s.net(seeded(Scaled()))
    x = s.data(random(4, 8, 4, 7))
    return ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, net.trainable_params())(x)


# -- tensors in Python ----------------------------------------------------------------------------------------------------
@row(TENSORS, "len, bool, float, int, item, in a condition")
def scalars(s, net):
    loss = pair(s, net)
    x = s.data(random(3, 8, 5))
    count = (x > 0).sum()
    return len(x), bool(loss > 0.1), float(loss), int(count), count.item(), loss.item(), "yes" if loss < 100 else "no"


@row(TENSORS, "iteration, unpacking, indexing, in and list()")
def iterated(s):
    x = s.data(random(3, 8, 5))
    first, *rest = x
    return first, len(rest), [r.sum() for r in x], x[2], x[-1, 1:3], x[:, 2], list(zip(x, x))[3][0]


@row(TENSORS, "np.asarray and np.array of a replicated tensor, numpy(), tolist()")
def arrays(s):
    whole = s.whole(random(3, 8, 5))
    return np.asarray(whole).mean(), np.array(whole), whole.asnumpy(), whole.numpy(), whole.tolist()


SHARDED = "asnumpy() gathers nothing behind one's back, on one rank neither: x.full_tensor().asnumpy()"


@row(TENSORS, "np.asarray of a batch cut over dp", refused={
    "replicate": SHARDED, "dp x tp, sp": SHARDED, "fsdp": SHARDED, "fsdp x tp, sp": SHARDED, "one rank": SHARDED})
def sharded_arrays(s):
    x = s.data(random(3, 8, 5))
    return np.asarray(x).mean(), np.array(x)


@row(TENSORS, "np.asarray of a weight cut over tp", refused={
    "tp": SHARDED, "dp x tp, sp": SHARDED, "fsdp": SHARDED, "fsdp x tp, sp": SHARDED, "one rank": SHARDED})
def weight_array(s):
    return np.asarray(s.net().up.weight)


@row(TENSORS, "x.full_tensor() where there is one, then NumPy")
def whole_array(s):
    w = s.net().up.weight
    return np.asarray(w.full_tensor() if isinstance(w, md.DTensor) else w).mean(0)


@row(TENSORS, "format of a scalar; print, repr and str of tensors, parameters, nets")
def printed(s, net):
    loss, x = pair(s, net), s.data(random(3, 8, 5))
    assert all(repr(v) and str(v) and f"{v}" for v in (loss, x, net, net.up.weight, net.up))
    return f"{float(loss):.3f}", f"{loss.item():.3f}"


@row(TENSORS, "shape, ndim, size, dtype, itemsize, nbytes, strides")
def facts(s):
    x = s.data(random(3, 8, 5))
    return x.shape, x.ndim, int(x.size), str(x.dtype), x.itemsize, x.nbytes, x.numel(), x.dim(), tuple(x.strides)


@row(TENSORS, "dict keys, identity, sets of tensors; comparison with None")
def as_keys(s):
    x, y = s.data(random(3, 8, 5)), s.data(random(4, 8, 5))
    return {x: 1, y: 2}[y], len({x, y, x}), x is not None, (x == x).all(), x.equal(x) if hasattr(x, "equal") else None


# -- seeds: no row compares with plain MindSpore's numbers; the numbers of one mesh are those of any other -----------------
def drawn(s):
    """The tensor that random functions fill: on one device a DTensor that all ranks hold whole."""
    if s.mesh is not None:
        return s.data(random(3, 8, 6))
    world = comm.current_world()
    mesh = md.init_device_mesh("cpu", (world.size if world else 1,), mesh_dim_names=("all",))
    return md.distribute_tensor(Tensor(random(3, 8, 6)), mesh, src_data_rank=None)


def numbers(s):
    x = drawn(s)
    return [y.full_tensor() for y in (ops.rand_like(x), mint.randn_like(x), ops.dropout(x, 0.4), mint.bernoulli(
        ops.sigmoid(x)), nn.Dropout(p=0.3).set_train()(x), mint.nn.functional.dropout(x, 0.5), ops.randint_like(x, 0, 9))]


def reseeded(s, seed):
    """The numbers after a seed, the same again after the same, others after another."""
    seed(7)
    first = numbers(s)
    seed(7)
    again = numbers(s)
    seed(8)
    other = numbers(s)
    return first, other, [bool((a == b).all()) for a, b in zip(first, again)], [
        bool((a == b).all()) for a, b in zip(first, other)]


rows(SEEDS, {
    "ms.set_seed starts the stream of DTensors anew": lambda s: reseeded(s, ms.set_seed),
    "ms.manual_seed": lambda s: reseeded(s, ms.manual_seed),
})


@row(SEEDS, "ms.get_rng_state and set_rng_state")
def rng_state(s):
    ms.manual_seed(5)
    numbers(s)
    state = ms.get_rng_state()
    first = numbers(s)
    ms.set_rng_state(state)
    return first, [bool((a == b).all()) for a, b in zip(first, numbers(s))]


@row(SEEDS, "dropout in training after ms.set_seed: one global mask on every mesh")
def dropout_training(s):
    ms.set_seed(11)
    x = drawn(s)
    dropout = nn.Dropout(p=0.3).set_train()
    return ms.value_and_grad(lambda x: (dropout(x) ** 2).sum())(x)
