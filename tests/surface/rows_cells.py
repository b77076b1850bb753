# SPDX-License-Identifier: Apache-2.0
"""Layers and losses of `nn`: outputs, and gradients by inputs and parameters."""
import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops

from ms_dtensor import ColwiseParallel, FusedColwiseParallel, RowwiseParallel
from tests.operands import Built
from tests.surface.rows_state import drawn
from tests.surface.table import COLUMNS, random, row, seeded, values

ATTENTION, RECURRENT, NORMS, LAYERS, LOSSES = "attention", "recurrent cells", "norms", "layers", "losses"
COL, ROW = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)

NO_RULE = "no rule yet; each rank's rows are enough for it: local_map(cell, out_placements=[Shard(0)])"


def differentiated(net, *inputs, at=None):
    """Output and gradients, of the inputs (all that are real, or those at `at`) and of the parameters."""
    params = net.trainable_params()
    at = at or tuple(i for i, x in enumerate(inputs) if x.is_floating_point())

    def loss(*inputs):
        out = net(*inputs)
        first = out[0] if isinstance(out, tuple) else out
        return (first ** 3 / 3 + first).sum() if first.ndim else first, out  # a square of a norm has no gradient
    (_, out), grads = ms.value_and_grad(loss, at, params or None, has_aux=True)(*inputs)
    return out, grads


def ids(seed, high, *shape):
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


# -- attention ------------------------------------------------------------------------------------------------------------
def attention(s, plan, **options):
    net = s.net(seeded(nn.MultiheadAttention(8, 4, batch_first=True, **options)), plan)
    q, k = s.data(random(1, 4, 5, 8)), s.data(random(2, 4, 6, 8))
    return net, q, k


@row(ATTENTION, "nn.MultiheadAttention, replicated weights")
def attention_replicated(s):
    net, q, k = attention(s, None)
    return differentiated(net, q, k, k)


@row(ATTENTION, "nn.MultiheadAttention, self-attention with an attn_mask and without weights")
def attention_self(s):
    net, q, _ = attention(s, None)
    mask = s.whole(np.triu(np.ones((5, 5), bool), 1))
    return differentiated(Built(lambda c, x: c.net(x, x, x, attn_mask=mask, need_weights=False)[0], net=net), q)


@row(ATTENTION, "nn.MultiheadAttention, key_padding_mask and averaged weights")
def attention_padded(s):
    net, q, k = attention(s, None)
    padded = np.zeros((4, 6), bool)
    padded[1, 4:], padded[3, 2:] = True, True
    return net(q, k, k, key_padding_mask=s.data(padded))


@row(ATTENTION, "nn.MultiheadAttention, its output projection cut")
def attention_out(s):
    net, q, k = attention(s, {"out_proj": ROW})
    return differentiated(net, q, k, k)


class Fused(nn.Cell):
    """Attention with one projection for q, k and v."""

    def __init__(self, heads=4, width=8):
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)

    def construct(self, x):
        fused = self.qkv(x)
        q, k, v = fused if isinstance(fused, tuple) else mint.chunk(fused, 3, -1)
        b, n = x.shape[:2]

        def heads(t):
            return mint.transpose(t.reshape((b, n, self.heads, self.width // self.heads)), 1, 2)
        scores = mint.softmax(mint.matmul(heads(q), mint.transpose(heads(k), -2, -1)) / 2.0, -1)
        return self.out(mint.transpose(mint.matmul(scores, heads(v)), 1, 2).reshape((b, n, self.width)))


@row(ATTENTION, "a fused q, k, v projection cut by head (FusedColwiseParallel)")
def attention_fused(s):
    net = s.net(seeded(Fused()), {"qkv": FusedColwiseParallel((8, 8, 8), units=4, use_local_output=False), "out": ROW})
    x, y = s.data(random(1, 4, 5, 8)), s.data(random(2, 4, 5, 8))
    optimizer = nn.SGD([net.out.weight, net.out.bias], 0.1)
    losses = []
    for _ in range(5):
        loss, grads = ms.value_and_grad(lambda x: ((net(x) - y) ** 2).mean(), None, [net.out.weight, net.out.bias])(x)
        optimizer(grads)
        losses.append(loss)
    return losses, values(net.out), ms.grad(lambda x: (net(x) ** 2).sum())(x)


def encoder_plan(prefix=""):
    return {f"{prefix}dense1": COL, f"{prefix}dense2": ROW}


@row(ATTENTION, "nn.TransformerEncoderLayer, its feed-forward cut")
def encoder_layer(s):
    net = s.net(seeded(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)), encoder_plan())
    return differentiated(net, s.data(random(1, 4, 5, 8)))


@row(ATTENTION, "nn.TransformerEncoderLayer(norm_first=True, activation='gelu') with a mask")
def encoder_layer_first(s):
    net = s.net(seeded(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True,
                                                  activation="gelu")), encoder_plan())
    mask = s.whole(np.triu(np.full((5, 5), -1e9, np.float32), 1))
    return differentiated(net, s.data(random(1, 4, 5, 8)), mask)[0]


@row(ATTENTION, "nn.TransformerEncoder of two layers")
def encoder(s):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    net = s.net(seeded(nn.TransformerEncoder(layer, 2, nn.LayerNorm((8,)))), encoder_plan("layers.*."))
    return differentiated(net, s.data(random(1, 4, 5, 8)))


@row(ATTENTION, "nn.TransformerDecoderLayer")
def decoder_layer(s):
    net = s.net(seeded(nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)), encoder_plan())
    return differentiated(net, s.data(random(1, 4, 5, 8)), s.data(random(2, 4, 6, 8)))


