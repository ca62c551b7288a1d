"""Predictions of tasks that run the same program: each predicts its own groups, and all receive all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.spec.sections.updates import EmbeddingRule
from tfdist_cli.train.cluster.all_reduce.between_tasks import summing
from tfdist_cli.train.cluster.join import ClusterContext
from tfdist_cli.train.data.comparison import check_same_arrays
from tfdist_cli.train.data.python_data.dataset_function import PythonData
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.prediction.function import Leaves, PredictionFunction
from tfdist_cli.train.prediction.groups import Groups
from tfdist_cli.train.prediction.reuse import last_or_new

WORD = 8
"""Bytes of the integers in which predictions are sent."""


def predict_mirrored(context: ClusterContext, model: keras.Model, groups: Groups) -> tuple[Any, Iterator[Leaves]]:
    """Predicts groups; see `predict_groups`."""
    environment = context.environment
    index = environment.members.index(environment.task) if groups.count > 1 else 0
    # TensorFlow copies a table whose rows training has changed, each time all of it is read. GPUs do so in little time.
    least = None if tf.config.list_logical_devices("GPU") else EmbeddingRule().min_bytes
    with context.strategy.scope():
        make = partial(PredictionFunction, model, groups.input_spec, least)
        function = last_or_new(model, groups.input_spec, [context.strategy], make)
        most = tf.constant(groups.size, tf.int64)
    sums = sum_of_tasks(context)
    if groups.count > 1 and not isinstance(groups.function, PythonData):
        data = {"data to predict": lambda _: groups.function(Shard())}
        check_same_arrays(data, lambda own: np.asarray(sums(tf.constant(own, tf.float64))), is_chief=index == 0)
    iterator = iter(groups.batches(index))

    def predicted() -> list[tf.Tensor]:
        """The next group of this task: the number of its batches, and the outputs."""
        with context.strategy.scope(), context.computing():
            return function.compiled(iterator, most)

    found = _alone(predicted) if groups.count == 1 else _together(predicted, index, groups, sums, function.types)
    return function.outputs, map(function.leaves, found)


def _alone(predicted: Callable[[], list[tf.Tensor]]) -> Iterator[list[np.ndarray]]:
    while True:
        batches, *leaves = predicted()
        if not int(batches):
            return
        yield [leaf.numpy() for leaf in leaves]


def _together(
    predicted: Callable[[], list[tf.Tensor]],
    index: int,
    groups: Groups,
    sums: Callable[[tf.Tensor], tf.Tensor],
    types: list[tf.DType],
) -> Iterator[list[np.ndarray]]:
    """Yields the groups of all tasks, one of each in a round. All tasks have to take as many."""
    while True:
        batches, *leaves = predicted()
        sent = [tf.io.serialize_tensor(leaf).numpy() for leaf in leaves] if int(batches) else []
        lengths = np.zeros([groups.count, len(types)], np.int64)
        lengths[index, : len(sent)] = [len(each) for each in sent]
        lengths = np.asarray(sums(tf.constant(lengths)))
        if not lengths.any():
            return
        words = -(-lengths.sum(axis=1) // WORD)
        ends = np.cumsum(words) * WORD
        room = np.zeros(int(ends[-1]), np.uint8)
        own = np.frombuffer(b"".join(sent), np.uint8)
        start = int(ends[index] - words[index] * WORD)
        room[start : start + len(own)] = own
        received = np.asarray(sums(tf.constant(room.view(np.int64)))).view(np.uint8).tobytes()
        for task in np.flatnonzero(words):
            yield _parsed(received, int(ends[task] - words[task] * WORD), lengths[task], types)


def _parsed(received: bytes, start: int, lengths: np.ndarray, types: list[tf.DType]) -> list[np.ndarray]:
    ends = start + np.cumsum(lengths)
    pieces = [received[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return [tf.io.parse_tensor(piece, dtype).numpy() for piece, dtype in zip(pieces, types, strict=True)]


def sum_of_tasks(context: ClusterContext) -> Callable[..., tf.Tensor]:
    """Returns a function that sums a tensor over all tasks."""
    return summing(context.strategy, len(context.environment.members), context.all_reduce)
