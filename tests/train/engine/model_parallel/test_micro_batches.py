"""A batch is divided into micro-batches."""

import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.engine.model_parallel.micro_batches import MicroBatch, MicroBatches


def spec(size):
    return {"x": tf.TensorSpec([size, 3])}, tf.TensorSpec([size], tf.int32)


def batch(size):
    return {"x": tf.reshape(tf.range(3.0 * size), [size, 3])}, tf.range(size)


def test_parts_follow_each_other():
    micro = MicroBatches.of(spec(6), 3)
    assert micro.element_spec == spec(2)
    parts = micro.parts(batch(6))
    assert [part.batch[1].numpy().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert parts[1].batch[0]["x"].numpy().tolist() == [[6, 7, 8], [9, 10, 11]]
    assert {part.examples for part in parts} == {None}


def test_a_batch_that_is_not_divided_may_have_any_size():
    assert [part.batch for part in MicroBatches.of(spec(None), 1).parts("batch")] == ["batch"]


def test_batches_of_several_replicas_count_by_their_examples():
    micro = MicroBatches.of(spec(None), 1, replicas=2)
    assert [part.examples.numpy() for part in micro.parts(batch(5))] == [5]
    assert MicroBatches.of(spec(4), 1, replicas=2).equal


@pytest.mark.parametrize("size", [7, None], ids=["known", "unknown"])
def test_sizes_differ_by_one_at_most(size):
    parts = divided(spec(size), 7)
    assert [part.batch[1].numpy().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [part.examples.numpy() for part in parts] == [2, 2, 3]
    assert all(part.counts is None if size else part.counts.numpy() for part in parts)


def test_a_part_without_examples_does_not_count():
    parts = divided(spec(None), 2)
    assert [part.examples.numpy() for part in parts] == [0, 1, 1]
    assert [bool(part.counts) for part in parts] == [False, True, True]
    assert [part.batch[1].numpy().tolist() for part in parts] == [[0], [0], [1]]


def divided(element_spec, size):
    """The parts of a batch that a function reads."""
    micro = MicroBatches.of(element_spec, 3)
    sizes_known = element_spec[1].shape[0] is not None

    def parts(given):
        return [(part.batch, part.examples, part.counts) for part in micro.parts(given)]

    found = tf.function(parts, input_signature=None if sizes_known else [spec(None)])(batch(size))
    return [MicroBatch(*each) for each in found]


def test_ragged_and_sparse_tensors_are_divided():
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 4]])
    given = ragged, sparse
    micro = MicroBatches.of(tf.nest.map_structure(tf.type_spec_from_value, given), 2)
    parts = micro.parts(given)
    assert [part.batch[0].to_list() for part in parts] == [[[1], [2, 3]], [[], [4]]]
    assert [tf.sparse.to_dense(part.batch[1]).numpy().tolist() for part in parts] == [
        [[1, 0], [0, 2]],
        [[3, 0], [0, 4]],
    ]
    assert tf.nest.map_structure(lambda s: s.shape[0], micro.element_spec) == (None, None)


@pytest.mark.parametrize("specs", [tf.TensorSpec([]), tf.TensorSpec(None), (spec(6), tf.TensorSpec([]))])
def test_tensors_without_examples_are_refused(specs):
    with raises(TrainingError, "micro-batches-do-not-fit"):
        MicroBatches.of(specs, 3)
