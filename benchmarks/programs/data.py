"""The data that every program trains on."""

import tensorflow as tf

from benchmarks.workload import BATCHES, CLASSES, FEATURES, IDS, LENGTH, SEEN, Workload


def batches(workload: Workload) -> tf.data.Dataset:
    """Returns generated batches in MNIST's shape, float32 (batch, 784) and int64 (batch,), repeated forever.

    The labels of the MLP follow from the pixels, those of the CNN from a pattern in them, so that a model that does
    not learn is noticed. They are drawn where the dataset is created, and kept in memory as whole batches: reading them
    costs next to nothing.
    """
    shape = [BATCHES, workload.batch_size]
    if workload.model == "embedding":
        return _numbers(workload, shape)
    if workload.model == "transformer":
        return _texts(shape)
    pixels = tf.random.stateless_uniform([*shape, FEATURES], [0, 0], minval=-0.5, maxval=0.5)
    judge = tf.random.stateless_normal([FEATURES, CLASSES], [0, 1])
    labels = tf.argmax(tf.linalg.matmul(pixels, judge), axis=2)
    if workload.model == "cnn":
        pixels += 0.2 * tf.gather(tf.transpose(judge), labels)
    return tf.data.Dataset.from_tensor_slices((pixels, labels)).repeat().prefetch(tf.data.AUTOTUNE)


def _numbers(workload: Workload, shape: list[int]) -> tf.data.Dataset:
    """Row numbers, int32 (batch, 16): the label follows from the first one, of a thousand; the others are random."""
    rows = workload.rows // workload.tables
    first = tf.random.stateless_uniform([*shape, 1], [0, 2], maxval=1000, dtype=tf.int32)
    others = tf.random.stateless_uniform([*shape, IDS - 1], [0, 3], maxval=rows, dtype=tf.int32)
    labels = tf.cast(first[..., 0] % CLASSES, tf.int64)
    data = tf.data.Dataset.from_tensor_slices((tf.concat([first, others], axis=2), labels))
    return data.repeat().prefetch(tf.data.AUTOTUNE)


def _texts(shape: list[int]) -> tf.data.Dataset:
    """Word numbers, int32 (batch, 64), and for each the next one of the vocabulary."""
    words = tf.random.stateless_uniform([*shape, LENGTH], [0, 4], maxval=SEEN, dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((words, (words + 1) % SEEN)).repeat().prefetch(tf.data.AUTOTUNE)
