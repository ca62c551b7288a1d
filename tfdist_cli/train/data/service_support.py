"""Checks whether the data workers of `tf.data`'s service can run a pipeline.

They cannot run one that calls Python code of this process. Several data workers also cannot run one that counts
elements, since each would count its own; nor one whose last batch of a pass cannot be merged with those of the others.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.data import batch_size, calls_python, counting_method, grouping_method, transformations


def check_served(dataset: tf.data.Dataset, workers: int) -> None:
    """Rejects a pipeline that would give other elements on data workers than in one process.

    Args:
        dataset: the pipeline. A function of `flat_map` or `interleave` may count: it counts within one element.
        workers: the number of data workers.

    Raises:
        TrainingError: names the transformation that data workers cannot do.
    """
    if calls_python(dataset):
        raise TrainingError(
            "the data calls Python code (py_function, numpy_function, from_generator), which data workers do not have",
            code="python-code-in-data",
            hint="write it with TensorFlow operations, or use train.share: split",
        )
    if workers == 1:
        return
    for part in transformations(dataset):
        what = counting_method(part)
        if what:
            raise TrainingError(
                f"the data uses {what}, which counts elements: each of {workers} data workers would count its own",
                code="data-counts-elements",
                hint="do it before the dataset is made, or inside flat_map or interleave; or use one data worker, or "
                "train.share: split",
            )
    what = grouping_method(dataset)
    if what and not batch_size(dataset):
        raise TrainingError(
            f"the data uses {what}: each of {workers} data workers would end a pass with an incomplete group",
            code="data-groups-elements",
            hint="end the pipeline with .batch(n), and map before it: its incomplete batches are merged; or use one "
            "data worker, or train.share: split",
        )
