# SPDX-License-Identifier: Apache-2.0
"""Plain MindSpore is what it was: many calls, eager and jitted, before the first DTensor exists and after.

The library patches MindSpore (`ms_dtensor/dispatch/patches/`). A program that holds no DTensor must not notice: each call
below gives the same bytes, dtypes and structure, or the same error, without the patches, with them, and after they are
taken back. `internals/test_borders.py` asks some of them, at night all.
"""
import importlib
import re
import sys
import tempfile
from pathlib import Path

OPERANDS = "x, y, w, v, i, m, h, k"  # f32[4, 6] twice, f32[6, 3], f32[6], i32[4], bool[4, 6], f16[4, 6], i64[4, 6]

BINARY = [f"{home}.{name}({a})" for home, names in {
    "mint": "add sub mul div eq ne less greater less_equal greater_equal fmod remainder maximum minimum atan2 pow xlogy "
            "floor_divide logical_and logical_or",
    "ops": "add sub mul div equal ne less greater le ge floor_div maximum minimum pow less_equal"}.items()
    for name in names.split() for a in ("x, y", "x, 2")]
# calls are separated by ";" and a space or the end of the line
METHODS = """
add(y); sub(y); mul(2); div(y); eq(y); less(1); lt(y); gt(0); sum(); sum(0); sum(dim=1, keepdim=True); mean();
mean(1); max(); min(); max(1); argmax(1); prod(); var(1); std(0); abs(); exp(); tanh(); sqrt(); reshape(3, 8); view(2,
12); transpose(1, 0); permute(1, 0); swapaxes(0, 1); expand_dims(0); unsqueeze(1); squeeze(); flatten(); tile((1, 2));
broadcast_to((2, 4, 6)); astype(ms.float16); float(); to(ms.int32); type_as(h); where(m, y); masked_fill(m, 0.0);
clamp(-1, 1); clip(-1, 1); cumsum(1); sort(1); topk(2); matmul(w); split(2, 1); chunk(2); select(0, 1); narrow(1, 0,
2); index_select(0, i); gather(k % 6, 1); any(); all(); isfinite(); isnan(); norm(); triu(); tril(); new_zeros((2,
2)); new_ones((2,)); copy(); fill_diagonal(1.0); repeat_interleave(2, 1); item; ndim; shape; dtype
"""
OPERATORS = """
x + y; x - 1; 1 - x; x * 2; 2 / x; x / y; x ** 2; x % 2; x // 2; -x; x @ w; x == y; x != 0; x < 1; x <= y; x > 1; x >=
y; ~m; m & m; m | ~m; k + 1; k // 2; k % 3; h * 2; h + x; x[0]; x[1:3]; x[:, 2]; x[..., -1]; x[None]; x[i]; x[m]; x[:,
::2]; x[0, 1]; x + v; (x > 0).any(); (x > 0).all(); put(x, 0, 1.0); put(x, slice(1, 3), y[:2]); put(x, m, 0.0)
"""
FUNCTIONS = """
full_like(x, 2.0); zeros_like(x); ones_like(x); rand_like(x, seed=3); randn_like(x, seed=3); randint_like(x, 0, 9,
seed=3); full((2, 2), 3.0); stack((x, y), 1); stack([x, y]); concat((x, y), 1); addn([x, y, x]); einsum('ij,jk->ik',
x, w); matmul(x, w); dense(x, w.T); layer_norm(x, (6,)); group_norm(x, 2); batch_norm(x, v, v * v, v, v); softmax(x);
log_softmax(x); cross_entropy(x, i); nll_loss(x, i); mse_loss(x, y); l1_loss(x, y); smooth_l1_loss(x, y);
binary_cross_entropy(x.sigmoid(), y.sigmoid()); relu(x); gelu(x); silu(x); leaky_relu(x); sigmoid(x); where(m, x, y);
select(m, x, y); clip_by_value(x, -1, 1); clip_by_norm(x, 1.0); clip_by_global_norm((x, y), 1.0); gather(x, i, 0);
one_hot(i, 6); cumsum(x, 1); sort(x); topk(x, 2); split(x, 2, 1); unbind(x); meshgrid(v, v); tril(x); triu(x);
arange(5); linspace(0, 1, 5); eye(3); ones((2,)); zeros((2,)); logsumexp(x, 1); norm(x); std(x); var(x); amax(x, 1);
argmax(x); isfinite(x); lerp(x, y, 0.5); clamp(x, -1, 1); bernoulli(x.sigmoid(), 0.5, seed=3); dropout(x, 0.0);
stop_gradient(x); cast(x, ms.float16); transpose(x, (1, 0)); reshape(x, (3, 8)); tensor_scatter_add(v, i[:, None],
v[:4]); Add()(x, y); Stack(1)((x, y)); AddN()((x, y)); ReduceSum(True)(x, 1); Einsum('ij,jk->ik')((x, w));
LayerNorm()(x, v, v); depend(x, y)
"""
MINT = """
sum(x); mean(x, 1); prod(x); max(x); min(x); max(x, 1); matmul(x, w); cat((x, y), 1); split(x, 2, 1); chunk(x, 2);
where(m, x, y); zeros((2, 2)); ones((2,)); softmax(x, 1); narrow(x, 0, 1, 2); permute(x, (1, 0)); reshape(x, (3, 8));
unsqueeze(x, 0); square(x); rsqrt(x * x); exp(x); clamp(x, -1, 1); lerp(x, y, 0.5); any(m); all(m); add(input=x,
other=y); add(x, other=y); mul(input=x, other=2); add(x, y, alpha=2); sub(x, y); nn.functional.relu(x);
nn.functional.silu(x); nn.functional.linear(x, w.T); nn.functional.layer_norm(x, (6,)); nn.functional.group_norm(x,
2); nn.functional.nll_loss(x, i); einsum('ij,jk->ik', x, w); nansum(x)
"""
CELLS = """
dense(x); net(x); norm(x); conv(x.reshape(1, 1, 4, 6)); embedding(i); loss(x, y); nn.ReLU()(x); amp.all_finite((x,
y)); amp.all_finite((x / 0, y)); fixed.scale(x); fixed.unscale((x, y)); dynamic.unscale((x, y));
dynamic.adjust(Tensor(True))
"""
GRADIENTS_AND_SUCH = """
ms.grad(square)(x); ms.grad(square, (0,))(x); ms.value_and_grad(square)(x); ms.vjp(square, x)[1](x.sum());
ops.GradOperation()(square)(x); ops.GradOperation(get_all=True)(times)(x, y);
ops.GradOperation(sens_param=True)(square)(x, x.sum()); ms.value_and_grad(net_loss, 0, params)(x);
ms.value_and_grad(net_loss, None, params)(x); ms.grad(net_loss, 0, params, return_ids=True)(x); ms.grad(aux,
has_aux=True)(x); ms.grad(ms.grad(cube))(x); hooked(x); ms.recompute(net, x); nn.TrainOneStepCell(train,
nn.SGD(train.trainable_params(), 0.1))(x); ms.grad(broken)(x); square(x); Tensor(x); Tensor([1.0, 2.0]); Tensor(3);
ms.tensor(x); v.asnumpy() * v; v * v.asnumpy(); copy.deepcopy(x); pickle.loads(pickle.dumps(x)); x.asnumpy(); list(v);
x.register_hook(print) is None; x.copy_(y); ops.assign(Parameter(x.copy(), name='q'), y);
nn.BatchNorm1d(6).set_train()(x); ms.Parameter(x, name='p') + y; ops.HyperMap()(square, [x, y]);
amp.DynamicLossScaler(4.0, 2, 1).adjust(Tensor(False)); nn.WithLossCell(net, loss)(x, y[:, :3])
"""


