"""XLA computes the same values, and is not used if it cannot compile the model or is not faster."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import assert_same, classifier, train_both
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.mirrored import replica_steps
from tfdist_cli.train.model import jit
from tfdist_cli.train.model.train_step import ModelStep

pytestmark = pytest.mark.slow

SPEC = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))


def compiled_model(*layers):
    model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def step_of(*layers):
    step = ModelStep(compiled_model(*layers))
    step.build(SPEC)
    return step


def through_text(values):
    return keras.ops.reshape(tf.strings.to_number(tf.strings.as_string(values)), (-1, 4))


def test_steps_compiled_by_xla_train_to_the_same():
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    start, weights = compiled_model(keras.layers.Dense(8, activation="tanh")).get_weights(), []
    for wanted in (False, True):
        model = compiled_model(keras.layers.Dense(8, activation="tanh"))
        model.set_weights(start)
        history = tfdist.fit(model, (x, y), epochs=60, jit=wanted)
        assert history.history["accuracy"][-1] > 0.8
        weights.append(model.get_weights())
    for plain, by_xla in zip(*weights, strict=True):
        np.testing.assert_allclose(plain, by_xla, rtol=1e-5, atol=1e-6)


def test_a_compiled_step_is_marked_in_its_graph():
    step = step_of()
    batch = (tf.zeros([2, 4]), tf.zeros([2], tf.int64))

    @tf.function(autograph=False)
    def loss():
        given = [[tf.zeros(each.shape, each.dtype) for each in group] for group in (step.parameters, step.state)]
        metrics = [tf.zeros(each.shape, each.dtype) for each in step.metrics]
        return step.train(*given, metrics, batch).loss

    def compiled():
        return any("_XlaMustCompile" in node.attr and node.attr["_XlaMustCompile"].b for node in nodes(loss))

    assert not compiled()
    step.jit = True
    loss = tf.function(loss.python_function, autograph=False)
    assert compiled()


class ThroughText(keras.optimizers.SGD):
    """Has an update that XLA cannot compile."""

    def update_step(self, gradient, variable, learning_rate):
        text = tf.strings.as_string(tf.convert_to_tensor(gradient))
        super().update_step(tf.reshape(tf.strings.to_number(text), variable.shape), variable, learning_rate)


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("optimizer", "compiled"),
    [
        (lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3), True),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), True),
        (lambda: ThroughText(0.1), False),
    ],
)
def test_xla_compiles_updates_of_one_process_where_it_can(optimizer, compiled, monkeypatch):
    chosen = []

    def compiles(*args):
        chosen.append(jit.compiles(*args))
        return chosen[-1]

    monkeypatch.setattr(replica_steps, "compiles", compiles)
    plain, ours = train_both(lambda: classifier(optimizer=optimizer()), jit=True)
    assert_same(plain, ours)
    assert chosen == [compiled]


def test_an_error_that_is_not_of_xla_is_raised():
    @tf.function(jit_compile=True, autograph=False)
    def broken(values):
        return values.no_such_attribute

    @tf.function(jit_compile=True, autograph=False)
    def text(values):
        return tf.strings.as_string(values)

    with pytest.raises(AttributeError, match="no_such_attribute"):
        jit.compiles(broken, tf.TensorSpec([None]))
    assert not jit.compiles(text, tf.TensorSpec([None]))


def test_updates_of_rows_are_not_compiled(monkeypatch):
    monkeypatch.setattr(replica_steps, "compiles", None)  # not called
    inputs = keras.Input([3], dtype="int64")
    model = keras.Model(inputs, keras.layers.Flatten()(keras.layers.Embedding(20, 4)(inputs)))
    model.compile("adagrad", "mse")
    tfdist.fit(model, (np.arange(24).reshape(8, 3) % 20, np.ones((8, 12))), jit=True)


def nodes(function):
    return function.get_concrete_function().graph.as_graph_def().node


@pytest.mark.parametrize(("seconds", "chosen"), [((1.0, 2.0), True), ((1.0, 1.02), False), ((2.0, 1.0), False)])
def test_auto_chooses_the_faster_variant(monkeypatch, caplog, seconds, chosen):
    durations = iter(seconds)
    monkeypatch.setattr(jit, "_timed", lambda *_: next(durations))
    with caplog.at_level("INFO", "tfdist"):
        assert jit.choose_xla(step_of(), SPEC, "auto", jit.run_locally) is chosen
    assert f"{seconds[0] / seconds[1]:.2f} times" in caplog.text


def test_a_model_that_xla_cannot_compile_trains_without_it(caplog):
    step = step_of(keras.layers.Lambda(through_text))
    with caplog.at_level("INFO", "tfdist"):
        assert jit.choose_xla(step, SPEC, "auto", jit.run_locally) is False
    assert "training without XLA" in caplog.text
    with raises(TrainingError, "xla-cannot-compile"):
        jit.choose_xla(step, SPEC, True, jit.run_locally)


def test_nothing_is_timed_without_jit():
    assert jit.choose_xla(step_of(), SPEC, False, run=None) is False
