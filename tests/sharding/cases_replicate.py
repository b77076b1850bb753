# SPDX-License-Identifier: Apache-2.0
"""`replicate`: whichever op reads a parameter, one reduction brings its gradient; and ranks with fewer rows, or with none."""
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_dtensor import DTensor, MixedPrecisionPolicy, distribute_module, distribute_tensor, replicate
from ms_dtensor.errors import LayoutError
from tests.cases import cases
from tests.operands import Built, filled, mesh_1d, mesh_2d
from tests.support import RTOL, counted, equal, refusal
from tests.tiers import sampled

F = mint.nn.functional
BF16 = MixedPrecisionPolicy(ms.bfloat16, ms.float32)
ROUNDING = 2.5e-2  # of the largest element: a few roundings to 8 bits, each 2^-9, through a square and a root


class With(nn.Cell):
    """A function of the input and of parameters of these shapes."""

    def __init__(self, fn, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.fn, self.count = fn, len(shapes)
        for i, shape in enumerate(shapes):
            setattr(self, f"w{i}", Parameter(Tensor(np.zeros(shape, np.float32)), name=f"w{i}"))

    def construct(self, x):
        return self.fn(x, *(getattr(self, f"w{i}") for i in range(self.count)))


def tied() -> nn.Cell:
    """A language model's two uses of one table."""
    net = Built(lambda c, ids: c.head(mint.tanh(c.table(ids))), table=nn.Embedding(9, 4),
                head=nn.Dense(4, 9, has_bias=False))
    net.head.weight = net.table.embedding_table
    return net


RNG = np.random.default_rng(3)
IDS = np.array([5, 0, 1, 8, 2, 2, 3, 0], np.int32)
IMAGES = RNG.normal(size=(8, 4, 6, 6)).astype(np.float32)
ROWS = RNG.normal(size=(8, 6)).astype(np.float32)
READERS = {  # how parameters are read: kernels, substitutes for kernels that the CPU lacks, views, indices
    "nn.Embedding": (lambda: nn.Embedding(9, 4), IDS), "mint.nn.Embedding": (lambda: mint.nn.Embedding(9, 4), IDS),
    "gather": (lambda: With(lambda i, w: ops.gather(w, i, 0), (9, 4)), IDS), "tied": (tied, IDS),
    "w[i]": (lambda: With(lambda i, w: w[i], (9, 4)), IDS),
    "index_select": (lambda: With(lambda i, w: mint.index_select(w, 0, i), (9, 4)), IDS),
    "nn.Dense": (lambda: nn.Dense(6, 3), ROWS), "mint.nn.Linear": (lambda: mint.nn.Linear(6, 3), ROWS),
    "ops.matmul of 3 dims": (lambda: With(lambda x, w: ops.matmul(x.reshape(8, 2, 3), w), (3, 2)), ROWS),
    "nn.LayerNorm": (lambda: nn.LayerNorm((6,)), ROWS), "mint.nn.LayerNorm": (lambda: mint.nn.LayerNorm((6,)), ROWS),
    "rms_norm": (lambda: With(lambda x, w: ops.rms_norm(x, w)[0], (6,)), ROWS),
    "nn.Conv2d": (lambda: nn.Conv2d(4, 2, 3, has_bias=True), IMAGES), "mint.nn.Conv2d": (lambda: mint.nn.Conv2d(4, 2, 3), IMAGES),
    "nn.GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGES), "nn.BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGES),
    "nn.PReLU": (lambda: nn.PReLU(4), IMAGES), "nn.Conv2dTranspose": (lambda: nn.Conv2dTranspose(4, 2, 3), IMAGES),
    "addmm": (lambda: With(lambda x, b, w: mint.addmm(b, x, w), (3,), (6, 3)), ROWS),
    "addcmul": (lambda: With(lambda x, w: mint.addcmul(w, x, x), (6,)), ROWS),
    "gelu, softmax": (lambda: With(lambda x, w: F.gelu(w) * F.softmax(w, -1) * x, (6,)), ROWS),
    "where, maximum": (lambda: With(lambda x, w: mint.where(x > 0, w, x) * mint.maximum(x, w), (6,)), ROWS),
    "einsum": (lambda: With(lambda x, w: mint.einsum("bi,ij->bj", x, w), (6, 3)), ROWS),
    "masked_fill, clamp": (lambda: With(lambda x, w: ops.masked_fill(w, w > 0.5, 0.0) * x * mint.clamp(w, 0.2, 0.6), (6,)), ROWS),
    "norm, std": (lambda: With(lambda x, w: x / mint.norm(w) * mint.std(w), (6,)), ROWS),
    "pow, flip": (lambda: With(lambda x, w: (mint.abs(w) + 0.5) ** x * mint.flip(w, (0,)), (6,)), ROWS),
    "triu": (lambda: With(lambda x, w: x @ mint.triu(w), (6, 3)), ROWS),
    "repeat_interleave": (lambda: With(lambda x, w: x * mint.repeat_interleave(w, 2), (3,)), ROWS),
}


