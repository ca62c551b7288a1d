"""Another prediction of a model uses the function of the one before, unless what it was traced from has changed."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist

X = np.random.default_rng(0).normal(size=(45, 3)).astype("float32")


class Noted(layers.Layer):
    """Counts how often it is called: when a function is traced."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return 2 * x


def noted():
    """A model, and its layer that counts."""
    layer = Noted()
    return keras.Sequential([keras.Input((3,)), layers.Dense(2), layer, layers.Dense(1)]), layer


def calls(model, layer, data=X, **given):
    """How often the layer is called in a prediction, whose values are right."""
    before = layer.calls
    predicted = tfdist.predict(model, data, **given)
    found = layer.calls - before
    np.testing.assert_allclose(predicted, model(data), rtol=1e-5)
    return found


def test_another_prediction_traces_nothing_and_has_the_values_of_now():
    model, layer = noted()
    assert calls(model, layer) > 0
    model.set_weights([2 * each + 1 for each in model.get_weights()])
    assert calls(model, layer) == 0
    assert calls(model, layer, X[:7]) == 0
    assert calls(model, layer, np.repeat(X, 9, 0)) == 0
    model.layers[0].kernel.assign(np.ones((3, 2)))
    assert calls(model, layer) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.compile(),
        lambda model: model.make_predict_function(force=True),
        lambda model: model.layers[0].quantize("int8"),
        lambda model: setattr(model.layers[0], "trainable", False),
    ],
    ids=["compile", "make_predict_function", "other variables", "trainable"],
)
def test_a_change_of_the_model_takes_effect(change):
    model, layer = noted()
    assert calls(model, layer) > 0
    change(model)
    assert calls(model, layer) > 0


def test_another_type_of_batch_is_traced():
    model, layer = noted()
    assert calls(model, layer) > 0
    of_nine = tf.data.Dataset.from_tensor_slices(X).batch(9, drop_remainder=True)
    for expected in (True, False):
        before = layer.calls
        predicted = tfdist.predict(model, of_nine)
        assert (layer.calls > before) == expected
        np.testing.assert_allclose(predicted, model(X), rtol=1e-5)


def test_a_model_and_its_function_are_freed_together():
    model, _ = noted()
    tfdist.predict(model, X)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_a_layer_that_has_failed_can_predict():
    model, layer = noted()
    assert calls(model, layer) > 0
    wrong = np.zeros((4, 5), np.float32)
    with pytest.raises(ValueError):  # noqa: PT011 Keras's, as that of model.predict
        tfdist.predict(model, wrong)
    assert calls(model, layer) > 0
