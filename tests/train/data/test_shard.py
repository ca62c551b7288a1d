"""What a dataset function returns is checked."""

import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.shard import Shard, checked


def test_a_function_that_returns_no_dataset_is_named():
    with raises(TrainingError, "not-a-dataset") as caught:
        checked(lambda shard: [1, 2], Shard())
    assert "returned list" in str(caught.value)


def test_elements_with_too_many_parts():
    with raises(TrainingError, "too-many-parts"):
        checked(lambda shard: tf.data.Dataset.from_tensors((1, 2, 3, 4)), Shard())


@pytest.mark.parametrize(("asked", "tuned"), [(None, False), (True, True), (False, False)])
def test_data_tunes_itself_only_when_asked_to(asked, tuned):
    dataset = tf.data.Dataset.range(3)
    if asked is not None:
        options = tf.data.Options()
        options.autotune.enabled = asked
        dataset = dataset.with_options(options)
    assert checked(lambda shard: dataset, Shard()).options().autotune.enabled is tuned
