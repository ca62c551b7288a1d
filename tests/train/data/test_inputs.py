"""What Keras's `fit` takes as data becomes a function of a shard; what does not go together is refused."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.shard import Shard

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (((X, Y),), 2),
        ((X, Y), 2),
        (((X, Y, Y),), 3),
        ((X, Y, Y), 3),
        (((X,),), 1),
        ((X,), 1),
        ((([X, X], Y),), 2),
        (([X, X],), 1),
        ((X.tolist(),), 1),
    ],
)
def test_a_tuple_without_targets_has_them_in_it(given, parts):
    data = Inputs.of(*given)
    assert len(data.arrays) == parts
    assert data.examples == 6


def test_a_list_of_arrays_is_several_inputs():
    (inputs,) = Inputs.of([X, X[:, :1]]).arrays
    assert [part.shape for part in inputs] == [(6, 2), (6, 1)]


def test_floats_become_those_of_keras():
    x, y = Inputs.of(X, tf.constant(X)).arrays
    assert (x.dtype, y.dtype) == (np.float32, tf.float32)
    assert Inputs.of(X, Y).arrays[1].dtype == Y.dtype


@pytest.mark.parametrize(("given", "size"), [((None, None), 32), ((4, None), 4), ((None, 2), 3), ((4, 2), 4)])
def test_the_size_of_batches_of_arrays(given, size):
    size_given, batches = given
    function: Any = Inputs.of(X, Y).dataset_function(size_given, batches=batches, shuffle=False)
    assert function.batch_size == size


def test_a_batch_size_for_batches():
    with raises(UsageError, "batch-size-without-arrays"):
        Inputs.of(tf.data.Dataset.range(3)).dataset_function(8, shuffle=False)


def test_the_end_of_arrays_is_held_out():
    training, held_out = Inputs.of(X, Y, class_weight={0: 2.0}).split(0.5)
    assert training.arrays[1].tolist() == [0, 1, 2]
    assert training.arrays[2].tolist() == [2, 1, 1]
    assert [part.tolist() for part in held_out.arrays] == [X[3:].tolist(), [3, 4, 5]]


def test_class_weights_of_a_function():
    batches = tf.data.Dataset.from_tensors((X, Y))
    weighted = Inputs.of(lambda shard: batches.shard(shard.count, shard.index), class_weight={5: 3.0})
    ((_, _, weights),) = weighted.dataset_function(None, shuffle=False)(Shard())
    assert weights.numpy().tolist() == [1, 1, 1, 1, 1, 3]


@pytest.mark.parametrize("data", [5, None, "x", {1, 2}])
def test_what_is_no_data(data):
    with raises(TrainingError, "unsupported-data-type"):
        Inputs.of(data).dataset_function(None, shuffle=False)