@row(ATTENTION, "nn.TransformerDecoder of two layers, a causal mask")
def decoder(s):
    layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    net = s.net(seeded(nn.TransformerDecoder(layer, 2)), encoder_plan("layers.*."))
    mask = s.whole(np.triu(np.full((5, 5), -1e9, np.float32), 1))
    return net(s.data(random(1, 4, 5, 8)), s.data(random(2, 4, 6, 8)), tgt_mask=mask)


@row(ATTENTION, "nn.Transformer")
def transformer(s):
    net = s.net(seeded(nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)), encoder_plan("*.layers.*."))
    return differentiated(net, s.data(random(1, 4, 5, 8)), s.data(random(2, 4, 6, 8)))


# -- recurrent ------------------------------------------------------------------------------------------------------------
def recurrent(name, make):
    @row(RECURRENT, name)
    def program(s):
        net = s.net(seeded(make()))
        return differentiated(net, s.data(random(1, 4, 5, 6)))


recurrent("nn.RNN", lambda: nn.RNN(6, 7, batch_first=True))
recurrent("nn.LSTM", lambda: nn.LSTM(6, 7, batch_first=True))
recurrent("nn.GRU", lambda: nn.GRU(6, 7, batch_first=True))
recurrent("nn.GRU of two layers, both directions", lambda: nn.GRU(6, 7, 2, batch_first=True, bidirectional=True))
recurrent("nn.LSTM of two layers", lambda: nn.LSTM(6, 7, 2, batch_first=True))


@row(RECURRENT, "nn.LSTM with given states")
def lstm_states(s):
    net = s.net(seeded(nn.LSTM(6, 7, batch_first=True)))
    state = s.whole(random(2, 1, 4, 7)), s.whole(random(3, 1, 4, 7))
    return net(s.whole(random(1, 4, 5, 6)), state)


def unrolled(cell, x, states):
    """The cell over five steps."""
    out = []
    for i in range(5):
        states = cell(x[:, i], states)
        out.append(states[0] if isinstance(states, tuple) else states)
    return ops.stack(out, 1)


def step_cell(name, make, states):
    @row(RECURRENT, name)
    def program(s):
        cell = s.net(seeded(make()))
        zeros = tuple(s.data(random(9 + i, 4, 7)) for i in range(states))
        return ms.value_and_grad(lambda x: (unrolled(cell, x, zeros if states > 1 else zeros[0]) ** 2).sum(), 0,
                                 cell.trainable_params())(s.data(random(1, 4, 5, 6)))


step_cell("nn.RNNCell, unrolled", lambda: nn.RNNCell(6, 7), 1)
step_cell("nn.GRUCell, unrolled", lambda: nn.GRUCell(6, 7), 1)
step_cell("nn.LSTMCell, unrolled", lambda: nn.LSTMCell(6, 7), 2)


