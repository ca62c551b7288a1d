"""Wide & deep click prediction on lines in Criteo's format: Cheng et al., Wide & Deep Learning (2016)."""

import functools
import logging

import keras

from tfdist_cli.datasets import click_generator, criteo
from tfdist_cli.errors import UsageError


def model(params):
    numbers = keras.Input((criteo.NUMBERS,), name="numbers")
    categories = keras.Input((criteo.CATEGORIES,), dtype="int64", name="categories")
    # All columns share both tables: each category has one row in each.
    vectors = keras.layers.Embedding(params["rows"], params["dim"], name="deep_table")(categories)
    weights = keras.layers.Embedding(params["rows"], 1, embeddings_initializer="zeros", name="wide_table")(categories)
    missing = keras.ops.cast(keras.ops.equal(numbers, criteo.MISSING_NUMBER), "float32")
    deep = keras.layers.Concatenate()([keras.layers.Flatten()(vectors), numbers, missing])
    for units in params["hidden"]:
        deep = keras.layers.Dense(units, activation="relu")(deep)
    linear = keras.layers.Dense(1)(keras.layers.Concatenate()([deep, numbers, missing]))
    logit = keras.layers.Add()([linear, keras.ops.sum(weights, axis=1)])
    classifier = keras.Model({"numbers": numbers, "categories": categories}, logit)
    classifier.compile(
        # Most rows of a table get few gradients, each of about 1 / batch_size: Keras's 0.1 would hide them.
        optimizer=keras.optimizers.Adagrad(params["learning_rate"], initial_accumulator_value=1e-4),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.AUC(from_logits=True, name="auc"),
            keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy"),  # of a logit: a probability of 1/2
        ],
    )
    return classifier


def dataset(params, split, shard):
    files, part = params["files"], {"index": shard.index, "count": shard.count}
    if files is None:
        lines = generated(params["examples"].get(split, 0), split).lines
        return criteo.from_lines(lines, params["rows"], name=f"the generated {split} data", **part)
    if not isinstance(files, dict) or split not in files:
        raise UsageError(
            f"params.files has no files of the split {split!r}",
            code="unknown-split",
            hint="--set 'params.files={train: clicks/train*, test: clicks/test*}'; without test: --set evaluate=null",
        )
    return criteo.read(files[split], params["rows"], **part)


def callbacks(params):
    if params["files"] is not None or "test" not in params["examples"]:
        return []  # the best AUC is known only for generated lines of the test split
    return [Comparison(generated(params["examples"]["test"], "test").best_auc)]


# A task needs the same lines several times: for their number, for each shard, for the best AUC.
generated = functools.cache(click_generator.generate)


class Comparison(keras.callbacks.Callback):
    """Logs the test AUC and the best possible one, which the probabilities of the labels give."""

    def __init__(self, best):
        super().__init__()
        self._best = best

    def on_epoch_end(self, epoch, logs=None):
        """Logs both after each epoch that ends with a test."""
        if logs and "val_auc" in logs:
            logging.getLogger("tfdist").info("test AUC %.4f of a best possible %.4f", logs["val_auc"], self._best)
