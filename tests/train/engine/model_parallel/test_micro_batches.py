"""A batch is divided into equal micro-batches."""

import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.model_parallel.micro_batches import MicroBatches


def spec(size):
    return {"x": tf.TensorSpec([size, 3])}, tf.TensorSpec([size], tf.int32)


def test_parts_follow_each_other():
    micro = MicroBatches.of(spec(6), 3)
    assert micro.element_spec == spec(2)
    parts = micro.parts(({"x": tf.reshape(tf.range(18), [6, 3])}, tf.range(6)))
    assert [part[1].numpy().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[1][0]["x"].numpy().tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_batch_that_is_not_divided_may_have_any_size():
    assert MicroBatches.of(spec(None), 1).parts("batch") == ["batch"]


@pytest.mark.parametrize("specs", [spec(None), spec(7), tf.RaggedTensorSpec([6, None])])
def test_batches_without_a_fitting_size_are_refused(specs):
    with raises(TrainingError, "micro-batches-do-not-fit"):
        MicroBatches.of(specs, 3)
