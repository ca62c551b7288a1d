"""What the variables of an update share."""

import tensorflow as tf

from tfdist_cli.train.optimizers.kernels import Update


def test_numbers_are_shared_by_variables_and_tensors_are_not():
    variable = tf.Variable([1.0])

    @tf.function(autograph=False)
    def function(one, other):
        update = Update(None, variable, (), tf.constant([1.0]), tf.constant(0.1), tf.constant(3, tf.int64))
        assert update.scalar(0.5) is update.scalar(0.5)
        assert update.power(0.5) is update.power(0.5)
        return update.power(0.5), update.power(one), update.power(other)

    values = function(tf.constant(2.0), tf.constant(3.0))
    assert [value.numpy() for value in values] == [0.0625, 16.0, 81.0]
