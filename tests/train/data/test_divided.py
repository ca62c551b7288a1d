"""Batches of updates, of which each worker takes a part."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.divided import DividedBatches, part
from tfdist_cli.train.data.pipeline import repeated
from tfdist_cli.train.data.shard import Shard


def examples(count=61, **batched):
    numbers = np.arange(count)
    data = {"number": numbers, "row": np.stack([numbers] * 3, axis=1)}, numbers % 2
    return tf.data.Dataset.from_tensor_slices(data).batch(8, **batched)


def test_parts_make_up_the_batches_of_one_process():
    data = examples(64, drop_remainder=True)
    whole = DividedBatches.of(data.element_spec, 3)
    dataset = whole.whole(lambda _: data)(Shard())
    assert dataset.element_spec == whole.whole_spec
    batches = list(dataset)
    assert np.concatenate([x["number"] for x, _ in batches]).tolist() == list(range(48))
    (x, y), bounds = batches[1], [0, 1, 20, 24]
    parts = [part((x, y), bounds[worker], bounds[worker + 1]) for worker in range(3)]
    assert [len(y) for _, y in parts] == [1, 19, 4]
    assert np.concatenate([x["number"] for x, _ in parts]).tolist() == list(range(24, 48))
    assert np.concatenate([x["row"] for x, _ in parts]).shape == (24, 3)


def test_a_batch_may_contain_the_end_of_a_pass_and_the_start_of_the_next():
    data = examples(drop_remainder=True)
    whole = DividedBatches.of(data.element_spec, 2).whole(repeated(lambda _: data))
    numbers = [x["number"].numpy() for x, _ in whole(Shard()).take(7)]
    assert np.concatenate(numbers).tolist() == [*range(56), *range(56)]


def test_a_resumed_training_continues_after_the_batches_that_were_consumed():
    data = examples(64, drop_remainder=True)
    whole = DividedBatches.of(data.element_spec, 2).whole(repeated(lambda _: data))
    x, _ = next(iter(whole(Shard(step=6))))
    assert x["number"].numpy().tolist() == [*range(48, 64)]


def test_only_dense_batches_of_one_size_can_be_divided():
    with raises(TrainingError, "batch-size-unknown"):
        DividedBatches.of(examples().element_spec, 2)
    ragged = tf.RaggedTensorSpec([8, None], tf.int32), tf.TensorSpec([8])
    with raises(TrainingError, "batch-not-divisible"):
        DividedBatches.of(ragged, 2)


@pytest.mark.parametrize("workers", [1, 4])
def test_the_model_sees_batches_of_any_size(workers):
    spec = DividedBatches.of(examples(drop_remainder=True).element_spec, workers)
    assert spec.element_spec[0]["row"].shape.as_list() == [None, 3]
    assert spec.whole_spec[0]["row"].shape.as_list() == [8 * workers, 3]
