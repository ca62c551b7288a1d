"""Tests of arguments: mistakes in them are reported before all else."""

import keras
import pytest

import tfdist_cli as tfdist
from tests.support.codes import raises
from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import TrainingError, UsageError
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
        {"verbose": 3},
        {"initial_epoch": -1},
        {"validation_split": 1.0},
        {"validation_steps": 0},
        {"validation_freq": [0]},
        {"validation_batch_size": 0},
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


def test_an_argument_that_fit_does_not_have_is_named():
    with raises(UsageError, "unknown-argument") as caught:
        tfdist.fit(classifier(), batches(), epoch=3)
    assert "'epoch'" in caught.value.message
    assert "python-api.md" in str(caught.value.hint)


X, Y = classes()
LAYERED = (X, {"a": Y, "b": Y})


@pytest.mark.parametrize(
    ("data", "given", "code"),
    [
        ((batches(), Y), {}, "targets-given-twice"),
        ((batches(),), {"sample_weight": X[:, 0]}, "targets-given-twice"),
        ((lambda shard: batches(), Y), {}, "targets-given-twice"),
        ((batches(),), {"validation_split": 0.2}, "split-without-arrays"),
        ((X, Y), {"validation_split": 0.99}, "invalid-split"),
        ((X, Y), {"class_weight": {0: 2.0}, "sample_weight": X[:, 0]}, "invalid-weights"),
        (LAYERED, {"class_weight": {0: 2.0}}, "invalid-weights"),
        (LAYERED, {"sample_weight": {"a": X[:, 0]}}, "invalid-weights"),
        ((batches(X, Y, X[:, 0]),), {"class_weight": {0: 2.0}}, "invalid-weights"),
        ((X, Y), {"validation_data": tfdist.Validation((X, Y)), "validation_freq": 2}, "validation-given-twice"),
    ],
)
def test_data_and_arguments_that_do_not_go_together(data, given, code):
    with raises(UsageError, code):
        tfdist.fit(classifier(), *data, **given)


@pytest.mark.parametrize("x", ["data.csv", 5])
def test_what_is_no_data_is_named_before_its_targets(x):
    with raises(TrainingError, "unsupported-data-type"):
        tfdist.fit(classifier(), x, Y, batch_size=4)


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
