"""The learning rate of each update follows the table, and an engine trains with it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.compare import batches, classes, classifier, difference
from tfdist_cli.spec.sections.updates import LearningRate
from tfdist_cli.train.optimizers.learning_rate import RateScaling

TABLE = [
    ({}, 4, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
    ({"scale": "linear"}, 4, [0.4, 0.4, 0.4, 0.4, 0.4, 0.4]),
    ({"scale": "sqrt"}, 4, [0.2, 0.2, 0.2, 0.2, 0.2, 0.2]),
    ({"warmup_steps": 4}, 4, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]),
    ({"scale": "linear", "warmup_steps": 3}, 4, [0.2, 0.3, 0.4, 0.4, 0.4, 0.4]),
    ({"scale": "sqrt", "warmup_steps": 2}, 4, [0.15, 0.2, 0.2, 0.2, 0.2, 0.2]),
    ({"scale": "linear", "warmup_steps": 3}, 1, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
]


@pytest.mark.parametrize(("rule", "count", "rates"), TABLE)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_rates_follow_the_table(rule, count, rates, dtype):
    rate = RateScaling(LearningRate(**rule), count)
    found = [float(rate.at(tf.constant(0.1), tf.constant(number, dtype))) for number in range(6)]
    assert found == pytest.approx(rates, rel=1e-6)


def test_a_rate_keeps_its_type():
    rate = RateScaling(LearningRate(scale="sqrt", warmup_steps=5), 2)
    assert rate.at(tf.constant(0.1, tf.float16), tf.constant(1)).dtype == tf.float16


def test_a_long_warm_up_counts_each_update():
    rate = RateScaling(LearningRate(warmup_steps=2**26), 1)
    before, after = (float(rate.at(tf.constant(1.0, tf.float64), tf.constant(2**25 + n, tf.int64))) for n in (0, 1))
    assert after - before == pytest.approx(2.0**-26)


@pytest.mark.rotates(5)
@keras.saving.register_keras_serializable()
class Rising(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule with a warm-up of 5 updates, for the training by Keras."""

    def __init__(self, base):
        self.base = base

    def __call__(self, step):
        base = self.base(step) if callable(self.base) else self.base
        return base * keras.ops.minimum((keras.ops.cast(step, "float32") + 1) / 5, 1.0)

    def get_config(self):
        return {"base": self.base}


decay = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
OPTIMIZERS = {
    "rate": (0.05, keras.optimizers.SGD),
    "schedule": (decay, keras.optimizers.Adam),
    "weight decay": (0.01, lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1)),
    "loss scale": (0.01, lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate), 2.0**8)),
}


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_engine_warms_up_like_a_keras_schedule(name):
    rate, optimizer = OPTIMIZERS[name]
    keras.utils.set_random_seed(7)
    plain = classifier(optimizer=optimizer(Rising(rate)))
    plain.fit(batches(), epochs=2, verbose=0, shuffle=False)
    keras.utils.set_random_seed(7)
    ours = classifier(optimizer=optimizer(rate))
    tfdist.fit(ours, batches(), epochs=2, steps_per_execution=2, learning_rate=LearningRate(warmup_steps=5))
    assert difference(plain.variables, ours.variables) < 3e-6
    assert int(ours.optimizer.iterations.numpy()) == 12 or name == "loss scale"


@pytest.mark.slow
def test_callbacks_read_and_set_the_unscaled_rate():
    seen = []

    class Halves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate.numpy()))
            self.model.optimizer.learning_rate = seen[0] / 2**epoch

    model = classifier(optimizer=keras.optimizers.SGD(0.5))
    tfdist.fit(model, batches(), epochs=3, callbacks=[Halves()], learning_rate=LearningRate(warmup_steps=100))
    assert seen == [0.5, 0.5, 0.25]
    assert float(model.optimizer.learning_rate.numpy()) == 0.125


@pytest.mark.slow
def test_accumulated_gradients_are_one_update():
    def moved(steps):
        model = classifier(optimizer=keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
        start = model.get_weights()
        x, y = classes()
        tfdist.fit(model, tf.data.Dataset.from_tensors((x, y)).repeat(), max_steps=steps, steps_per_epoch=steps,
                   learning_rate=LearningRate(warmup_steps=4))  # fmt: skip
        return start, model

    keras.utils.set_random_seed(7)
    start, model = moved(2)
    keras.utils.set_random_seed(7)
    plain = classifier(optimizer=keras.optimizers.SGD(0.25))
    plain.set_weights(start)
    x, y = classes()
    plain.fit(x, y, batch_size=44, epochs=1, verbose=0)
    for own, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
