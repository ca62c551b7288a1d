"""A convolutional and recurrent network that reads lines of handwritten digits, trained with CTC.

After B. Shi, X. Bai, C. Yao, "An End-to-End Trainable Neural Network for Image-based Sequence Recognition" (2015).
"""

import keras
import tensorflow as tf
from keras import layers

from tfdist_cli.datasets import lines
from tfdist_cli.errors import UsageError


def model(params):
    reader = keras.Sequential([keras.Input((params["height"], params["width"], 1))])
    for filters in params["filters"]:
        reader.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        # Keras's momentum of 0.99 averages over hundreds of steps, which is much of this training.
        reader.add(layers.BatchNormalization(momentum=0.9))
        reader.add(layers.ReLU())
        reader.add(layers.MaxPooling2D())
    # A column of the image, with all its channels, is a step of the sequence.
    reader.add(layers.Permute((2, 1, 3)))
    _, steps, rows, channels = reader.output_shape
    most = params["length"][1]
    if steps < 2 * most - 1:
        raise UsageError(
            f"{steps} steps are too few to read {most} digits: CTC needs one for each, and one between equal ones",
            code="image-too-narrow",
            hint="make the image wider, or list fewer filters: each of them halves the width",
        )
    reader.add(layers.Reshape((steps, rows * channels)))
    reader.add(layers.Bidirectional(layers.LSTM(params["units"], return_sequences=True)))
    reader.add(layers.Dense(lines.CLASSES))
    reader.compile(
        optimizer=keras.optimizers.Adadelta(float(params["learning_rate"])),
        loss=keras.losses.CTC(),
        metrics=[SequenceAccuracy(), DigitErrorRate()],
    )
    return reader


def dataset(params, split, shard):
    if split not in params["lines"]:
        raise UsageError(
            f"params.lines has no split {split!r}",
            code="unknown-split",
            hint=f"set evaluate.split to {' or '.join(params['lines'])}, or add the split to params.lines",
        )
    written = lines.load(
        split, count=params["lines"][split], length=params["length"], height=params["height"], width=params["width"]
    )
    return tf.data.Dataset.from_tensor_slices(written).shard(shard.count, shard.index)


class SequenceAccuracy(keras.metrics.Mean):
    """The fraction of lines that are read without a mistake."""

    def __init__(self, name="sequence_accuracy", **kwargs):
        super().__init__(name=name, **kwargs)

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(mistakes(y_true, y_pred) == 0, sample_weight)


class DigitErrorRate(keras.metrics.Metric):
    """The number of mistakes divided by the number of digits in the lines."""

    def __init__(self, name="digit_error_rate", **kwargs):
        super().__init__(name=name, **kwargs)
        self.mistakes = self.add_weight(initializer="zeros", name="mistakes")
        self.digits = self.add_weight(initializer="zeros", name="digits")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weights = 1.0 if sample_weight is None else keras.ops.cast(sample_weight, "float32")
        digits = keras.ops.sum(keras.ops.cast(y_true != lines.BLANK, "float32"), axis=1)
        self.mistakes.assign_add(keras.ops.sum(mistakes(y_true, y_pred) * weights))
        self.digits.assign_add(keras.ops.sum(digits * weights))

    def result(self):
        return keras.ops.divide_no_nan(self.mistakes, self.digits)


def mistakes(labels, logits):
    """Returns the Levenshtein distance of each line to what the model reads, float32 of shape (batch,).

    The model reads the likeliest label of each step, without repetitions and blanks.
    """
    batch, steps = keras.ops.shape(logits)[:2]
    read, _ = keras.ops.ctc_decode(logits, keras.ops.full((batch,), steps, "int32"), mask_index=lines.BLANK)
    # After the last digit of a line, ctc_decode has -1.
    read = keras.ops.maximum(read[0], lines.BLANK)
    written = keras.ops.cast(labels, "int32")
    distances = tf.edit_distance(tf.sparse.from_dense(read), tf.sparse.from_dense(written), normalize=False)
    # tf.edit_distance has no static shape.
    return tf.reshape(distances, (batch,))
