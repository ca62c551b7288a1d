"""The scope of a step: what it reads, and when."""

import keras
import pytest
import tensorflow as tf

from tfdist_cli.train.model.assignments import Assignments, counters_read_after


@pytest.mark.parametrize("trainable", [False, True])
def test_counters_are_read_after_what_a_step_awaits(trainable):
    counter = keras.Variable(3, dtype="int64", trainable=trainable)

    @tf.function(autograph=False)
    def step(token):
        awaited = tf.identity(token)
        with counters_read_after([awaited]), Assignments([]):
            first = tf.convert_to_tensor(counter)
        with Assignments([]):
            tf.convert_to_tensor(counter)
        return first

    graph = step.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    reads = [each for each in graph.get_operations() if each.type == "ReadVariableOp"]
    assert len(reads) == 2
    assert [[each.type for each in read.control_inputs] for read in reads] == [[] if trainable else ["Identity"], []]
    assert int(step(0)) == 3


def test_the_values_of_an_update_are_awaited_after_it():
    weight, counter = keras.Variable(1.0), keras.Variable(3, dtype="int64", trainable=False)
    optimizer = keras.optimizers.SGD()
    optimizer.build([weight])

    @tf.function(autograph=False)
    def step(token):
        def update(*_):
            return [tf.negative(token)]

        with counters_read_after([token]):
            scope = Assignments([(weight, token)], update)
        with scope:
            scope.apply_gradients(optimizer, [token], [weight])
            return tf.convert_to_tensor(counter)

    graph = step.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    (read,) = [each for each in graph.get_operations() if each.type == "ReadVariableOp"]
    assert [each.type for each in read.control_inputs] == ["Neg"]
