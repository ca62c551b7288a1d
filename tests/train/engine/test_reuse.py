"""Another training of a model goes on with the functions of the one before, and trains like Keras's second `fit`."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tests.support.compare import BATCH, FEATURES, assert_same, batches, classes, classifier

X, Y = classes()


class Noted(layers.Layer):
    """Counts how often it is called: when a function is traced."""

    def __init__(self, **given):
        super().__init__(**given)
        self.calls = 0
        self.drop = layers.Dropout(0.3, seed=5)

    def call(self, x, training=False):
        self.calls += 1
        return self.drop(x, training=training)


def noted(**compiled):
    """A model, and its layer that counts."""
    layer = Noted()
    hidden = layers.Dense(4, "relu"), layers.BatchNormalization(), layer
    return classifier(*hidden, optimizer="adam", **compiled), layer


def calls(model, layer, data=None, **given):
    """How often the layer is called in another training."""
    before = layer.calls
    tfdist.fit(model, batches() if data is None else data, **given)
    return layer.calls - before


@pytest.mark.parametrize("jit", [False, True])
def test_a_second_training_traces_nothing_and_trains_like_keras(jit):
    found = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        model, layer = noted(jit_compile=jit and train is keras.Model.fit)
        given = {"shuffle": False, "verbose": 0} | ({"jit": jit} if train is tfdist.fit else {})
        scored = (X[:20], Y[:20])
        train(model, X, Y, BATCH, 2, validation_data=scored, **given)
        before = layer.calls
        train(model, X, Y, BATCH, 5, validation_data=scored, initial_epoch=2, **given)
        assert layer.calls == before
        train(model, X[:30], Y[:30], BATCH, 1, **given)
        found.append(model)
    assert_same(found[0], found[1], 1e-5 if jit else 1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.compile("adam", model.loss),
        lambda model: setattr(model.layers[0], "trainable", False),
        lambda model: setattr(model, "optimizer", keras.optimizers.SGD()),
        lambda model: model.make_train_function(force=True),
    ],
    ids=["compile", "trainable", "optimizer", "make_train_function"],
)
def test_a_change_of_the_model_takes_effect(change):
    model, layer = noted()
    assert calls(model, layer) > 0
    assert calls(model, layer) == 0
    before = [weight.copy() for weight in model.layers[0].get_weights()]
    change(model)
    assert calls(model, layer) > 0
    stays = not model.layers[0].trainable
    assert all(map(np.array_equal, before, model.layers[0].get_weights())) == stays
    assert calls(model, layer) == 0


@pytest.mark.parametrize(
    "given",
    [
        {"data": batches(batch=5).map(lambda x, y: (x, y, y))},
        {"jit": True},
        {"learning_rate": tfdist.LearningRate(warmup_steps=3)},
    ],
    ids=["weights", "jit", "learning rate"],
)
def test_another_type_of_batch_or_another_rule_is_traced(given):
    model, layer = noted()
    assert calls(model, layer) > 0
    assert calls(model, layer, **given) > 0
    assert calls(model, layer, **given) == 0


def test_functions_that_run_eagerly_are_others():
    model, layer = noted()
    assert calls(model, layer) > 0
    tf.config.run_functions_eagerly(True)
    try:
        assert calls(model, layer) > 0
    finally:
        tf.config.run_functions_eagerly(False)
    assert calls(model, layer) > 0
    assert calls(model, layer) == 0


def test_the_order_of_keys_in_a_batch_makes_no_difference():
    inputs = {name: keras.Input((FEATURES,), name=name) for name in ("b", "a")}
    layer = Noted()
    sums = layers.Dense(3)(layer(inputs["a"])) + layers.Dense(3)(inputs["b"])
    found = []
    for fits in (1, 2):
        keras.utils.set_random_seed(7)
        model = keras.models.clone_model(keras.Model(inputs, sums))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        noted_layer = next(each for each in model.layers if isinstance(each, Noted))
        assert calls(model, noted_layer, {"a": X, "b": 2 * X}, y=Y, shuffle=False) > 0
        data = {"b": 2 * X, "a": X} if fits == 2 else {"a": X, "b": 2 * X}
        assert calls(model, noted_layer, data, y=Y, shuffle=False) == 0
        found.append(model)
    assert_same(found[0], found[1])


def test_a_learning_rate_that_was_set_takes_effect():
    model, layer = noted()
    tfdist.fit(model, batches())
    model.optimizer.learning_rate = 0.0
    before = model.layers[0].get_weights()
    assert calls(model, layer) == 0
    assert all(map(np.array_equal, before, model.layers[0].get_weights()))


def test_a_schedule_that_was_set_takes_effect():
    model, layer = noted()
    tfdist.fit(model, batches())
    model.optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.0, 1, 0.5)
    before = model.layers[0].get_weights()
    assert calls(model, layer) > 0
    assert all(map(np.array_equal, before, model.layers[0].get_weights()))


def test_an_evaluation_of_other_batches_in_between_changes_nothing():
    model, layer = noted()
    given = {"validation_data": batches(batch=6)}
    assert calls(model, layer, **given) > 0
    tfdist.evaluate(model, batches(batch=11))
    assert calls(model, layer, **given) == 0
    weighed = {"validation_data": (X, Y, np.linspace(0, 1, len(X), dtype=np.float32))}
    assert calls(model, layer, **weighed) > 0
    assert calls(model, layer, **given) == 0


def test_a_second_evaluation_traces_nothing_until_the_model_is_compiled():
    model, layer = noted()

    def evaluated(data):
        before = layer.calls
        scores = tfdist.evaluate(model, data)
        return layer.calls - before, scores

    first, scores = evaluated(batches())
    assert first > 0
    assert evaluated(batches()) == (0, scores)
    assert model.evaluate(batches(), verbose=0, return_dict=True) == pytest.approx(scores)
    tfdist.fit(model, batches(), validation_data=batches(batch=6))
    traced, trained = evaluated(batches())
    assert (traced, trained == scores) == (0, False)
    model.compile("adam", model.loss)
    assert evaluated(batches())[0] > 0
    tfdist.fit(model, batches(batch=4).map(lambda x, y: (x, y, y)))
    assert evaluated(batches())[0] > 0


def test_a_training_that_has_failed_is_not_continued():
    model, layer = noted()
    tfdist.fit(model, batches())

    def fail(batch, logs):
        raise BufferError

    with pytest.raises(BufferError):
        tfdist.fit(model, batches(), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)])
    assert calls(model, layer) > 0


def test_a_model_is_freed_with_its_functions():
    model, _ = noted()
    tfdist.fit(model, batches())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_the_data_of_a_training_is_freed():
    class Array(np.ndarray):
        pass

    x = X.copy().view(Array)
    model, _ = noted()
    tfdist.fit(model, x, Y)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_draws_without_a_seed_go_on_with_those_of_the_process():
    class Noise(layers.Layer):
        def call(self, x):
            return x + keras.random.normal((FEATURES,))

    found = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        model = classifier(Noise(), layers.Dense(4))
        for _ in range(2):
            keras.random.normal((3,))
            train(model, batches(), verbose=0, shuffle=False)
        found.append(model)
    assert_same(*found)


@pytest.mark.parametrize("deltas", [1, 3])
def test_a_training_resumes_with_the_functions_of_another_one(tmp_path, deltas):
    model, layer = noted()
    assert calls(model, layer) > 0
    stored = tfdist.Checkpoints(tmp_path, full_every=deltas)
    assert (calls(model, layer, epochs=2, checkpoints=stored) > 0) == (deltas > 1)
    saved = model.get_weights()
    model.set_weights([0 * weight for weight in saved])
    before = layer.calls
    tfdist.fit(model, batches(), epochs=2, checkpoints=stored)
    assert layer.calls == before
    assert all(map(np.array_equal, model.get_weights(), saved))