# What is computed of a parameter alone, the same on all ranks, is reduced before the parameter is; so are statistics.
SEVERAL = {"nn.BatchNorm2d", "gelu, softmax", "masked_fill, clamp", "norm, std", "pow, flip", "triu", "repeat_interleave"}


def one_device(make, x, mesh):
    """Plain MindSpore's gradients; of a replica, where plain MindSpore has no CPU kernel."""
    try:
        return gradients(filled(make()), Tensor(x))
    except RuntimeError as e:
        assert "kernel" in str(e) or "only supports Ascend" in str(e), e
        return gradients(distribute_module(filled(make()), mesh), distribute_tensor(Tensor(x), mesh))


def gradients(net, x):
    loss, grads = ms.value_and_grad(lambda t: (net(t) ** 2).mean(), None, net.trainable_params())(x)
    return [loss, *(grads if isinstance(grads, tuple | list) else [grads])]


@cases(4, {"whichever_op_reads_a_parameter_its_bucket_gets_the_sum": (None, 2, RTOL),
           "whichever_op_reads_a_parameter_it_sees_bfloat16_and_the_gradient_is_float32": (BF16, 6, ROUNDING)}, timeout=240)
def whichever_op_reads_a_parameter(world, policy, every: int, rtol: float) -> None:
    """`every`: at push one of so many."""
    mesh, grid = mesh_1d(4, "dp"), mesh_2d()
    for shift, (name, (make, x)) in enumerate(sampled(READERS.items(), every)):
        if policy is not None and name in ("nn.BatchNorm2d", "nn.Conv2dTranspose", "masked_fill, clamp"):
            continue  # statistics of few numbers, and values that rounding takes across a border
        want = one_device(make, x, mesh)
        for axis, tp in sampled(((mesh, None), (grid["dp"], grid["tp"])), 2, shift):
            net = replicate(filled(make()) if tp is None else distribute_module(filled(make()), tp), mesh=axis, mp_policy=policy)
            rows = Tensor(np.array_split(x, axis.size())[axis.get_local_rank()])
            if policy is not None:
                assert net(rows).dtype == ms.bfloat16, name
            with counted() as count:
                loss, *grads = gradients(net, rows)
            assert all(t.dtype == ms.float32 for t in (*grads, *net.trainable_params())), name
            equal((loss.float(), *grads), want, name, rtol)
            assert name in SEVERAL or count["all_reduce", "backward"] == 1, (name, count)


def a_rank_without_rows_hands_its_gradients_in_as_the_others_do(world):
    """Five rows are 2, 2, 1 and none: in whichever order an op tells the gradients of several parameters, all ranks have it."""
    for name, (make, x) in READERS.items():
        net = replicate(filled(make()), mesh=mesh_1d(4, "dp"))
        if name == "tied" or len(net.trainable_params()) > 1:
            equal(gradients(net, Tensor(x[2 * world.rank:5][:2])), one_device(make, x[:5], mesh_1d(4, "dp")), name, 5 * RTOL)


def the_last_batch_may_be_smaller_and_other_rows_are_refused_on_all_ranks(world):
    mesh, x = mesh_1d(4, "dp"), ROWS[:7]
    want = gradients(filled(nn.Dense(6, 3)), Tensor(x))
    net = replicate(filled(nn.Dense(6, 3)), mesh=mesh)
    full = gradients(net, Tensor(np.array_split(ROWS, 4)[world.rank]))
    equal(full, gradients(filled(nn.Dense(6, 3)), Tensor(ROWS)))
    net = replicate(filled(nn.Dense(6, 3)), mesh=mesh)
    cuts = (0, 2, 4, 6, 7)
    rows = Tensor(x[cuts[world.rank]:cuts[world.rank + 1]])
    equal(gradients(net, rows), want)
    with counted() as count:
        y = net(rows)
    assert isinstance(y, DTensor) and y.shape == (7, 3)
    assert count == {("all_gather_object", "forward"): 1}, count  # each call asks: no rank knows that another's rows changed
    for cuts in ((0, 1, 3, 5, 7), (0, 2, 4, 7, 7)):
        net = replicate(filled(nn.Dense(6, 3)), mesh=mesh)
        text = refusal(lambda: net(Tensor(x[cuts[world.rank]:cuts[world.rank + 1]])), LayoutError)
        assert "not the rows of one batch" in text and "rank 3 brings" in text
    wide = Tensor(ROWS[2 * world.rank:2 * world.rank + 2, :5 + world.rank % 2])
    assert "rank 0 brings [2, 5]" in refusal(lambda: replicate(filled(nn.Dense(6, 3)), mesh=mesh)(wide), LayoutError)
