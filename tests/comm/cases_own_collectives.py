# SPDX-License-Identifier: Apache-2.0
"""A program's own collectives over our groups on CPU: the contract of every backend through `mint.distributed`, and errors."""
import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, mint
from mindspore import mint as captured
from mindspore.mint.distributed import all_reduce, reduce_scatter_tensor
from mindspore.ops import communication as returning

import ms_dtensor as md
from ms_dtensor import comm, distribute_tensor
from ms_dtensor.comm.world import named_group
from ms_dtensor.errors import CollectiveMismatch, CommError
from tests.comm import contract
from tests.operands import S, data
from tests.support import counted, equal, refusal, same_on_all_ranks

dist = captured.distributed


class ByMint:
    """`mint.distributed` as the contract sees it: arrays go in and out, on dim 0 as MindSpore has it."""

    exact = True
    dtypes = contract.FLOATS + ("int8", "int16", "int32", "int64", "uint8", "bool")

    def __init__(self, world):
        self.world = world

    def _name(self, ranks):
        return named_group(tuple(ranks))

    @staticmethod
    def _in(x):
        return Tensor.from_numpy(np.array(x, order="C"))

    def _empty(self, shape, like):
        return self._in(np.full(shape, 1, like.dtype))

    def all_reduce(self, x, op, ranks):
        once, twice = self._in(x), self._in(x)
        assert all_reduce(once, op, self._name(ranks)) is None
        all_reduce(twice, op, self._name(ranks), async_op=True).wait()
        np.testing.assert_array_equal(once.asnumpy(), twice.asnumpy())
        return once.asnumpy()

    def all_gather(self, x, dim, sizes, ranks):
        front = np.ascontiguousarray(np.moveaxis(x, dim, 0))
        out = self._empty((sum(sizes), *front.shape[1:]), x)
        if len(set(sizes)) == 1:
            dist.all_gather_into_tensor(out, self._in(front), self._name(ranks))
            parts = [self._empty((s, *front.shape[1:]), x) for s in sizes]
            dist.all_gather(parts, self._in(front), self._name(ranks))
            np.testing.assert_array_equal(np.concatenate([p.asnumpy() for p in parts]), out.asnumpy())
        else:
            dist.all_gather_into_tensor_uneven(out, self._in(front), sizes, self._name(ranks))
        return np.moveaxis(out.asnumpy(), 0, dim)

    def reduce_scatter(self, x, op, dim, sizes, ranks):
        me, front = ranks.index(self.world.rank), np.ascontiguousarray(np.moveaxis(x, dim, 0))
        out = self._empty((sizes[me], *front.shape[1:]), x)
        if len(set(sizes)) == 1:
            reduce_scatter_tensor(out, self._in(front), op, self._name(ranks))
            if front.dtype.kind == "f" and front.itemsize == 4:
                again = self._empty(out.shape, x)
                dist.reduce_scatter(again, [self._in(p) for p in np.split(front, len(ranks))], op, self._name(ranks))
                np.testing.assert_array_equal(again.asnumpy(), out.asnumpy())
        else:
            dist.reduce_scatter_tensor_uneven(out, self._in(front), sizes, op, self._name(ranks))
        return np.moveaxis(out.asnumpy(), 0, dim)

    def all_to_all(self, x, sd, ss, cd, cs, ranks):
        me = ranks.index(self.world.rank)
        pieces = [np.ascontiguousarray(p) for p in contract.slices(x, sd, ss)]
        outs = []
        for size in cs:
            shape = list(x.shape)
            shape[sd], shape[cd] = ss[me], size
            outs.append(self._empty(tuple(shape), x))
        dist.all_to_all(outs, list(map(self._in, pieces)), self._name(ranks))
        return np.concatenate([o.asnumpy() for o in outs], cd)

    def all_to_all_rows(self, x, sends, recvs, ranks):
        out = self._empty((sum(recvs), *x.shape[1:]), x)
        dist.all_to_all_single(out, self._in(x), recvs, sends, self._name(ranks))
        return out.asnumpy()

    def broadcast(self, x, src, ranks):
        t = self._in(x)
        dist.broadcast(t, src, self._name(ranks))
        return t.asnumpy()

    def scatter(self, x, dim, sizes, src, ranks, shape, dtype):
        """MindSpore's takes equal parts: of padded ones."""
        me, most = ranks.index(self.world.rank), max(sizes)
        rest = tuple(s for d, s in enumerate(shape) if d != dim)
        out, parts = self._empty((most, *rest), np.zeros(0, dtype)), []
        for piece in contract.slices(x if x is not None else np.zeros(shape, dtype), dim, sizes):
            padded = np.zeros((most, *rest), dtype)
            padded[:piece.shape[dim]] = np.moveaxis(piece, dim, 0)
            parts.append(self._in(padded))
        dist.scatter(out, parts, src, self._name(ranks))
        return np.ascontiguousarray(np.moveaxis(out.asnumpy()[:sizes[me]], 0, dim))

    def exchange(self, sends, recvs):
        into = [self._empty(s, np.zeros(0, d)) for _, s, d in recvs]
        ops = [dist.P2POp("isend", self._in(x), r) for r, x in sends]
        ops += [dist.P2POp("irecv", t, r) for (r, _, _), t in zip(recvs, into)]
        dist.batch_isend_irecv(ops)[0].wait()
        return [t.asnumpy() for t in into]

    def send(self, x, dst):
        dist.isend(self._in(x), dst).wait()

    def recv(self, shape, dtype, src):
        t = self._empty(shape, np.zeros(0, dtype))
        dist.irecv(t, src).wait()
        return t.asnumpy()

    def barrier(self, ranks):
        dist.barrier(self._name(ranks))

    def all_gather_object(self, obj, ranks):
        out = [None] * len(ranks)
        dist.all_gather_object(out, obj, self._name(ranks))
        return out

    def broadcast_object(self, obj, src, ranks):
        held = [obj]
        dist.broadcast_object_list(held, src, self._name(ranks))
        return held[0]


