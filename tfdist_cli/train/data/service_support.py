"""Which pipelines data workers can run.

None that calls back into this process; and where there are several of them, none that counts its elements, since each
would count its own, and none whose last batch of a pass, which each of them ends with, cannot be put together again.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.data import batch_size, calls_python, counting_method, grouping_method, transformations


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
    for part in transformations(dataset):
        what = counting_method(part)
        if what:
            raise TrainingError(
                f"the data goes through {what}, which counts; each of {workers} data workers would count for itself",
                hint="do it before the dataset is made, or inside of flat_map or interleave; or take one data worker, "
                "or train.share: split",
            )
    what = grouping_method(dataset)
    if what and not batch_size(dataset):
        raise TrainingError(
            f"the data goes through {what}, and each of {workers} data workers would end a pass with a smaller one",
            hint="let .batch(n) be the last thing the pipeline does (map before it): its last ones are put together "
            "again; or take one data worker, or train.share: split",
        )