def _calls(text: str, prefix: str = "") -> list[str]:
    return [prefix + " ".join(call.split()) for call in re.split(r";\s", text.strip())]


CALLS = [*BINARY, *_calls(METHODS, "x."), *_calls(OPERATORS), *_calls(FUNCTIONS, "ops."), *_calls(MINT, "mint."),
         *_calls(CELLS)]
EAGER_ONLY = _calls(GRADIENTS_AND_SUCH)
MODULE = '''
import copy, pickle
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, mint, nn, ops
ms.set_seed(5)
np.random.seed(5)
dense, norm, conv, embedding, loss = nn.Dense(6, 3), nn.LayerNorm((6,)), nn.Conv2d(1, 2, 3), nn.Embedding(6, 3), nn.MSELoss()
net = nn.SequentialCell(nn.Dense(6, 4), nn.ReLU(), nn.Dense(4, 3))
train = nn.SequentialCell(nn.Dense(6, 4), nn.ReLU())
params = net.trainable_params()
fixed, dynamic = amp.StaticLossScaler(4.0), amp.DynamicLossScaler(4.0, 2, 5)
def square(x): return (x * x).sum()
def cube(x): return (x * x * x).sum()
def times(x, y): return (x * y).sum()
def net_loss(x): return (net(x) ** 2).mean()
def aux(x): return (x * x).sum(), x
def broken(x): return x @ x
def hooked(x):
    def inner(t):
        u = t * 2
        u.register_hook(lambda g: g * 3)
        return (u * u).sum()
    return ms.grad(inner)(x)
def put(x, at, value):
    z = x * 1
    z[at] = value
    return z
'''