def the_contract_holds_through_mint_distributed(world):
    with comm.mindspore_collectives() as state:
        assert state.on
        assert contract.run_all(ByMint(world), world.rank, world.size) == 30
    assert not state.on


def collectives_that_return_have_gradients(world, grid):
    """Of the sum of what all ranks differentiate, with one transposed collective each."""
    n = 2
    group, here, pair = grid.get_group("tp"), world.rank % 2, world.rank // 2
    xs = [data(10 + 2 * pair + r, 4, 3) for r in range(n)]
    own = [data(60 + r, 4, 3) for r in range(n)]
    pulls_of_all = sum(x.asnumpy() for x in own)
    whole, part = [data(20 + r, 8, 3) for r in range(n)], [data(40 + r, 2, 3) for r in range(n)]
    total = sum(x.asnumpy() for x in xs)

    def checked(call, pulls, value, gradient, op, back):
        with counted() as count:
            got, grad = md.value_and_grad(lambda x: (call(x) * pulls[here]).sum())(xs[here])
        equal(got, (value * pulls[here].asnumpy()).sum())
        equal(grad, gradient)
        assert count == {(op, "forward"): 1, (back, "backward"): 1}, count
    with comm.mindspore_collectives():
        returning.set_comm_ops_inplace(False)
        try:
            checked(lambda x: returning.all_reduce(x, "sum", group)[0], own, total, pulls_of_all, "all_reduce", "all_reduce")
            checked(lambda x: returning.all_gather_into_tensor(None, x, group=str(group))[0], whole,
                    np.concatenate([x.asnumpy() for x in xs]),
                    sum(w.asnumpy() for w in whole)[4 * here:4 * here + 4], "all_gather", "reduce_scatter")
            checked(lambda x: returning.reduce_scatter_tensor(None, x, group=group, async_op=True)[0], part,
                    total[2 * here:2 * here + 2], np.concatenate([p.asnumpy() for p in part]), "reduce_scatter", "all_gather")
            checked(lambda x: returning.all_to_all_single(None, x, [2, 2], [2, 2], group=group)[0], own,
                    np.concatenate([x.asnumpy()[2 * here:2 * here + 2] for x in xs]),
                    np.concatenate([x.asnumpy()[2 * here:2 * here + 2] for x in own]), "all_to_all", "all_to_all")
        finally:
            returning.set_comm_ops_inplace(True)


