"""The recipe of `tfdist.spark.fit`: a model function, and Parquet files with its data.

Params:
    model: the function that returns the compiled model, `package.module:function`.
    folder: the folder of its package, which is added to Python's path.
    arguments: the function's keyword arguments.
    data: the pattern of the Parquet files of each split, such as `{"train": "/data/*.parquet"}`.
    features: the columns of the model's input, or a dictionary of those of each named input.
    label: the column of the targets.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.data.parquet import read_parquet
from tfdist_cli.train.data.shard import Shard

Features = Sequence[str] | Mapping[str, Sequence[str]]
"""The columns of the only input, or those of each input by its name."""


def model(params: dict[str, Any]) -> Any:
    """Returns the model that the user's function makes.

    Raises:
        UsageError: the function cannot be imported.
        TrainingError: it returns no compiled model.
    """
    made = _function(params["model"], params["folder"])(**params["arguments"])
    if not isinstance(made, keras.Model) or not made.compiled:
        what = "a model that is not compiled" if isinstance(made, keras.Model) else type(made).__name__
        raise TrainingError(
            f"the model function returned {what}",
            code="not-a-compiled-model",
            hint="return a Keras model after model.compile(optimizer=…, loss=…)",
        )
    return made


def _function(name: str, folder: str | None) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = attrgetter(path)(importlib.import_module(module))
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but a module that it imports does not
        raise UsageError(
            f"this task cannot import the model function {name}: {error}",
            code="no-such-module",
            hint="put its module at the same path on all hosts, or install the package it is in",
        ) from None
    if not callable(found):
        raise UsageError(f"{name} is no function", code="no-such-module", hint="name a function of the module")
    return found


def dataset(params: dict[str, Any], split: str, shard: Shard) -> tf.data.Dataset:
    """Returns the examples of a shard."""
    features, label = params["features"], params["label"]
    columns = dict.fromkeys([*feature_columns(features), label])
    rows = read_parquet(params["data"][split], list(columns), shard)
    return rows.map(lambda row: (inputs(row, features), row[label]))


def feature_columns(features: Features) -> list[str]:
    """Returns the columns that features name."""
    if isinstance(features, Mapping):
        return [name for columns in features.values() for name in columns]
    return list(features)


def inputs(row: Mapping[str, Any], features: Features, rank: int = 0) -> Any:
    """Returns the inputs of an example, or of a batch of examples.

    Args:
        row: the columns.
        features: the columns of each input.
        rank: the rank of a column of scalars: 0 for one example, 1 for a batch.

    Returns:
        A vector for each input, or a matrix of the batch: the values of its columns in their order. They are int64 if
        all columns have integers or booleans, otherwise float32.
    """
    if isinstance(features, Mapping):
        return {name: inputs(row, columns, rank) for name, columns in features.items()}
    values = [tf.convert_to_tensor(row[name]) for name in features]
    dtype = tf.float32 if any(value.dtype.is_floating for value in values) else tf.int64
    parts = [tf.cast(value[..., tf.newaxis] if value.shape.rank == rank else value, dtype) for value in values]
    return tf.concat(parts, axis=-1)
