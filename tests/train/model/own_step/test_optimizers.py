"""A `train_step` of the model's own, in one process and on parameter servers that are this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import assert_same, difference, train_both
from tests.support.local_coordinator import NoPause, local_engine
from tests.support.programs.own_steps import (
    CASES,
    CLASSES,
    NOISE,
    SIZE,
    Own,
    X,
    Y,
    averaged,
    gan,
    optimizer_variables,
    own,
)
from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.model.own_step.optimizers import optimizers_of
from tfdist_cli.train.model.train_step import ModelStep

NORMALIZED = (lambda: own(layers.BatchNormalization(), layers.Dropout(0.3, seed=3)), (X, Y))


class Clipped(Own):
    """Keeps its weights small after each update."""

    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(keras.ops.clip(weight, -0.3, 0.3))
        return logs


def clipped():
    """A compiled classifier whose weights are clipped after each update."""
    inputs = keras.Input((SIZE,))
    model = Clipped(inputs, layers.Dense(CLASSES)(inputs))
    model.compile(keras.optimizers.Adam(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


TRAINED = {
    **CASES,
    "clipped": (clipped, (X, Y)),
    "normalized": NORMALIZED,
    "drawing gan": (lambda: gan(draws=True), (X, NOISE)),
}


def batches(arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(16)


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("case", TRAINED)
def test_one_process_equals_keras(case):
    build, arrays = TRAINED[case]
    validation = batches(arrays) if case in ("distiller", "own", "normalized") else None
    keras.utils.set_random_seed(7)
    plain = build()
    plain.fit(batches(arrays), epochs=2, verbose=0, validation_data=validation)
    keras.utils.set_random_seed(7)
    ours = build()
    tfdist.fit(ours, batches(arrays), epochs=2, validation_data=validation, steps_per_execution=3)
    assert difference(plain.variables, ours.variables) < 1e-5
    assert difference(optimizer_variables(plain), optimizer_variables(ours)) < 1e-5
    assert plain.history.history.keys() == ours.history.history.keys()
    for name, values in plain.history.history.items():
        np.testing.assert_allclose(ours.history.history[name], values, rtol=2e-5, err_msg=name)


class Remembering(keras.Model):
    """Has no targets but its own inputs, is called with more than these, and remembers the last ones in a queue."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(SIZE)
        self.queue = self.add_weight(shape=(20, SIZE), initializer="zeros", trainable=False, name="queue")

    def call(self, pair):
        remembered, x = pair
        return self.dense(x) - tf.reduce_mean(remembered, axis=0)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            y_pred = self([tf.convert_to_tensor(self.queue), x], training=True)
            loss = self.compute_loss(y=x, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.queue.assign(tf.concat([x, self.queue[: -tf.shape(x)[0]]], axis=0))
        return self.compute_metrics(None, x, y_pred)


def remembering():
    model = Remembering()
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_a_step_may_make_its_targets_and_the_inputs_that_it_calls_the_model_with():
    assert_same(*train_both(remembering, batches(X)))


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("case", ["gan", "critic_gan", "distiller", "averaged"])
@pytest.mark.parametrize("optimized", [True, False])
def test_one_asynchronous_worker_equals_keras(case, optimized, servers, monkeypatch):
    build, arrays = CASES[case]
    data = batches(arrays)
    keras.utils.set_random_seed(7)
    plain = build()
    plain.fit(data, epochs=1, verbose=0)
    keras.utils.set_random_seed(7)
    engine, ours = local_engine(
        monkeypatch, servers(2), build, data, Rules(optimized=optimized, embeddings=None), workers=1
    )
    size, done = 2 if optimized else 1, []
    for first in range(0, 6, size):  # one execution at a time: this coordinator runs those in flight in threads
        done += engine.run(size, first=first, size=size, adapts=False, pause=NoPause())
    assert difference(plain.variables, ours.variables) < 1e-5
    assert difference(optimizer_variables(plain), optimizer_variables(ours)) < 1e-5
    assert all(np.isfinite(execution.losses).all() for execution in done)
    assert sum(len(execution.losses) for execution in done) == 6


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize(("case", "size"), [("gan", 1), ("critic_gan", 2), ("spectral_gan", 2)])
def test_synchronous_workers_make_each_update_together(case, size, servers, monkeypatch):
    """Two workers with the same batches train as one process does."""
    build, arrays = CASES[case]
    data = batches(arrays)
    keras.utils.set_random_seed(7)
    plain = build()
    plain.fit(data, epochs=1, verbose=0)
    keras.utils.set_random_seed(7)
    engine, ours = local_engine(monkeypatch, servers(2), build, data, Rules(Updates(mode="sync"), embeddings=None))
    executions = list(engine.run(6, first=0, size=size, adapts=False, pause=NoPause()))
    assert sum(len(each.losses) for each in executions) == 6
    assert difference(plain.variables, ours.variables) < 1e-5
    assert difference(optimizer_variables(plain), optimizer_variables(ours)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "updates",
    [
        {"mode": "sync", "aggregate": 1},
        {"mode": "bounded", "staleness": 1},
        {"push_every": 2},
        {"local_steps": 2},
        {"prefetch": True},
        {"delay_compensation": 0.1},
    ],
)
def test_several_updates_in_a_step_are_refused_where_updates_are_combined(updates, servers, monkeypatch):
    with raises(TrainingError, "several-updates-in-a-step"):
        local_engine(monkeypatch, servers(1), gan, batches((X, NOISE)), Rules(Updates(**updates)))


def step_of(build, arrays=(X, Y)):
    step = ModelStep(build())
    step.build(batches(arrays).element_spec)
    return step


@pytest.mark.slow
def test_only_what_the_step_updates_is_a_parameter():
    step = step_of(averaged)
    assert [each.path for each in step.parameters] == [each.path for each in step.model.network.weights]
    assert {id(each) for each in step.model.target.weights} <= {id(each) for each in step.state}
    assert step.updates_within  # it reads the network's weights after the update
    assert not step_of(own).updates_within
    built = step_of(gan, (X, NOISE))
    assert built.updates_within
    assert not built.model.optimizer.built
    assert built.optimizers == [built.model.optimizer, built.model.d_optimizer, built.model.g_optimizer]


def test_optimizers_are_found_in_lists_and_dictionaries():
    model = own()
    first, second = keras.optimizers.SGD(), keras.optimizers.SGD()
    model.several = [first, {"second": second, "compiled": model.optimizer}]
    assert optimizers_of(model) == [model.optimizer, first, second]


def faulty(step):
    """A function that makes a model whose train_step calls `step(model, loss, gradients)`, and returns its logs."""

    class Faulty(Own):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            return step(self, loss, tape.gradient(loss, self.trainable_weights))

    def build():
        inputs = keras.Input((SIZE,))
        model = Faulty(inputs, layers.Dense(CLASSES)(inputs))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


def applied(model, gradients):
    model.optimizer.apply(gradients, model.trainable_weights)


def in_a_condition(model, loss, gradients):
    tf.cond(loss > 0, lambda: applied(model, gradients) or 0, lambda: 0)
    return {"loss": loss}


def logs_under_another_name(model, loss, gradients):
    applied(model, gradients)
    model.metrics[0].update_state(loss)
    return {"error": model.metrics[0].result()}


FAULTS = {
    "update-in-condition": in_a_condition,
    "no-updates": lambda model, loss, gradients: {"loss": loss},
    "no-gradients": lambda model, loss, gradients: applied(model, [None, None]) or {"loss": loss},
    "gradient-lost": lambda model, loss, gradients: (
        applied(model, gradients) or applied(model, [gradients[0], None]) or {"loss": loss}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("code", FAULTS)
def test_what_has_no_exact_meaning_is_refused(code):
    with raises(TrainingError, code):
        step_of(faulty(FAULTS[code]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "logs", [logs_under_another_name, lambda model, loss, gradients: applied(model, gradients) or loss]
)
def test_logs_that_cannot_be_exact_are_refused(logs):
    with raises(TrainingError, "logs-not-exact"):
        step_of(faulty(logs))


@pytest.mark.slow
def test_xla_is_refused_for_several_updates():
    with raises(TrainingError, "xla-cannot-compile"):
        tfdist.fit(gan(), batches((X, NOISE)), jit=True)
