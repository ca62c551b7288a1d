"""The engine of several stages, whose workers are all this process here."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tests.support.compare import difference
from tests.support.local_coordinator import NoPause
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import EmbeddingRule
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.model_parallel.engine import ModelParallelEngine
from tfdist_cli.train.engine.model_parallel.stages import place_layers
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep
from tfdist_cli.train.optimizers.apply import innermost
from tfdist_cli.train.optimizers.registry import FusedUpdate
from tfdist_cli.train.trainer.evaluate import Watch
from tfdist_cli.train.variables import stages as module
from tfdist_cli.train.variables.placement import PlacementRules
from tfdist_cli.train.variables.stages import Stages


def classes():
    numbers = np.random.default_rng(0)
    return numbers.random((64, 8), np.float32), numbers.integers(0, 4, 64)


def batches(x, y, *, batch):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)


def data_of(batch):
    x, y = classes()
    return batches(x, y, batch=batch)


def network(*more):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    dense = keras.layers.Dense(8, "tanh")
    hidden = dense(dense(keras.layers.Dense(8, "relu")(inputs)))
    for layer in more:
        hidden = layer(hidden)
    model = keras.Model(inputs, keras.layers.Dense(4)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


@pytest.fixture
def engine(monkeypatch):
    """Makes the engine of a model on some workers."""
    device = tf.config.list_logical_devices("CPU")[0].name
    monkeypatch.setattr(module, "CHIEF_DEVICE", device)
    monkeypatch.setattr(module, "_device", lambda _: device)

    def of(build, *, batch, workers=4, micro_batches=2, data=data_of, **rules):
        strategy = tf.distribute.OneDeviceStrategy(device)
        stages = Stages(strategy, workers)
        stages.set_rules(PlacementRules(stages=2))
        spec = data(batch).element_spec
        with strategy.scope():
            step = ModelStep(build())
            step.build(spec)
            place_layers(stages, step.model)
            own = Rules(micro_batches=micro_batches, **rules)
            return ModelParallelEngine(step, strategy, stages, spec, own), step.model

    return of


@pytest.mark.slow
def test_replicas_and_micro_batches_make_the_update_of_the_whole_batch(engine):
    made, model = engine(network, batch=4)
    x, y = classes()
    plain = network()
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    made.open(lambda _: batches(x, y, batch=4), share="split", step=0, batches=0)
    steps = len(x) // 8
    executions = list(made.run(steps, first=0, size=2, adapts=False, pause=NoPause()))
    assert sum(len(each.losses) for each in executions) == steps
    assert sum(each.examples["chief:0"] for each in executions) == len(x)
    assert difference(plain.variables, model.variables) < 1e-6
    assert difference(plain.optimizer.variables, model.optimizer.variables) < 1e-6
    scored = made.evaluate(lambda _: batches(x, y, batch=16), steps=None, watch=Watch(None, reports=False)).logs()
    assert scored["loss"] == pytest.approx(plain.evaluate(x, y, verbose=0)[0], rel=1e-5)
    each_batch = [
        score() for score in made.test_steps(lambda _: batches(x, y, batch=16), steps=2, watch=Watch(2, reports=False))
    ]
    assert len(each_batch) == 2


class WithLog(keras.Model):
    """Reports a value of the last batch beside its metrics."""

    def train_step(self, data):
        return {**super().train_step(data), "sum": tf.reduce_sum(data[0])}


@pytest.mark.slow
def test_the_metrics_of_all_replicas_count_beside_a_log_of_the_model(engine):
    def build():
        model = network()
        own = WithLog(model.input, model.output)
        own.compile(keras.optimizers.SGD(0.1), model.loss, metrics=["accuracy"])
        return own

    made, _ = engine(build, batch=4, micro_batches=1)
    x, y = classes()
    expected = build().fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    made.open(lambda _: batches(x, y, batch=4), share="split", step=0, batches=0)
    totals = MetricTotals(made._step)
    for execution in made.run(len(x) // 8, first=0, size=2, adapts=False, pause=NoPause()):
        totals.add(execution.metrics)
    logs = totals.logs()
    assert logs["accuracy"] == pytest.approx(expected["accuracy"][0])
    assert logs["sum"] == pytest.approx(x[-4:].sum(), rel=1e-5), "that of the last batch of a replica"


@pytest.mark.slow
def test_each_example_of_a_partial_batch_weighs_as_in_keras(engine):
    """The last step has a batch of 12 and one of 4, with fewer examples than parts."""

    def data(batch):
        return tf.data.Dataset.from_tensor_slices(classes()).batch(batch)

    made, model = engine(network, batch=12, micro_batches=5, data=data)
    plain, means = network(), []
    told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: means.append(logs["loss"]))
    plain.fit(*classes(), batch_size=24, shuffle=False, verbose=0, callbacks=[told])
    made.open(lambda _: data(12), share="split", step=0, batches=0)
    executions = list(made.run(3, first=0, size=1, adapts=False, pause=NoPause()))
    sizes = [each.examples["chief:0"] for each in executions]
    assert sizes == [24, 24, 16]
    losses = [each.losses[0] for each in executions]
    np.testing.assert_allclose(np.cumsum(np.multiply(losses, sizes)) / np.cumsum(sizes), means, rtol=1e-5)
    assert difference(plain.variables, model.variables) < 1e-6
    assert difference(plain.optimizer.variables, model.optimizer.variables) < 1e-6
    totals = MetricTotals(made._step)
    for each in executions:
        totals.add(each.metrics)
    assert totals.logs()["accuracy"] == pytest.approx(plain.history.history["accuracy"][0])


IDS, TARGETS = np.random.default_rng(1).integers(0, 9, (32, 3)), np.arange(32.0)[:, None] / 32


def tables(optimizer):
    """A table that is looked up twice, with rows that occur several times in a batch and rows that never do."""
    keras.utils.set_random_seed(4)
    ids = keras.Input((3,), dtype="int32")
    table, other = keras.layers.Embedding(90, 4, name="table"), keras.layers.Embedding(80, 4, name="other")
    hidden = [keras.layers.Flatten()(each) for each in (table(ids), table(ids[:, :1]), other(ids))]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(hidden)))
    model.compile(optimizer, "mse")
    return model


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.0), True),
        (lambda: keras.optimizers.Adam(0.1, beta_2=0.99, global_clipnorm=0.5), False),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, beta_2=0.99), initial_scale=8.0),
            False,
        ),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=8.0), False),
    ],
    ids=["adagrad", "adam", "scaled adam", "scaled sgd"],
)
def test_a_row_that_occurs_several_times_is_updated_as_in_keras(engine, monkeypatch, make, rows):
    updated = []
    each = FusedUpdate.sparse_each

    def recorded(update, variable, *args):
        updated.append(variable.shape[0])
        return each(update, variable, *args)

    monkeypatch.setattr(FusedUpdate, "sparse_each", recorded)

    def data(batch):
        return tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(batch, drop_remainder=True)

    made, model = engine(lambda: tables(make()), batch=8, data=data, embeddings=EmbeddingRule(min_bytes=0))
    unscaled = innermost(make())  # Keras cannot scale rows
    unscaled.loss_scale_factor = None
    plain = tables(unscaled)
    plain.fit(IDS, TARGETS, batch_size=16, shuffle=False, verbose=0)
    made.open(lambda _: data(8), share="split", step=0, batches=0)
    list(made.run(2, first=0, size=2, adapts=False, pause=NoPause()))
    assert difference(plain.variables, model.variables) < 5e-6
    assert set(updated) == ({90, 80} if rows else set())
    assert made.evaluate(lambda _: data(8), steps=None, watch=Watch(None, reports=False)).logs()[
        "loss"
    ] == pytest.approx(plain.evaluate(IDS, TARGETS, verbose=0), rel=1e-4)


class Positions(keras.layers.Layer):
    """Adds the row of each position, which a larger batch looks up once, too."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(3, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]))