def programs(calls, folder: Path, turn: int):
    """{call: function of the operands}; a module of its own for each turn, as a compiled function is remembered."""
    path = folder / f"border_{folder.name}_{turn}.py"
    functions = "\n".join(f"def call_{n}({OPERANDS}):\n    return {call}\n" for n, call in enumerate(calls))
    path.write_text(MODULE + functions)
    importlib.invalidate_caches()
    module = importlib.import_module(path.stem)  # by name: the graph compiler looks for it so
    return {call: getattr(module, f"call_{n}") for n, call in enumerate(calls)}


def operands():
    """Fresh ones, the same each time."""
    import mindspore as ms
    import numpy as np
    rng = np.random.default_rng(7)
    x, y, w, v = (rng.normal(size=s).astype(np.float32) for s in ((4, 6), (4, 6), (6, 3), (6,)))
    i = np.array([0, 3, 1, 2], np.int32)
    return [ms.Tensor(a) for a in (x, y, w, v, i, x > 0.3, x.astype(np.float16), rng.integers(-5, 9, (4, 6)))]


def told(value):
    """What a call returned, as something that can be compared: structure, class, dtype, shape and bytes."""
    import numpy as np
    from mindspore import Tensor
    if isinstance(value, Tensor):
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.asnumpy().tobytes()
    if isinstance(value, tuple | list):
        return type(value).__name__, *map(told, value)
    if isinstance(value, np.ndarray):
        return "ndarray", str(value.dtype), value.shape, value.tobytes()
    return type(value).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(value))


def outcome(function):
    """What one call gives, an error included."""
    import mindspore as ms
    import numpy as np
    from mindspore.common.api import _pynative_executor
    ms.set_seed(11)
    np.random.seed(11)
    given = operands()
    try:
        return told(function(*given)), told(given)
    except Exception as error:
        _pynative_executor.clear_res()
        _pynative_executor.set_grad_flag(False)
        text = re.sub(r"0x[0-9a-f]+|border_\w+|\d+ms|CPU\w*\d+", "", str(error))
        return "raised", type(error).__name__, text.split("\n----")[0]


def compare(calls, jitted: bool) -> tuple[list[str], int]:
    """What differs between the three turns, one entry each; and how many calls MindSpore itself refuses."""
    import mindspore as ms

    from ms_dtensor import init_device_mesh, ones
    from ms_dtensor.dispatch import patches
    patches.uninstall()
    seen: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for turn in range(3):
            if turn == 1:
                ones((2,), device_mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
            elif turn == 2:
                patches.uninstall()
            functions = programs(calls, Path(folder), turn)
            seen.append({f"{call} [{'jit' if jitted else 'eager'}]": outcome(ms.jit(f) if jitted else f)
                         for call, f in functions.items()})
        sys.path.remove(folder)
    patches.install()
    return [f"{call}, {when}:\n    {str(seen[0][call])[:300]}\n    {str(other[call])[:300]}"
            for when, other in (("patched", seen[1]), ("taken back", seen[2])) for call in seen[0]
            if other[call] != seen[0][call]], sum(told[0] == "raised" for told in seen[0].values())