def groups_are_known_by_name_and_errors_are_alike(world, grid):
    tp = grid.get_group("tp")
    x = data(world.rank, 4)
    with comm.mindspore_collectives() as state:
        assert comm.mindspore_collectives() is state
        communication.init()
        assert (communication.get_rank(), communication.get_group_size(), dist.get_rank(tp), dist.get_world_size(tp)) == (
            world.rank, 4, world.rank % 2, 2)
        assert dist.is_initialized() and tuple(dist.get_process_group_ranks(tp)) == tp.ranks
        communication.create_group("mine", [1, 0, 3, 2])
        assert dist.get_rank("mine") == [1, 0, 3, 2].index(world.rank) and dist.get_group_rank("mine", 1) == 0
        assert dist.get_global_rank("mine", 2) == 3
        odd = dist.new_group([world.rank % 2, world.rank % 2 + 2])
        with counted() as count, comm.record() as events:
            y, twice = Tensor(x.asnumpy().copy()), Tensor(x.asnumpy().copy())
            all_reduce(y, group=odd)  # imported before
            dist.reduce(twice, 0, "max")
        equal(y, data(world.rank % 2, 4).asnumpy() + data(world.rank % 2 + 2, 4).asnumpy())
        equal(twice, np.max([data(r, 4).asnumpy() for r in range(4)], 0) if world.rank == 0 else x)
        assert count == {("all_reduce", "forward"): 2} and all(__file__ in e.site for e in events)
        left, right = (world.rank - 1) % 4, (world.rank + 1) % 4
        z = Tensor(np.zeros(4, np.float32))
        handles = [dist.isend(x, right), dist.irecv(z, left)]  # both ends send first
        handles[1].wait()
        handles[0].wait()
        equal(z, data(left, 4))
        dx = distribute_tensor(data(1, 4), grid, [S(0), S(0)])
        wide = Tensor(np.zeros(9, np.float32))
        for call, error, words in (
                (lambda: all_reduce(dx), CommError, "a DTensor was given"),
                (lambda: all_reduce(x, group="nobody"), CommError, "none of the name 'nobody'"),
                (lambda: dist.broadcast(x, 9), CommError, "rank 9 of"),
                (lambda: dist.get_global_rank("mine", -1), CommError, "rank -1 of"),
                (lambda: dist.all_gather_into_tensor(wide, x, tp), CommError, "the output does not fit"),
                (lambda: reduce_scatter_tensor(wide, wide, group=tp), CommError, "not cut evenly"),
                (lambda: all_reduce(x.astype(ms.int32), "avg"), CommError, "average of integers")):
            text = refusal(call, error)
            assert words in text, text
            if "ranks (" not in text:
                same_on_all_ranks(world, text)
        text = refusal(lambda: all_reduce(Tensor(np.ones(3 + (world.rank == 2), np.float32))), CollectiveMismatch)
        assert "rank(s) 2 made another call" in text and __file__ in text, text
        mint.distributed.barrier()
    assert not state.on
    module = __import__("mindspore.mint.distributed.distributed", fromlist=["x"])
    assert type(module.dist_comm_all_reduce_op).__module__ != "ms_dtensor.comm.mindspore_calls"
    assert "mindspore" in module.create_group.__module__
