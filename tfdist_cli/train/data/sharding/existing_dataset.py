"""Shards of a dataset that exists already: it is a value of the process that made it, and is made again on others."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.pipeline import skip_batches
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.tf_compat.data import (
    calls_python,
    draws_an_order,
    draws_in_functions,
    recreated_on,
    repeats_an_order,
    replace_older_datasets,
)
from tfdist_cli.train.tf_compat.eager_context import remote_caller
from tfdist_cli.train.tf_compat.op_errors import shortened

_HERE = "/device:CPU:0"
log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class DatasetShards:
    """A dataset function of an existing dataset, on any task.

    A dataset is a value of the process that made it. A worker of parameter servers receives its graph from the chief.

    Args:
        dataset: the dataset of batches.
    """

    dataset: tf.data.Dataset

    def __call__(self, shard: Shard) -> tf.data.Dataset:
        """Returns every `shard.count`-th batch.

        Workers that each read all data shuffle it in different orders.

        Raises:
            TrainingError: there are several shards, and each would be one of another order; or the dataset cannot be
                used on this task.
        """
        if shard.count > 1 and draws_in_functions(self.dataset):
            raise TrainingError(
                "the dataset draws its order within a function, or which elements come: in another way on each task, "
                "so the tasks would not divide it",
                code="order-drawn-in-function",
                hint="give what draws a seed, such as dataset.shuffle(1000, seed=1) or "
                "tf.data.Dataset.sample_from_datasets(..., seed=1)",
            )
        here, copy = _device_of_remote_call(), shard.worker if shard.count == 1 else 0
        if here is not None:
            whole = _sent(self.dataset, here, copy)
        elif shard.count > 1 and draws_an_order(self.dataset):
            whole = _in_one_order(self.dataset)
        elif copy and repeats_an_order(self.dataset):
            whole = _in_another_order(self.dataset, copy)
        else:
            whole = self.dataset
        return skip_batches(whole.shard(shard.count, shard.index), shard.step)


def _in_one_order(data: tf.data.Dataset) -> tf.data.Dataset:
    """Makes a dataset again that is shuffled without a seed: a shard of each order of its own would not be a division.

    Raises:
        TrainingError: the dataset uses a table or a variable.
    """
    with tf.device(_HERE):
        return _made_again(
            data,
            _HERE,
            "the dataset is shuffled without a seed, in another order on each task, and uses a table or a variable",
            "give it a seed: dataset.shuffle(1000, seed=1)",
        )


def _in_another_order(data: tf.data.Dataset, worker: int) -> tf.data.Dataset:
    """Makes a dataset again that is shuffled with a seed: workers that read all of it would read the same batches.

    One that cannot be made again keeps its order: it uses a table or a variable, or is too large for a graph.
    """
    try:
        with tf.device(_HERE):
            return recreated_on(data, _HERE, worker)
    except tf.errors.OpError as error:
        log.warning(
            "all workers read the same batches: the dataset is shuffled with one seed on each, and cannot be made "
            "again with another (%s); pass a function that makes it with shard.worker in its seed",
            shortened(error).message,
        )
        return data


def make_older_datasets_again() -> None:
    """Lets the program use datasets that it made before this task got its name in the cluster.

    Using one raises a `TrainingError` if it uses a table or a variable.
    """
    replace_older_datasets(
        lambda older: _made_again(
            older,
            _HERE,
            "the dataset is older than the cluster and uses a table or a variable, such as a StringLookup's",
            "call tfdist.is_chief() before you make the layer and the dataset, or use the layer in the model",
        )
    )


def _device_of_remote_call() -> str | None:
    """Returns this task's device if operations run on another task now; None if they run on this one."""
    caller = remote_caller()
    return caller and f"/job:{caller[0]}/replica:0/task:{caller[1]}/device:CPU:0"


def _sent(data: tf.data.Dataset, here: str, worker: int) -> tf.data.Dataset:
    """Copies a dataset of this task to the task on which operations run now.

    Args:
        data: a dataset of this task.
        here: this task's device.
        worker: see `recreated_on`.

    Raises:
        TrainingError: the dataset calls Python code of this process.
    """
    if calls_python(data):
        raise TrainingError(
            "the dataset calls Python code (py_function, numpy_function, from_generator), which workers do not have",
            code="python-code-in-data",
            hint="pass a function that makes the dataset and returns its shard: "
            "tfdist.predict(model, lambda shard: make_dataset().shard(shard.count, shard.index))",
        )
    return _made_again(
        data,
        here,
        "the dataset uses a table or a variable, such as a StringLookup's, and neither can be sent to the workers",
        "use the layer in the model, or pass a function that makes the table and the dataset: "
        "tfdist.fit(model, lambda shard: make_dataset().shard(shard.count, shard.index))",
        worker,
    )


def _made_again(data: tf.data.Dataset, here: str, problem: str, hint: str, worker: int = 0) -> tf.data.Dataset:
    """Makes a dataset of this task again, on the device on which operations run now.

    Args:
        data: the dataset.
        here: this task's device.
        problem: the message if the dataset uses a table or a variable.
        hint: what to do then.
        worker: see `recreated_on`.

    Raises:
        TrainingError: the dataset uses a table or a variable.
    """
    try:
        return recreated_on(data, here, worker)
    except tf.errors.FailedPreconditionError as error:
        raise TrainingError(f"{problem}: {shortened(error).message}", code="table-in-dataset", hint=hint) from error
