"""Layers are measured one by one, and stages get about equal times."""

from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.model_parallel import layer_times
from tfdist_cli.train.engine.model_parallel import stages as module
from tfdist_cli.train.engine.model_parallel.stages import divided, measured_times, place_layers, times_of_layers
from tfdist_cli.train.model.stages import layers_in_order
from tfdist_cli.train.variables import stages as variables
from tfdist_cli.train.variables.placement import PlacementRules
from tfdist_cli.train.variables.stages import Stages

BATCH = (np.ones((64, 256), np.float32), np.zeros(64, np.int32))


class Slow(layers.Layer):
    """A layer with few weights and most of the work."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))
        super().build(shape)

    def call(self, x):
        for _ in range(50):
            x = keras.ops.tanh(x @ self.kernel)
        return x


def network():
    keras.utils.set_random_seed(3)
    slow = keras.Sequential([keras.Input((256,)), Slow(name="slow"), layers.Dropout(0.5), Slow(name="slow_too")])
    inputs = keras.Input((256,))
    hidden = layers.BatchNormalization(name="norm")(layers.Dense(1024, name="wide")(inputs))
    return keras.Model(inputs, layers.Dense(4, name="last")(slow(layers.Dense(256, name="narrow")(hidden))))


def stage_of(model, times):
    return {layer.name: stage for layer, stage in divided(layers_in_order(model), None, 2, times)}


@pytest.mark.slow
def test_stages_have_about_equal_times_or_bytes():
    model = network()
    times = measured_times(model, tuple(map(tf.constant, BATCH)), micro_batches=2)
    seconds = {each.layer.name: times[id(each.layer)] for each in layers_in_order(model) if id(each.layer) in times}
    slow = {"slow", "slow_too"}
    assert min(seconds[name] for name in slow) > max(value for name, value in seconds.items() if name not in slow)
    names = ["wide", "narrow", "slow", "slow_too"]
    by_time, by_bytes = stage_of(model, times), stage_of(model, None)
    assert [by_time[name] for name in names] == [0, 0, 0, 1]
    assert [by_bytes[name] for name in names] == [0, 1, 1, 1]


@pytest.mark.slow
def test_the_state_of_a_model_stays():
    model = network()
    before = [np.array(variable) for variable in model.variables]
    measured_times(model, tuple(map(tf.constant, BATCH)), micro_batches=1)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_a_layer_counts_at_each_of_its_calls(monkeypatch):
    monkeypatch.setattr(layer_times, "_seconds", lambda f: 0.5 if f._python_function.__name__ == "nothing" else 1.5)
    inputs = keras.Input((4,))
    tied, once = layers.Dense(4), layers.Dense(4)
    model = keras.Model(inputs, once(tied(tied(inputs))))
    times = measured_times(model, (tf.ones((2, 4)),), micro_batches=1)
    assert (times[id(tied)], times[id(once)]) == (2.0, 1.0)


@pytest.mark.slow
def test_layers_of_integers_strings_and_masks_are_measured():
    words = keras.Input((6,), dtype="string")
    ids = layers.StringLookup(vocabulary=["a", "b"])(words)
    hidden = layers.LSTM(4)(layers.Embedding(8, 4, mask_zero=True)(ids))
    model = keras.Model(words, layers.Dense(1)(hidden))
    assert len(measured_times(model, (tf.fill([4, 6], "a"),), micro_batches=2)) == 4


def test_a_model_that_cannot_be_called_with_the_inputs_is_refused():
    with raises(TrainingError, "layers-not-measured") as caught:
        measured_times(network(), (tf.ones((2, 3)),), micro_batches=1)
    assert "(2, 3)" in caught.value.message


@pytest.mark.parametrize("in_a_kernel", [False, True])
def test_a_layer_that_fails_is_named_with_its_error(in_a_kernel):
    class Odd(layers.Layer):
        def call(self, x):
            if not x.shape[0]:
                return x
            if in_a_kernel:
                return tf.debugging.check_numerics(x / 0.0, "odd values")
            raise ValueError("odd values\nand more")

    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="first"), Odd(name="odd")])
    with raises(TrainingError, "layers-not-measured") as caught:
        measured_times(model, (tf.ones((2, 8)),), micro_batches=1)
    assert "'odd'" in caught.value.message
    assert "odd values" in caught.value.message.splitlines()[0]
    assert len(caught.value.message.splitlines()) == 1


@pytest.mark.parametrize(("balance", "count"), [("time", 1), ("bytes", 0)])
@pytest.mark.slow
def test_layers_are_measured_once_and_only_for_their_times(monkeypatch, caplog, balance, count):
    device = tf.config.list_logical_devices("CPU")[0].name
    monkeypatch.setattr(variables, "CHIEF_DEVICE", device)
    monkeypatch.setattr(variables, "_device", lambda _: device)
    counted = Mock(wraps=module.measured_times)
    monkeypatch.setattr(module, "measured_times", counted)
    strategy = tf.distribute.OneDeviceStrategy(device)
    stages = Stages(strategy, 2)
    stages.set_rules(PlacementRules(stages=2, balance=balance))
    with strategy.scope():
        model = network()
        times = times_of_layers(stages, model, lambda _: tf.data.Dataset.from_tensors(BATCH), 2)
        with caplog.at_level("INFO", "tfdist"):
            place_layers(stages, model, times)
            place_layers(stages, model, times)
    assert counted.call_count == count
    slow = next(stage for layer, stage in stages.assigned if layer.name == "slow")
    assert slow == (balance == "bytes")
    assert len(caplog.records) == 2 * count