def positioned():
    keras.utils.set_random_seed(4)
    ids = keras.Input((3,), dtype="int32")
    hidden = Positions()(keras.layers.Embedding(9, 4)(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))
    model.compile(keras.optimizers.Adam(0.1, beta_2=0.99), "mse")
    return model


@pytest.mark.slow
def test_rows_of_positions_have_one_gradient_of_all_micro_batches(engine):
    def data(batch):
        return tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(batch, drop_remainder=True)

    made, model = engine(positioned, batch=8, data=data)
    plain = positioned()
    plain.fit(IDS, TARGETS, batch_size=16, shuffle=False, verbose=0)
    made.open(lambda _: data(8), share="split", step=0, batches=0)
    list(made.run(2, first=0, size=2, adapts=False, pause=NoPause()))
    assert difference(plain.variables, model.variables) < 5e-6


@pytest.mark.slow
def test_a_normalization_keeps_the_mean_of_the_replicas_statistics(engine):
    made, model = engine(lambda: network(keras.layers.BatchNormalization(momentum=0.5)), batch=4, micro_batches=1)
    x, y = classes()
    made.open(lambda _: batches(x, y, batch=4), share="split", step=0, batches=0)
    list(made.run(1, first=0, size=1, adapts=False, pause=NoPause()))
    layer = next(each for each in model.layers if isinstance(each, keras.layers.BatchNormalization))
    fresh = network(keras.layers.BatchNormalization(momentum=0.5))
    before = keras.Model(fresh.input, fresh.layers[-2].input)
    means = [np.asarray(before(x[start : start + 4])).mean(axis=0) for start in (0, 4)]
    np.testing.assert_allclose(layer.moving_mean, 0.5 * np.mean(means, axis=0), atol=1e-6)


@pytest.mark.parametrize(("workers", "micro_batches"), [(4, 1), (2, 2)], ids=["replicas", "micro-batches"])
def test_batches_of_a_stateful_layer_cannot_be_divided(engine, workers, micro_batches):
    def build():
        inputs = keras.Input(batch_shape=(4, 8))
        hidden = keras.layers.GRU(4, stateful=True)(keras.layers.Reshape((4, 2))(inputs))
        model = keras.Model(inputs, keras.layers.Dense(4)(hidden))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with raises(TrainingError, "stateful-layer-divided"):
        engine(build, batch=4, workers=workers, micro_batches=micro_batches)


def test_the_data_of_one_shard_is_read(engine):
    made, _ = engine(network, batch=4)
    shards = []

    def data(shard):
        shards.append(shard)
        return data_of(4)

    made.open(data, share="split", step=3, batches=6)
    assert shards == [Shard(step=6)]
    assert made.sharers == 2
