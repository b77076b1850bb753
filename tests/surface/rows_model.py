# SPDX-License-Identifier: Apache-2.0
"""`Model` with datasets sharded over "dp": plain inputs and labels, callbacks, every metric."""
import contextlib
import io
import os
import re
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    History,
    LambdaCallback,
    LearningRateScheduler,
    LossMonitor,
    Model,
    ModelCheckpoint,
    ReduceLROnPlateau,
    SummaryCollector,
    TimeMonitor,
    summary_pb2,
)
from mindspore.train import metrics as stock

import ms_dtensor as md
from ms_dtensor import PrepareModuleInput, Replicate
from tests.operands import Built
from tests.surface.table import random, row, shared_path, values

MODEL, CALLBACKS, METRICS, DATA = "Model", "callbacks", "metrics", "datasets"
DENSE = {"label": random(22, 16, 4, 5)}
CLASSES = {"label": np.random.default_rng(23).integers(0, 5, 16).astype(np.int32)}
X = random(21, 16, 4, 7)


def shards(s) -> dict:
    if s.dp is None:
        return {"num_shards": 1, "shard_id": 0}
    return {"num_shards": s.dp.size(), "shard_id": s.dp.get_local_rank()}


def dataset(s, columns: dict | None = None, **kwargs):
    """16 rows in global batches of 8; each coordinate of "dp" reads its share."""
    columns, of = {"data": X, **(columns or DENSE)}, shards(s)
    return ds.NumpySlicesDataset(columns, **(kwargs or {"shuffle": False, **of})).batch(8 // of["num_shards"])


def fed(s, cell: nn.Cell, inputs: int = 2) -> nn.Cell:
    """The cell takes plain tensors: this rank's rows where there is "dp", else the same on every rank."""
    if s.mesh is None:
        return cell
    if s.column.startswith("fsdp"):
        return cell if hasattr(cell, "unshard") else md.fully_shard(cell, mesh=s.dp)
    if s.dp is not None:
        return md.replicate(cell, mesh=s.dp)
    return md.parallelize_module(cell, s.tp, PrepareModuleInput(
        input_layouts=(Replicate(),) * inputs, desired_input_layouts=(Replicate(),) * inputs))


def model(s, metrics=None, pooled=False, **kwargs) -> Model:
    """A model whose data and labels come out of a dataset as plain tensors."""
    net = s.net()
    if s.mesh is not None and s.dp is None:
        net = fed(s, net, 1)
    net = Built(lambda c, x: c.net(x).mean(1), net=net) if pooled else net  # logits [batch, 5]
    loss = fed(s, nn.CrossEntropyLoss() if pooled else nn.MSELoss())
    optimizer = nn.Momentum(net.trainable_params(), kwargs.pop("lr", 2e-2), 0.9)
    return Model(net, loss, optimizer, metrics, **kwargs)


class Losses(Callback):
    """What a callback of one's own reads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_step_end(self, run_context):
        self.seen.append(float(run_context.original_args().net_outputs.asnumpy()))


def weights(m: Model) -> dict:
    return values(m._network)


# -- Model ----------------------------------------------------------------------------------------------------------------
@row(MODEL, "train")
def train(s):
    m, losses = model(s), Losses()
    m.train(3, dataset(s), callbacks=losses, dataset_sink_mode=False)
    return losses.seen, weights(m)


@row(MODEL, "train of a loss cell replicated as a whole")
def train_whole(s):
    net = nn.WithLossCell(s.net(), nn.MSELoss())
    m = Model(fed(s, net), optimizer=nn.Adam(net.trainable_params(), 1e-2))
    m.train(2, dataset(s), dataset_sink_mode=False)
    return weights(m)


@row(MODEL, "eval")
def evaluate(s):
    got = model(s, {"loss", "mse", "mae"}).eval(dataset(s), dataset_sink_mode=False)
    return dict(sorted(got.items()))  # a set has another order on every rank


@row(MODEL, "eval with eval_network and eval_indexes")
def evaluate_network(s, net):
    loss = nn.MSELoss()
    m = Model(net, metrics={"mae": nn.MAE(), "loss": nn.Loss()}, eval_network=fed(s, nn.WithEvalCell(net, loss)),
              eval_indexes=[0, 1, 2])
    return m.eval(dataset(s), dataset_sink_mode=False)


@row(MODEL, "fit")
def fit(s):
    m, history = model(s, {"mse"}), History()
    m.fit(3, dataset(s), dataset(s), callbacks=history, dataset_sink_mode=False, valid_dataset_sink_mode=False)
    return history.epoch, weights(m)


@row(MODEL, "predict")
def predict(s):
    return model(s).predict(Tensor(s.mine(X[:8])))


@row(MODEL, "train, then eval, then predict")
def one_after_the_other(s):
    m = model(s, {"accuracy"}, pooled=True)
    m.train(2, dataset(s, CLASSES), dataset_sink_mode=False)
    return m.eval(dataset(s, CLASSES)), m.predict(Tensor(s.mine(X[:8]))), weights(m)


@row(MODEL, "train(amp_level=\"O3\")", rtol=4e-3)  # as in rows_amp
def train_half(s):
    m, losses = model(s, amp_level="O3"), Losses()
    m.train(2, dataset(s), callbacks=losses, dataset_sink_mode=False)
    return losses.seen


@row(MODEL, "train with a FixedLossScaleManager")
def train_scaled(s, net):
    if s.mesh is not None and s.dp is None:
        net = fed(s, net, 1)
    m = Model(net, fed(s, nn.MSELoss()), nn.Momentum(net.trainable_params(), 2e-2, 0.9, loss_scale=128.0),
              loss_scale_manager=ms.amp.FixedLossScaleManager(128.0, False))
    m.train(2, dataset(s), dataset_sink_mode=False)
    return weights(m)


@row(MODEL, "plain labels in a loop of one's own")
def labels_in_a_loop(s, net):
    loss_fn = fed(s, nn.MSELoss())
    if s.mesh is not None and s.dp is None:
        net = fed(s, net, 1)
    optimizer = nn.SGD(net.trainable_params(), 2e-2)
    grad_fn = ms.value_and_grad(lambda x, y: loss_fn(net(x), y), None, optimizer.parameters)
    losses = []
    for x, y in dataset(s).create_tuple_iterator():
        loss, grads = grad_fn(x, y)
        optimizer(grads)
        losses.append(loss)
    return losses, values(net)


# -- callbacks ------------------------------------------------------------------------------------------------------------
def printed(s, callbacks, epochs=2, **kwargs):
    """What a training prints, and the model."""
    m, out = model(s, **kwargs), io.StringIO()
    with contextlib.redirect_stdout(out):
        m.train(epochs, dataset(s), callbacks=callbacks, dataset_sink_mode=False)
    return out.getvalue(), m


@row(CALLBACKS, "LossMonitor")
def loss_monitor(s):
    text, _ = printed(s, LossMonitor())
    return re.sub(r"loss is .*", "", text), [float(x) for x in re.findall(r"loss is (.*)", text)]


@row(CALLBACKS, "TimeMonitor")
def time_monitor(s):
    text, m = printed(s, TimeMonitor())
    return re.sub(r"[0-9.]+ ms|total_tokens.*|[0-9.]+ [^ ]*ms", "", text).count("Train epoch time"), weights(m)


@row(CALLBACKS, "History")
def history(s):
    seen = History()
    printed(s, seen)
    return seen.epoch


@row(CALLBACKS, "LambdaCallback")
def lambda_callback(s):
    seen = []
    printed(s, LambdaCallback(on_train_step_end=lambda c: seen.append(c.original_args().net_outputs.asnumpy())))
    return seen


@row(CALLBACKS, "LearningRateScheduler")
def scheduler(s):
    text, m = printed(s, LearningRateScheduler(lambda lr, step: lr * 0.7), 3)
    return weights(m), m._optimizer.learning_rate.value()


def fitted(s, callback, epochs=4):
    m, seen, out = model(s, {"mse"}, lr=0.9), History(), io.StringIO()
    with contextlib.redirect_stdout(out):
        m.fit(epochs, dataset(s), dataset(s), callbacks=[callback, seen], dataset_sink_mode=False,
              valid_dataset_sink_mode=False)
    return seen.epoch, m


# steps so large that the loss grows: errors grow with it
@row(CALLBACKS, "EarlyStopping", rtol=1e-3)
def early_stopping(s):
    seen, m = fitted(s, EarlyStopping(monitor="mse", patience=1))
    return seen["epoch"], seen, weights(m)


@row(CALLBACKS, "ReduceLROnPlateau", rtol=1e-3)  # as above
def plateau(s):
    seen, m = fitted(s, ReduceLROnPlateau(monitor="mse", patience=1, min_delta=0.0))
    return seen, m._optimizer.learning_rate.value()


@row(CALLBACKS, "ModelCheckpoint")
def checkpoints(s):
    folder = Path(shared_path(s, "model_checkpoint"))  # the mesh's first rank writes for all, so all look in one place
    config = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=5)
    _, m = printed(s, ModelCheckpoint(prefix="net", directory=str(folder), config=config))
    files = sorted(p.name for p in folder.glob("*.ckpt"))
    return files, {k: v.value() for k, v in ms.load_checkpoint(str(folder / files[-1])).items()
                   if k in dict(m._network.parameters_and_names())}, weights(m)


def events(path: Path):
    """What a summary file tells, by step and tag: the numbers, and of a histogram its extremes, count and sum."""
    raw, at, told = path.read_bytes(), 0, {}
    while at < len(raw):
        size = int.from_bytes(raw[at:at + 8], "little")  # then 4 bytes of a checksum, and 4 behind the event
        event = summary_pb2.Event.FromString(raw[at + 12:at + 12 + size])
        at += 16 + size
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            if kind == "scalar_value":
                told[f"{event.step} {value.tag}"] = value.scalar_value
            elif kind == "histogram":
                told[f"{event.step} {value.tag}"] = [value.histogram.min, value.histogram.max, value.histogram.count,
                                                    value.histogram.sum]
    return dict(sorted(told.items()))


@row(CALLBACKS, "SummaryCollector")
def summary(s):
    folder = Path(shared_path(s, f"summary-{os.environ.get('RANK_ID')}"))
    wanted = {"collect_graph": False, "collect_metric": True, "collect_input_data": False, "histogram_regular": ".*"}
    _, m = printed(s, SummaryCollector(str(folder), collect_freq=1, collect_specified_data=wanted))
    return [events(p) for p in folder.glob("*.summary.*_MS")], weights(m)


# -- metrics --------------------------------------------------------------------------------------------------------------
def measured(metric, columns=None, pooled=True):
    """The metric over two batches of `Model.eval`."""
    def fn(s):
        m = model(s, {"it": metric()}, pooled)
        m.eval(dataset(s, columns or CLASSES), dataset_sink_mode=False)
        it = m._metric_fns["it"]
        return it.eval()
    return fn


for _name, _metric in (
        ("Accuracy", stock.Accuracy), ("Top1CategoricalAccuracy", stock.Top1CategoricalAccuracy),
        ("Top5CategoricalAccuracy", stock.Top5CategoricalAccuracy), ("Precision", stock.Precision), ("Recall", stock.Recall),
        ("F1", stock.F1), ("Loss", stock.Loss), ("Perplexity", lambda: stock.Perplexity()),
        ("TopKCategoricalAccuracy(3)", lambda: stock.TopKCategoricalAccuracy(3)), ("Fbeta(2)", lambda: stock.Fbeta(2.0)),
        ("ConfusionMatrix", lambda: stock.ConfusionMatrix(5))):
    row(METRICS, f"{_name}, in Model.eval")(measured(_metric))
for _name, _metric in (("MAE", stock.MAE), ("MSE", stock.MSE), ("Dice", lambda: stock.Dice())):
    row(METRICS, f"{_name}, in Model.eval")(measured(_metric, DENSE, False))


def updated(make, outputs, labels=None, read=lambda metric: metric.eval()):
    """The metric fed by hand with DTensors."""
    def fn(s):
        metric = make()
        metric.clear()
        for half in (slice(0, 8), slice(8, 16)):
            given = (outputs[half],) if labels is None else (outputs[half], labels[half])
            metric.update(*(s.data(a) for a in given))
        return read(metric)
    return fn


SCORES = np.abs(random(24, 16, 5)) / 9
ONE_HOT = np.eye(5, dtype=np.float32)[CLASSES["label"]]
BINARY = (random(25, 16) > 0).astype(np.int32)


def area(roc):
    fpr, tpr, thresholds = roc.eval()
    return fpr, tpr, thresholds, stock.auc(fpr, tpr)


for _name, _make, _a, _b, _read in (
        ("ROC and auc", lambda: stock.ROC(pos_label=1), SCORES[:, 0], BINARY, area),
        ("CosineSimilarity", lambda: stock.CosineSimilarity(), SCORES, None, lambda m: m.eval()),
        ("ConfusionMatrixMetric", lambda: stock.ConfusionMatrixMetric(metric_name="tpr", calculation_method=False),
         (SCORES > 0.1).astype(np.float32), ONE_HOT, lambda m: m.eval()),
        ("Accuracy(\"multilabel\")", lambda: stock.Accuracy("multilabel"), (SCORES > 0.1).astype(np.int32),
         ONE_HOT.astype(np.int32), lambda m: m.eval()),
        ("F1 of one-hot labels", lambda: stock.F1(), SCORES, ONE_HOT.astype(np.int32), lambda m: m.eval()),
        ("MSE", lambda: stock.MSE(), SCORES, ONE_HOT, lambda m: m.eval())):
    row(METRICS, f"{_name}, by hand")(updated(_make, _a, _b, _read))


class Documented(stock.Metric):
    """The metric of MindSpore's documentation, which reads tensors by itself."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.off, self.count = 0.0, 0

    def update(self, *inputs):
        out, label = inputs[0].asnumpy(), inputs[1].asnumpy()
        self.off += np.abs(label - out).sum()
        self.count += label.shape[0]

    def eval(self):
        return self.off / self.count


class Median(stock.Metric):
    """A metric of one's own, as the documentation writes them."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.off = []

    @stock.rearrange_inputs
    def update(self, *inputs):
        out, label = self._convert_data(inputs[0]), self._convert_data(inputs[1])
        self.off.append(np.median(np.abs(out - label)))

    def eval(self):
        return float(np.mean(self.off))


row(METRICS, "a metric of one's own that calls asnumpy(), in Model.eval")(measured(Documented, DENSE, False))
row(METRICS, "a metric of one's own, in Model.eval")(measured(Median, DENSE, False))
row(METRICS, "a metric of one's own with set_indexes, in Model.eval")(
    measured(lambda: Median().set_indexes([1, 0]), DENSE, False))


# -- datasets -------------------------------------------------------------------------------------------------------------
@row(DATA, "num_shards and shard_id from the mesh, from_local")
def sharded_rows(s, net):
    losses = []
    for data, label in dataset(s).create_tuple_iterator():
        if s.mesh is not None:
            data, label = (md.DTensor.from_local(t, s.mesh, {"dp": md.Shard(0)} if s.dp is not None else None)
                           for t in (data, label))
        losses.append(ms.value_and_grad(lambda x, y: ((net(x) - y) ** 2).mean(), None, net.trainable_params())(data, label))
    return losses


@row(DATA, "a GeneratorDataset with map and batch")
def generator(s):
    rows = [(X[i], DENSE["label"][i]) for i in range(16)]
    source = ds.GeneratorDataset(rows, ["data", "label"], shuffle=False, **shards(s))
    source = source.map(lambda x: x * 2 - 1, "data").batch(8 // shards(s)["num_shards"])
    m = model(s, {"mse"})
    m.train(2, source, dataset_sink_mode=False)
    return m.eval(source), weights(m)


@row(DATA, "DistributedSampler, shuffled alike by a seed")
def shuffled(s):
    ds.config.set_seed(7)
    m = model(s)
    m.train(2, dataset(s, sampler=ds.DistributedSampler(**shards(s), shuffle=True)), dataset_sink_mode=False)
    return weights(m)


@row(DATA, "create_dict_iterator, labels of classes")
def dictionaries(s, net):
    if s.mesh is not None and s.dp is None:
        net = fed(s, net, 1)
    loss_fn = fed(s, nn.CrossEntropyLoss(reduction="sum"))
    return [ms.grad(lambda b: loss_fn(net(b["data"]).mean(1), b["label"]), None, net.trainable_params())(batch)
            for batch in dataset(s, CLASSES).create_dict_iterator()]
