"""Arguments that cannot mean anything, and those of Keras that `fit` does not have, are named before all else."""

import keras
import pytest

import tfdist_cli as tfdist
from tests.support.compare import batches, classes, classifier
from tfdist_cli.errors import UsageError
from tfdist_cli.train.trainer.arguments import as_callbacks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps_per_execution": 0}, "steps_per_execution is 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
        ({"steps_per_epoch": 31.25}, "steps_per_epoch is 31.25"),
        ({"epochs": -1}, "epochs is -1"),
        ({"batch_size": 8}, "batch_size is for arrays, and this data comes in batches of its own"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"shuffle": "batch"}, "shuffle is 'batch'"),
        ({"epochs": True}, "epochs is True"),
        ({"max_steps": "9"}, "max_steps is '9'"),
        ({"share": "bogus"}, "share is 'bogus'"),
        ({"wire": "bogus"}, "wire is 'bogus'"),
        ({"jit": "yes"}, "jit is 'yes'"),
        ({"updates": "sync"}, "updates is 'sync'"),
        ({"learning_rate": 0.1}, "learning_rate is 0.1"),
        ({"embeddings": True}, "embeddings is True"),
        ({"checkpoints": "dir"}, "checkpoints is 'dir'"),
        ({"callbacks": [print]}, "<built-in function print> is no callback"),
        ({"callbacks": "TerminateOnNaN"}, "'TerminateOnNaN' is no callback"),
    ],
)
def test_a_value_that_means_nothing_is_named(given, said):
    with pytest.raises(UsageError) as raised:
        tfdist.fit(classifier(), batches(), **given)
    assert str(raised.value) == said
    assert raised.value.hint


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"x": 1}, "tfdist.fit(model, (x, y))"),
        ({"y": 1}, "tfdist.fit(model, (x, y))"),
        ({"sample_weight": 1}, "(x, y, sample_weight)"),
        ({"class_weight": {}}, "third part of the data"),
        ({"validation_split": 0.1}, "validation_data=(x, y)"),
        ({"validation_steps": 2}, "tfdist.Validation(data, steps=...)"),
        ({"validation_freq": 2}, "tfdist.Validation(data, every_epochs=...)"),
        ({"validation_batch_size": 2}, "a dataset of batches"),
        ({"initial_epoch": 3}, "tfdist.Checkpoints(dir)"),
        ({"verbose": 0}, "leave it out"),
        ({"epoch": 3}, "docs/reference/python-api.md"),
    ],
)
def test_an_argument_that_fit_does_not_have_is_named(given, hint):
    (name,) = given
    with pytest.raises(UsageError, match=f"tfdist.fit has no argument '{name}'") as raised:
        tfdist.fit(classifier(), batches(), **given)
    assert hint in str(raised.value.hint)


def test_targets_as_a_third_argument():
    with pytest.raises(UsageError, match="all else by name") as raised:
        tfdist.fit(classifier(), *classes())
    assert raised.value.hint == "pass inputs and targets as one: tfdist.fit(model, (x, y))"


@pytest.mark.parametrize("given", [{"every_steps": 0}, {"keep": 0}])
def test_checkpoints_that_would_never_be(given):
    with pytest.raises(UsageError, match=r"is 0$"):
        tfdist.Checkpoints("dir", **given)


@pytest.mark.parametrize("given", [{"steps": 0}, {"every_epochs": 0}])
def test_validation_that_would_never_be(given):
    with pytest.raises(UsageError, match=r"is 0$"):
        tfdist.Validation(batches(), **given)


def test_callbacks_are_several_one_or_none():
    one = keras.callbacks.EarlyStopping()
    assert as_callbacks(one) == as_callbacks([one]) == as_callbacks((one,)) == [one]
    assert as_callbacks([[one], one]) == [one, one]
    assert as_callbacks(None) == as_callbacks(()) == []
