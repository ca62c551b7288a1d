"""The arguments of `fit` mean what Keras's mean: both train the same model with the same arguments."""

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import BATCH, CLASSES, FEATURES, assert_same, batches, classes, classifier
from tests.support.python_data import Rows, generated
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.engine import fallback
from tfdist_cli.train.optimizers.registry import KERNELS, Kernel

X, Y = classes()
OTHER_X, OTHER_Y = classes(20, seed=1)
WEIGHTS = np.linspace(0.1, 2, len(X)).astype(np.float32)
BY_CLASS = {0: 0.5, 2: 3.0}
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "lists": ((X.tolist(), Y.tolist()), {"batch_size": BATCH}),
    "tensors of float64": ((tf.constant(X, tf.float64), tf.constant(Y)), {"batch_size": BATCH}),
    "a batch size by default": ((X, Y), {}),
    "positional arguments": ((X, Y, BATCH, 3), {}),
    "sample weights": ((X, Y), {"sample_weight": WEIGHTS, "validation_data": (OTHER_X, OTHER_Y, OTHER_X[:, 0] ** 2)}),
    "class weights": ((X, Y), {"class_weight": BY_CLASS, "validation_data": (OTHER_X, OTHER_Y)}),
    "class weights of a dataset": ((batches(),), {"class_weight": BY_CLASS, "validation_data": batches()}),
    "a validation split": ((X, Y), {"validation_split": 0.3, "sample_weight": WEIGHTS}),
    "a batch size for validation": ((X, Y), {"validation_split": 0.5, "batch_size": 4, "validation_batch_size": 3}),
    "validation steps": ((X, Y), {"validation_data": batches(), "validation_steps": 2}),
    "validation steps of arrays": ((X, Y), {"validation_data": [OTHER_X, OTHER_Y], "validation_steps": 3}),
    "validation in every second epoch": ((X, Y), {"validation_split": 0.5, "validation_freq": 2, "epochs": 3}),
    "validation after some epochs": ((X, Y), {"validation_split": 0.5, "validation_freq": [1, 3], "epochs": 4}),
    "a later epoch": ((X, Y), {"initial_epoch": 2, "epochs": 4}),
    "no epoch left": ((X, Y), {"initial_epoch": 2, "epochs": 2}),
    "as many steps as examples allow": ((X, Y), {"steps_per_epoch": 4}),
    "steps within a pass": ((batches(),), {"steps_per_epoch": 4, "epochs": 5}),
    "steps of a part of a pass": ((batches(),), {"steps_per_epoch": 2, "epochs": 7}),
    "steps beyond the data": ((batches(),), {"steps_per_epoch": 9, "epochs": 3}),
    "steps of data that repeats": ((batches().repeat(),), {"steps_per_epoch": 4, "epochs": 4}),
}


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:`shuffle=True`")
@pytest.mark.parametrize("case", CASES)
def test_arguments_mean_what_they_mean_in_keras(case):
    data, given = CASES[case]
    own = {"shuffle": False} | ({} if len(data) > 3 else {"epochs": 2}) | given
    keras.utils.set_random_seed(7)
    plain = classifier(weighted_metrics=["accuracy"])
    arrays = [np.asarray(each) if isinstance(each, list) else each for each in data]  # Keras takes no lists of numbers
    plain.fit(*arrays, verbose=0, **own)
    keras.utils.set_random_seed(7)
    ours = classifier(weighted_metrics=["accuracy"])
    tfdist.fit(ours, *data, **own)
    if plain.history.epoch:
        assert_same(plain, ours, 1e-6)
    else:
        assert not ours.history.epoch
        assert int(ours.optimizer.iterations) == 0


def several_outputs():
    inputs = {"a": keras.Input((FEATURES,), name="a"), "b": keras.Input((FEATURES,), name="b")}
    hidden = layers.Dense(4, "relu")(layers.concatenate(list(inputs.values())))
    outputs = {"c": layers.Dense(CLASSES, name="c")(hidden), "d": layers.Dense(1, name="d")(hidden)}
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.SGD(0.1, 0.9), {"c": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "d": "mse"}
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("weights", [WEIGHTS, {"c": WEIGHTS, "d": 1 - WEIGHTS}], ids=["one", "each"])
def test_weights_of_several_outputs(weights):
    x, y = {"a": X, "b": X**2}, {"c": Y, "d": X[:, :1]}
    models = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        models.append(several_outputs())
        given = {"verbose": 0, "shuffle": False, "sample_weight": weights, "validation_split": 0.25}
        train(models[-1], x, y, epochs=2, **given)
    assert_same(*models)