# -- norms ----------------------------------------------------------------------------------------------------------------
def normed(name, make, *shape, plan=None, lay="data", **options):
    """Three steps in training, then evaluation: running statistics, outputs, gradients."""
    @row(NORMS, name, **options)
    def program(s):
        net = s.net(seeded(make()), plan)
        net.set_train()
        steps = [differentiated(net, getattr(s, lay)(random(i, *shape))) for i in range(3)]
        net.set_train(False)
        return steps, values(net), net(getattr(s, lay)(random(7, *shape)))


normed("nn.BatchNorm1d: statistics of the whole batch", lambda: nn.BatchNorm1d(6), 8, 6)
normed("nn.BatchNorm2d", lambda: nn.BatchNorm2d(3), 8, 3, 4, 5)
normed("nn.BatchNorm2d(momentum=0.5, affine=False)", lambda: nn.BatchNorm2d(3, momentum=0.5, affine=False), 8, 3, 4, 5)
normed("nn.BatchNorm3d", lambda: nn.BatchNorm3d(3), 4, 3, 2, 3, 2)

NO_GROUP = "MindSpore's own groups: nn.BatchNorm2d of a DTensor normalizes over the global batch anyway"


@row(NORMS, "nn.SyncBatchNorm", refused=dict.fromkeys(COLUMNS[4], NO_GROUP))
def sync_batch_norm(s):
    batches = [s.data(random(i, 8, 3, 4, 5)) for i in range(3)]  # before the first DTensor the refusal is MindSpore's
    cell = nn.SyncBatchNorm if s.mesh is not None else nn.BatchNorm2d  # the ranks that compute the reference have no group
    net = s.net(seeded(cell(3)))
    net.set_train()
    return [differentiated(net, x) for x in batches], values(net)


normed("nn.LayerNorm", lambda: nn.LayerNorm((6,)), 8, 4, 6)
normed("nn.LayerNorm on a sequence cut over tp", lambda: nn.LayerNorm((6,)), 8, 4, 6, lay="sequence")
normed("nn.GroupNorm", lambda: nn.GroupNorm(2, 6), 8, 6, 4, 3)
normed("mint.nn.GroupNorm", lambda: mint.nn.GroupNorm(2, 6), 8, 6, 4, 3)

normed("an RMSNorm written out", lambda: Built(  # MindSpore's kernel is for devices
    lambda c, x: x * mint.rsqrt(mint.mean(mint.square(x), -1, True) + 1e-6) * c.weight,
    weight=ms.Parameter(ms.Tensor(np.ones(6, np.float32)), name="weight")), 8, 4, 6, lay="sequence")


# -- layers ---------------------------------------------------------------------------------------------------------------
def layered(name, make, *shape, plan=None, **options):
    @row(LAYERS, name, **options)
    def program(s):
        return differentiated(s.net(seeded(make()), plan), s.data(random(1, *shape)))


layered("nn.Dense with an activation", lambda: nn.Dense(6, 8, activation="relu"), 8, 6, plan={"": COL})
layered("nn.Dense without bias, cut by rows", lambda: nn.Dense(8, 5, has_bias=False), 8, 8, plan={"": ROW})
layered("nn.Flatten, nn.Dense", lambda: nn.SequentialCell(nn.Flatten(), nn.Dense(12, 5)), 8, 3, 4)
layered("nn.Conv1d", lambda: nn.Conv1d(3, 4, 3, has_bias=True), 8, 3, 9)
layered("nn.Conv2d", lambda: nn.Conv2d(3, 4, 3, stride=2, has_bias=True), 8, 3, 7, 6)
layered("nn.Conv2d(pad_mode='pad', group=3, dilation=2)", lambda: nn.Conv2d(3, 6, 3, pad_mode="pad", padding=2, dilation=2,
                                                                           group=3), 8, 3, 7, 6)
