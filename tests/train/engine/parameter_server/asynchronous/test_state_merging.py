"""State of asynchronous workers: moving statistics contain the steps of all of them, sums all terms."""

import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.compare import batches, classifier
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.parameter_server.asynchronous.state_merging import merge_state
from tfdist_cli.train.engine.parameter_server.asynchronous.unrolled import UnrolledFunctions

START = [1.0, -3.0, 0.3]


class Kept:
    """A state variable, and executions that have read it at the same time.

    Args:
        rate: the part of the old value that a step retains.
        value: its value.
        dtype: its type.
    """

    def __init__(self, rate, value, dtype="float32"):
        self.variable = keras.Variable(value, dtype=dtype, trainable=False)
        self.before = tf.constant(self.value)
        self.context = SimpleNamespace(assigned={0: rate}, step=SimpleNamespace(state=[self.variable]))
        self.merge = tf.function(
            lambda new, steps: merge_state(self.context, [self.before], [new], steps),
            input_signature=[tf.TensorSpec(self.before.shape, dtype), tf.TensorSpec([], tf.int64)],
        )

    @property
    def value(self):
        return self.variable.numpy()


def moved(value, momentum, targets):
    """A moving average after some steps of Keras."""
    for target in targets:
        value = np.float32(momentum) * value + np.float32(1 - momentum) * np.float32(target)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.9, 1.0])
def test_an_execution_that_nobody_interferes_with_leaves_exactly_its_value(rate):
    kept = Kept(rate, START)
    new = moved(kept.value, 0.9, np.random.default_rng(0).random((7, 3)))
    kept.merge(new, 7)
    assert kept.value.tolist() == new.tolist()


def test_moving_averages_of_executions_at_the_same_time_contain_the_steps_of_all():
    targets = np.random.default_rng(0).random((6, 20, 3)).astype(np.float32)
    kept = Kept(0.99, START)
    for own in targets:
        kept.merge(moved(kept.before.numpy(), 0.99, own), 20)
    np.testing.assert_allclose(kept.value, moved(np.float32(START), 0.99, targets.reshape(-1, 3)), rtol=1e-5)


@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.999])
def test_a_moving_average_never_passes_its_target(momentum):
    kept, workers, steps = Kept(momentum, 1.0), 64, 20
    own = moved(kept.before.numpy(), momentum, [0.0] * steps)  # 64 changes like this one would lead far below 0
    for done in range(1, workers + 1):
        kept.merge(own, steps)
        assert kept.value == pytest.approx(momentum ** (done * steps), abs=1e-5)
        assert -1e-7 < kept.value < 1


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_sums_of_all_executions_are_added_up_by_threads_too(dtype):
    kept = Kept(1.0, [5, 7], dtype)
    kept.merge.get_concrete_function()

    def count():
        for _ in range(20):
            kept.merge(kept.before + tf.constant([1, 3], dtype), 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.value.tolist() == [5 + 80, 7 + 240]


@pytest.mark.parametrize(("dtype", "values"), [("float32", [2.0, 4.0]), ("bool", [True, False])])
def test_of_other_values_the_last_one_remains(dtype, values):
    kept = Kept(0.0, values[0], dtype)
    for value in values:
        kept.merge(tf.constant(value), 3)
    assert kept.value == values[-1]


class Keeping(keras.layers.Layer):
    """Keeps a moving average of ones, and counts batches."""

    def build(self, shape):
        del shape
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False, name="average")
        self.count = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="count")

    def call(self, x, training=False):
        if training:
            self.average.assign(0.9 * self.average + 0.1 * keras.ops.ones(()))
            self.count.assign_add(1)
        return x


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("updates", [Updates(), Updates(push_every=2), Updates(local_steps=2)])
@pytest.mark.parametrize("unrolled", [False, True])
def test_the_state_of_two_workers_contains_all_steps(updates, unrolled, servers, monkeypatch):
    build = lambda: classifier(Keeping())  # noqa: E731 called within the scope
    monkeypatch.setattr(UnrolledFunctions, "is_ready", lambda *_, **__: unrolled)
    engine, model = local_engine(monkeypatch, servers(2), build, batches().repeat(), Rules(updates=updates))
    list(engine.run(40, first=0, size=4, adapts=True, pause=NoPause()))
    layer = next(layer for layer in model.layers if isinstance(layer, Keeping))
    assert int(layer.count) == 40
    assert float(layer.average) == pytest.approx(1 - 0.9**40, rel=1e-5)
