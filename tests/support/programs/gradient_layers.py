"""Layers whose weights are read within gradient functions, tapes and functions of their own."""

import keras
import tensorflow as tf

layers = keras.layers


class _Kernel(layers.Layer):
    """Has a square kernel."""

    def build(self, shape):
        size = shape[-1]
        self.kernel = self.add_weight(shape=(size, size), initializer="glorot_uniform", name="kernel")
        self.idle = self.add_weight(shape=(), initializer="zeros", trainable=False, name="idle")


class Recomputed(_Kernel):
    """Its gradient computes it again."""

    def call(self, x):
        return tf.recompute_grad(lambda x: tf.tanh(tf.matmul(x, self.kernel) + self.idle))(x)


class Custom(_Kernel):
    """Has a gradient of its own, which is another one than TensorFlow's."""

    def call(self, x):
        @tf.custom_gradient
        def product(x):
            def gradient(upstream, variables=None):
                (kernel,) = variables
                return tf.matmul(upstream, kernel, transpose_b=True), [0.5 * tf.matmul(x, upstream, transpose_a=True)]

            return tf.matmul(x, self.kernel), gradient

        return product(x)


class Penalized(_Kernel):
    """Uses a gradient with respect to its own kernel."""

    def call(self, x):
        with tf.GradientTape() as tape:
            y = tf.reduce_mean(tf.square(tf.matmul(x, self.kernel)))
        self.add_loss(tf.reduce_sum(tf.square(tape.gradient(y, self.kernel))))
        return x


class Function(_Kernel):
    """Its `call` is a function of TensorFlow's, with a condition that AutoGraph converts."""

    @tf.function
    def call(self, x):
        y = tf.matmul(x, self.kernel)
        if tf.reduce_sum(self.kernel) > 0:  # not of the batch: workers have parts of it
            y = 0.9 * y
        return y


class Dropping(layers.Layer):
    """Draws random numbers within a function of TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.3, seed=3)

    @tf.function
    def call(self, x, training=False):
        return self.dropout(x, training=training)


class Looked(layers.Layer):
    """Looks up rows of a table within a gradient function; which ones is no argument of it."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        scale = tf.ones([], tf.float32)
        return tf.recompute_grad(lambda scale: scale * tf.reduce_mean(self.table(ids), axis=1))(scale)


def every():
    """One of each that computes with what it is given, and that can be called under every strategy's scope."""
    return [Recomputed(), Custom(), Function()]
