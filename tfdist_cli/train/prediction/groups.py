"""The data of a prediction in groups of batches, which tasks take in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.length import cardinality
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.tf_compat.data import in_random_order

MOST_BATCHES = 32
"""The most batches in a group."""
_UNKNOWN_BATCHES = 8
"""The batches in a group of data whose length is not known."""
_GROUPS_EACH = 4
"""The groups that each task predicts at least, if there are enough batches: they end at about the same time."""


@dataclass(frozen=True)
class Groups:
    """The data in groups of batches: group g is predicted by task g modulo the number of tasks.

    Every task reads all of the data in the same order, and predicts the batches of its own groups.

    Args:
        function: a shard → its batches.
        size: batches in a group; the last one may have fewer.
        count: how many tasks predict.
        steps: batches to predict; None for all.
        length: how many batches there are in all; None if this is not known.
    """

    function: DatasetFunction
    size: int
    count: int
    steps: int | None = None
    length: int | None = None

    @classmethod
    def of(cls, function: DatasetFunction, count: int, steps: int | None, size: int | None = None) -> Groups:
        """Divides data into groups.

        Args:
            function: a shard → its batches.
            count: how many tasks predict.
            steps: batches to predict; None for all.
            size: batches in a group; None lets it follow from the data.

        Raises:
            TrainingError: the data never ends, or several tasks would read it in different orders.
        """
        whole = checked(function, Shard())
        if steps is None and tf.get_static_value(whole.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise TrainingError(
                "the data to predict never ends",
                code="endless-prediction-data",
                hint="remove .repeat(), or set the number of batches: tfdist.predict(model, data, steps=...)",
            )
        if count > 1 and in_random_order(whole):
            raise TrainingError(
                "the data to predict is shuffled, and each task would read it in another order",
                code="prediction-data-shuffled",
                hint="leave .shuffle() out, and set deterministic=True where the data is read in parallel",
            )
        batches = cardinality(whole)
        if steps is not None:
            batches = steps if batches is None else min(batches, steps)
        if size is None:
            size = _UNKNOWN_BATCHES if batches is None else -(-batches // (_GROUPS_EACH * count))
            size = max(1, min(size, MOST_BATCHES))
        return cls(function, size, count, steps, batches)

    @property
    def input_spec(self) -> Any:
        """The `tf.TypeSpec`s of the inputs of a batch."""
        return _inputs(checked(self.function, Shard()).element_spec)

    def batches(self, index: int, first: int = 0) -> tf.data.Dataset:
        """Returns the inputs of the batches of one task's groups, from one group on.

        Args:
            index: the task.
            first: the first group.
        """
        whole = checked(self.function, Shard())
        if self.steps is not None:
            whole = whole.take(self.steps)

        def is_own(number: tf.Tensor, _batch: Any) -> tf.Tensor:
            group = number // self.size
            return tf.logical_and(tf.equal(group % self.count, index), group >= first)

        own = whole if self.count == 1 and not first else whole.enumerate().filter(is_own).map(lambda _, batch: batch)
        ordered = tf.data.Options()
        ordered.deterministic = True
        in_parts = isinstance(whole.element_spec, tuple)  # `map` passes the parts of a tuple one by one
        inputs = own.map(lambda *batch: _inputs(batch if in_parts else batch[0]))
        return inputs.prefetch(2).with_options(ordered)


def _inputs(batch: Any) -> Any:
    """Returns the inputs of a batch `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`."""
    return keras.utils.unpack_x_y_sample_weight(batch)[0]