layered("nn.Conv2dTranspose", lambda: nn.Conv2dTranspose(3, 4, 3, stride=2, has_bias=True), 8, 3, 5, 4)
layered("nn.Conv3d", lambda: nn.Conv3d(2, 3, 2, has_bias=True), 4, 2, 4, 3, 4)
layered("nn.MaxPool1d, nn.AvgPool1d", lambda: nn.SequentialCell(nn.MaxPool1d(2, 1), nn.AvgPool1d(2, 2)), 8, 3, 9)
layered("nn.MaxPool2d, nn.AvgPool2d", lambda: nn.SequentialCell(nn.MaxPool2d(2, 1), nn.AvgPool2d(2, 2)), 8, 3, 7, 6)
layered("nn.AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d((2, 3)), 8, 3, 7, 6)
layered("nn.AdaptiveMaxPool2d", lambda: nn.AdaptiveMaxPool2d((2, 3)), 8, 3, 7, 6)
layered("nn.ConstantPad2d", lambda: nn.ConstantPad2d(1, 0.5), 8, 3, 5, 4)
layered("nn.ReflectionPad2d", lambda: nn.ReflectionPad2d(1), 8, 3, 5, 4, refused=NO_RULE)
layered("nn.PixelShuffle", lambda: nn.PixelShuffle(2), 8, 4, 3, 2)
layered("nn.Upsample", lambda: nn.Upsample(scale_factor=2.0, mode="nearest", recompute_scale_factor=True), 8, 3, 4, 5)
layered("mint.nn.Linear, mint.nn.ReLU", lambda: nn.SequentialCell(
    mint.nn.Linear(6, 8), mint.nn.ReLU(), mint.nn.Linear(8, 5)), 8, 6, plan={"0": COL, "2": ROW})

ACTIVATIONS = ("CELU", "ELU", "GELU", "HShrink", "HSigmoid", "HSwish", "Hardtanh", "LeakyReLU", "LogSigmoid", "LogSoftmax",
               "Mish", "PReLU", "ReLU", "ReLU6", "SeLU", "SiLU", "Sigmoid", "SoftShrink", "Softmax", "Softsign", "Tanh")


@row(LAYERS, "activation cells: " + ", ".join(ACTIVATIONS))
def activations(s):
    x = s.data(random(1, 8, 6))
    return {a: differentiated(s.net(getattr(nn, a)()), x) for a in ACTIVATIONS}


def embedded(name, make, plan):
    @row(LAYERS, name)
    def program(s):
        net, x = s.net(seeded(make()), plan), s.data(ids(1, 10, 8, 5))
        return ms.value_and_grad(lambda x: (net(x) ** 2).sum(), None, net.trainable_params())(x)


embedded("nn.Embedding, its rows cut", lambda: nn.Embedding(10, 8), {"": RowwiseParallel(use_local_output=False)})
embedded("nn.Embedding, its columns cut", lambda: nn.Embedding(10, 8), {"": COL})
embedded("nn.Embedding(padding_idx), use_one_hot", lambda: nn.Embedding(10, 8, use_one_hot=True, padding_idx=2), None)


class Nested(nn.Cell):
    """All containers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.SequentialCell(nn.Dense(7, 12), nn.GELU(), nn.Dense(12, 7))
        self.blocks = nn.CellList([nn.Dense(7, 7) for _ in range(3)])
        self.heads = nn.CellDict({"a": nn.Dense(7, 5), "b": nn.Dense(7, 5)})

    def construct(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + ops.tanh(block(x))
        return sum(head(x) for head in self.heads.values())


@row(LAYERS, "nn.SequentialCell, nn.CellList, nn.CellDict, patterns in plans")
def containers(s):
    net = s.net(seeded(Nested()), {"stem.0": COL, "stem.2": ROW, "blocks.*": COL, "heads.*": COL})
    net.blocks.append(net.blocks[0])
    return differentiated(net, s.data(random(1, 8, 7)))


# -- dropout: numbers of one mesh are those of any other --------------------------------------------------------------------
def dropped(name, make):
    @row(LAYERS, name + ", one global mask on every mesh")
    def program(s):
        ms.set_seed(3)
        x, cell = drawn(s), make().set_train()
        out, grad = ms.value_and_grad(lambda x: (cell(x) ** 2).sum())(x)
        ms.set_seed(3)
        return out.full_tensor(), grad.full_tensor(), cell(x).full_tensor(), cell.set_train(False)(x).full_tensor()


dropped("nn.Dropout", lambda: nn.Dropout(p=0.4))
dropped("mint.nn.Dropout", lambda: mint.nn.Dropout(p=0.4))


# -- losses ---------------------------------------------------------------------------------------------------------------
def lost(name, make, second, *more, first=None, **options):
    """Forward and gradient with plain reductions; `second` and `more` are the arrays beside the first input."""
    def program(s):
        loss = s.net(make())
        arrays = [random(1, 8, 5) if first is None else first, second, *more]
        return differentiated(loss, *(s.data(a) for a in arrays), at=(0,))
    row(LOSSES, name, **options)(program)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


TARGET, LABELS = random(2, 8, 5), ids(3, 5, 8)
SHARE = np.exp(TARGET) / np.exp(TARGET).sum(-1, keepdims=True)
SIGNS = np.sign(random(4, 8)).astype(np.int32)
for _reduction in ("mean", "sum", "none"):
    lost(f"nn.MSELoss({_reduction!r})", lambda r=_reduction: nn.MSELoss(r), TARGET)
    lost(f"nn.CrossEntropyLoss({_reduction!r})", lambda r=_reduction: nn.CrossEntropyLoss(reduction=r), LABELS)
lost("nn.CrossEntropyLoss of shares", lambda: nn.CrossEntropyLoss(), SHARE)
lost("nn.CrossEntropyLoss of images", lambda: nn.CrossEntropyLoss(), ids(3, 5, 8, 3, 2), first=random(1, 8, 5, 3, 2))
lost("nn.SoftmaxCrossEntropyWithLogits(sparse=True)", lambda: nn.SoftmaxCrossEntropyWithLogits(True, "mean"), LABELS)
lost("nn.SoftmaxCrossEntropyWithLogits", lambda: nn.SoftmaxCrossEntropyWithLogits(reduction="sum"), SHARE)
lost("nn.NLLLoss", lambda: nn.NLLLoss(), LABELS, first=np.log(SHARE))
lost("nn.L1Loss", lambda: nn.L1Loss(), TARGET)
lost("nn.MAELoss", lambda: nn.MAELoss(), TARGET)
lost("nn.RMSELoss", lambda: nn.RMSELoss(), TARGET)
lost("nn.SmoothL1Loss", lambda: nn.SmoothL1Loss(0.7), TARGET)
lost("nn.SmoothL1Loss('mean')", lambda: nn.SmoothL1Loss(0.7, "mean"), TARGET)
lost("nn.HuberLoss", lambda: nn.HuberLoss(delta=0.7), TARGET)
lost("nn.BCELoss", lambda: nn.BCELoss(reduction="none"), sigmoid(TARGET), first=sigmoid(random(1, 8, 5)))
lost("nn.BCEWithLogitsLoss", lambda: nn.BCEWithLogitsLoss(reduction="sum"), sigmoid(TARGET))
lost("nn.KLDivLoss('batchmean')", lambda: nn.KLDivLoss("batchmean"), SHARE)
lost("nn.KLDivLoss('mean')", lambda: nn.KLDivLoss("mean"), SHARE)
lost("nn.PoissonNLLLoss", lambda: nn.PoissonNLLLoss(), np.exp(TARGET))
lost("nn.GaussianNLLLoss", lambda: nn.GaussianNLLLoss(), TARGET, np.exp(random(5, 8, 5)))
lost("nn.HingeEmbeddingLoss", lambda: nn.HingeEmbeddingLoss(), np.sign(TARGET))
lost("nn.CosineEmbeddingLoss", lambda: nn.CosineEmbeddingLoss(0.1), random(6, 8, 5), SIGNS)
lost("nn.MarginRankingLoss", lambda: nn.MarginRankingLoss(0.1), TARGET, np.sign(random(4, 8, 5)))
lost("nn.MultiLabelSoftMarginLoss", lambda: nn.MultiLabelSoftMarginLoss(), (TARGET > 0).astype(np.float32))
lost("nn.MultiMarginLoss", lambda: nn.MultiMarginLoss(), ids(3, 5, 8).astype(np.int64), refused=NO_RULE)


@row(LOSSES, "nn.CrossEntropyLoss(weight, ignore_index, label_smoothing)")
def weighted_cross_entropy(s):
    weight = s.whole(np.arange(1, 6, dtype=np.float32))
    loss = nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1)
    return differentiated(loss, s.data(random(1, 8, 5)), s.data(LABELS))


lost("nn.DiceLoss", lambda: nn.DiceLoss(), sigmoid(TARGET), first=sigmoid(random(1, 8, 5)))
lost("nn.FocalLoss", lambda: nn.FocalLoss(), ids(3, 5, 8, 1))
lost("nn.MultiClassDiceLoss", lambda: nn.MultiClassDiceLoss(), sigmoid(TARGET), first=sigmoid(random(1, 8, 5)))
