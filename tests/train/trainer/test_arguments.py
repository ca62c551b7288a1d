"""Tests of arguments: mistakes in them are reported before all else."""

import keras
import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import UsageError
from tfdist_cli.train.trainer.arguments import as_callbacks


@pytest.mark.parametrize(
    "given",
    [
        {"steps_per_execution": 0},
        {"steps_per_epoch": 0},
        {"steps_per_epoch": 31.25},
        {"epochs": -1},
        {"batch_size": 0},
        {"shuffle": "batch"},
        {"epochs": True},
        {"max_steps": "9"},
        {"share": "bogus"},
        {"wire": "bogus"},
        {"jit": "yes"},
        {"updates": "sync"},
        {"learning_rate": 0.1},
        {"embeddings": True},
        {"checkpoints": "dir"},
        {"callbacks": [print]},
        {"callbacks": "TerminateOnNaN"},
    ],
    ids=str,
)
def test_an_invalid_value_is_named(given):
    ((name, value),) = given.items()
    with raises(UsageError, "invalid-argument") as caught:
        tfdist.fit(classifier(), batches(), **given)
    assert caught.value.message.startswith(f"{name} must be ")
    assert caught.value.message.endswith(repr(value[0] if isinstance(value, list) else value))


def test_a_batch_size_for_data_in_batches():
    with raises(UsageError, "batch-size-without-arrays") as caught:
        tfdist.fit(classifier(), batches(), batch_size=8)
    assert "dataset.batch(8)" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"x": 1}, "tfdist.fit(model, (x, y))"),
        ({"y": 1}, "tfdist.fit(model, (x, y))"),
        ({"sample_weight": 1}, "(x, y, sample_weight)"),
        ({"class_weight": {}}, "(x, y, sample_weight)"),
        ({"validation_split": 0.1}, "validation_data=(x, y)"),
        ({"validation_steps": 2}, "tfdist.Validation(data, steps=...)"),
        ({"validation_freq": 2}, "tfdist.Validation(data, every_epochs=...)"),
        ({"validation_batch_size": 2}, "validation_data"),
        ({"initial_epoch": 3}, "tfdist.Checkpoints(dir)"),
        ({"verbose": 0}, "leave it out"),
        ({"epoch": 3}, "python-api.md"),
    ],
)
def test_an_argument_that_fit_does_not_have_is_named(given, hint):
    (name,) = given
    with raises(UsageError, "unknown-argument") as caught:
        tfdist.fit(classifier(), batches(), **given)
    assert repr(name) in caught.value.message
    assert hint in str(caught.value.hint)


def test_targets_as_a_third_argument():
    with raises(UsageError, "unknown-argument") as caught:
        tfdist.fit(classifier(), *classes())
    assert "tfdist.fit(model, (x, y))" in str(caught.value.hint)


@pytest.mark.parametrize("given", [{"every_steps": 0}, {"keep": 0}])
def test_invalid_checkpoints(given):
    with raises(UsageError, "invalid-argument"):
        tfdist.Checkpoints("dir", **given)


@pytest.mark.parametrize("given", [{"steps": 0}, {"every_epochs": 0}])
def test_invalid_validation(given):
    with raises(UsageError, "invalid-argument"):
        tfdist.Validation(batches(), **given)


def test_callbacks_are_several_one_or_none():
    one = keras.callbacks.EarlyStopping()
    assert as_callbacks(one) == as_callbacks([one]) == as_callbacks((one,)) == [one]
    assert as_callbacks([[one], one]) == [one, one]
    assert as_callbacks(None) == as_callbacks(()) == []