PYTHON: dict[str, tuple[Any, dict[str, Any]]] = {
    "PyDataset": (lambda: Rows(X, Y), {"class_weight": BY_CLASS}),
    "PyDataset of threads": (lambda: Rows(X, Y, scale=0.5, workers=2), {"epochs": 3}),
    "PyDataset without end": (lambda: Rows(X, Y, endless=True), {"steps_per_epoch": 4}),
    "PyDataset and steps": (lambda: Rows(X, Y), {"steps_per_epoch": 4, "epochs": 3}),
    "PyDataset to validate": (lambda: Rows(X, Y), {"validation_data": lambda: Rows(OTHER_X, OTHER_Y)}),
    "generator": (lambda: generated(X, Y), {"steps_per_epoch": 5, "epochs": 3}),
    "generator of no weights": (
        lambda: ((x, y, None) for x, y in generated(X, Y)),
        {
            "steps_per_epoch": 5,
            "epochs": 1,
            "validation_steps": 3,
            "validation_data": lambda: ((*batch, None) for batch in generated(OTHER_X, OTHER_Y)),
        },
    ),
    "generator to validate": (
        lambda: generated(X, Y),
        {
            "steps_per_epoch": 6,
            "epochs": 1,
            "validation_steps": 3,
            "validation_data": lambda: generated(OTHER_X, OTHER_Y),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("case", PYTHON)
def test_data_that_python_code_yields_is_trained_on_as_in_keras(case):
    make, more = PYTHON[case]
    models = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        models.append(classifier(optimizer=keras.optimizers.SGD(0.1)))
        given = {name: value() if callable(value) else value for name, value in more.items()}
        train(models[-1], make(), **{"epochs": 2, "verbose": 0, "shuffle": False} | given)
    assert_same(*models)


@pytest.mark.slow
def test_a_generator_loses_nothing_when_the_first_execution_fails(monkeypatch):
    failed = []

    def fails(update):
        failed.append(update)
        changed = update.variable.assign_add(tf.ones_like(update.variable), read_value=False)
        with tf.control_dependencies([changed]):
            return tf.debugging.Assert(tf.reduce_any(update.gradient > 1e9), ["this kernel cannot be run"])

    kernel = Kernel(fails, KERNELS[keras.optimizers.SGD].slots)
    monkeypatch.setitem(KERNELS, keras.optimizers.SGD, kernel)
    monkeypatch.setattr(fallback, "is_of_model", lambda error: isinstance(error, TrainingError))
    models = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        models.append(classifier(optimizer=keras.optimizers.SGD(0.1)))
        train(models[-1], generated(X, Y, passes=2), epochs=2, steps_per_epoch=6, verbose=0, shuffle=False)
    assert failed
    assert_same(*models)


def unknown():
    return batches().filter(lambda *_: True)


UNKNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "whole passes": (unknown, {"epochs": 3}),
    "steps beyond the data": (unknown, {"epochs": 3, "steps_per_epoch": 9}),
    "steps within a pass": (unknown, {"epochs": 5, "steps_per_epoch": 4}),
    "a later epoch": (unknown, {"initial_epoch": 2, "epochs": 4}),
    "later epochs of a generator": (
        lambda: generated(X, Y, passes=2),
        {"initial_epoch": 1, "epochs": 3, "steps_per_epoch": 4},
    ),
    "a generator": (lambda: generated(X, Y, passes=1), {"validation_data": batches()}),
    "a generator in epochs": (lambda: generated(X, Y, passes=2), {"epochs": 3, "steps_per_epoch": 4}),
}


@pytest.mark.slow
@pytest.mark.rotates(5)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("case", UNKNOWN)
def test_data_of_unknown_length_is_trained_on_as_in_keras(case):
    make, given = UNKNOWN[case]
    models = []
    for train in (keras.Model.fit, tfdist.fit):
        keras.utils.set_random_seed(7)
        models.append(classifier(steps_per_execution=2))  # with 1, Keras's Adam counts an empty step in each epoch
        train(models[-1], make(), verbose=0, **given)
    assert_same(*models)


@pytest.mark.slow
def test_a_generator_ends_the_training_when_it_is_used_up(logged):
    model = classifier()
    history = tfdist.fit(model, generated(X, Y, passes=1), epochs=3)
    assert (history.epoch, int(model.optimizer.iterations)) == ([0], 6)
    assert logging.WARNING in logged()


@pytest.mark.slow
def test_data_without_an_end_or_without_a_batch_is_an_error():
    with raises(TrainingError, "endless-epoch"):
        tfdist.fit(classifier(), unknown().repeat())
    with raises(TrainingError, "no-full-batch"):
        tfdist.fit(classifier(), batches().filter(lambda *_: False))


@pytest.fixture
def logged(caplog):
    """The levels of what tfdist has logged since the last look."""
    log = logging.getLogger("tfdist")
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)

    def levels():
        found = [record.levelno for record in caplog.records if record.name == "tfdist"]
        caplog.clear()
        return found

    yield levels
    log.removeHandler(caplog.handler)


@pytest.mark.slow
def test_progress_is_not_logged_if_verbose_is_0(logged):
    tfdist.fit(classifier(), X, Y, verbose=0)
    assert not logged()
    tfdist.fit(classifier(), X, Y)
    assert logged()


@pytest.mark.slow
def test_steps_that_do_not_divide_the_data_are_warned_of(logged):
    tfdist.fit(classifier(), batches(), steps_per_epoch=3, epochs=2)
    assert logging.WARNING not in logged()
    assert tfdist.fit(classifier(), batches(), steps_per_epoch=4, epochs=2).epoch == [0, 1]
    assert logging.WARNING in logged()


def test_a_training_within_a_training_is_refused_and_an_evaluation_is_not():
    model, other, found = classifier(), classifier(), []

    def called(epoch, logs):
        found.append(tfdist.evaluate(other, batches())["loss"] > 0)
        with raises(UsageError, "training-runs"):
            tfdist.fit(other, batches())

    tfdist.fit(model, batches(), callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=called)])
    assert found == [True]
    tfdist.fit(other, batches())
