"""Which pipelines data workers can run.

None that calls back into this process; and where there are several of them, none that counts its elements, since each
would count its own, and none whose last batch of a pass, which each of them ends with, cannot be put together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError

_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
_COUNTING = {
    "_TakeDataset": "take",
    "_SkipDataset": "skip",
    "_ZipDataset": "zip (or enumerate)",
    "_ScanDataset": "scan",
    "_TakeWhileDataset": "take_while",
    "CacheDataset": "cache",
}
_GROUPING = {
    "_BatchDataset": "batch",
    "_ParallelBatchDataset": "batch",
    "_PaddedBatchDataset": "padded_batch",
    "_MapAndBatchDataset": "map_and_batch",
    "_RebatchDataset": "rebatch",
    "_WindowDataset": "window",
    "_GroupByWindowDataset": "group_by_window (or bucket_by_sequence_length)",
}
_UNGROUPING = {"_UnbatchDataset", "_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset"}


def check_served(dataset: tf.data.Dataset, workers: int) -> None:
    """Refuses a pipeline whose elements would not be the same when data workers make them.

    Args:
        dataset: the pipeline. What a function of `flat_map` or `interleave` counts is within one element, here as
            elsewhere.
        workers: how many data workers run it.

    Raises:
        TrainingError: naming what they cannot do.
    """
    if calls_python(dataset):
        raise TrainingError(
            "the data calls Python code (py_function, numpy_function, from_generator); data workers don't have it",
            hint="write it in TensorFlow's operations, or take train.share: split",
        )
    if workers == 1:
        return
    for part in _parts(dataset):
        what = _counts(part)
        if what:
            raise TrainingError(
                f"the data goes through {what}, which counts; each of {workers} data workers would count for itself",
                hint="do it before the dataset is made, or inside of flat_map or interleave; or take one data worker, "
                "or train.share: split",
            )
    what = _groups(dataset)
    if what:
        raise TrainingError(
            f"the data goes through {what}, and each of {workers} data workers would end a pass with a smaller one",
            hint="let .batch(n) be the last thing the pipeline does (map before it): its last ones are put together "
            "again; or take one data worker, or train.share: split",
        )


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Whether the pipeline calls back into the process that made it."""
    return any(_PYTHON & set(_operations(part)) for part in _parts(dataset))


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """The number of examples in a batch, when the last thing that the pipeline does is `batch`."""
    for part in _parts(dataset):
        if type(part).__name__ in ("_BatchDataset", "_ParallelBatchDataset"):
            size = tf.get_static_value(part._batch_size)
            return None if size is None else int(size)
        if type(part).__name__ not in ("_PrefetchDataset", "_OptionsDataset"):
            return None
    return None


def _counts(part: Any) -> str | None:
    name = type(part).__name__
    if name == "_ShardDataset" and tf.get_static_value(part._num_shards) != 1:
        return "shard"
    if name in _GROUPING and name != "_GroupByWindowDataset" and _drops_remainder(part):
        return f"{_GROUPING[name]}(..., drop_remainder=True)"
    return _COUNTING.get(name)


def _drops_remainder(part: Any) -> bool:
    """TensorFlow has a tensor there, or a Python value."""
    name = "_drop_remainder_t" if hasattr(part, "_drop_remainder_t") else "_drop_remainder"
    return bool(tf.get_static_value(tf.convert_to_tensor(getattr(part, name))))


def _groups(dataset: tf.data.Dataset) -> str | None:
    """What makes one element of several, last of all, if it is not a `batch` that can be put together again."""
    for part in _parts(dataset):
        name = type(part).__name__
        if name in _UNGROUPING:
            return None
        if name in _GROUPING:
            return None if batch_size(dataset) else _GROUPING[name]
    return None


def _parts(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The dataset and all that it is made of, the last first."""
    yield dataset
    for part in dataset._inputs():
        yield from _parts(part)


def _operations(part: Any) -> Iterator[str]:
    for wrapper in part._functions():
        graph = wrapper.function.graph.as_graph_def()
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            yield from (node.op for node in nodes)
