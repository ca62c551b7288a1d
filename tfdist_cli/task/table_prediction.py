"""Predictions for the rows of a table, in the executors of Spark."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist_cli.errors import UsageError
from tfdist_cli.task.table_recipe import Features, feature_columns, inputs

_loaded: dict[str, Any] = {}
"""The model of this process, by the digest of its file: a process of Spark predicts many parts."""


def load_model(content: bytes) -> keras.Model:
    """Returns the model of a `.keras` file, not compiled.

    Args:
        content: the file's bytes.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest not in _loaded:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            path.write_bytes(content)
            _loaded.clear()
            _loaded[digest] = keras.saving.load_model(path, compile=False)
    return _loaded[digest]


def predicted(model: Any, columns: Mapping[str, Any], features: Features) -> np.ndarray:
    """Returns the outputs of a batch.

    Args:
        model: the Keras model.
        columns: arrays of shape [batch] or [batch, width].
        features: the columns of each input.

    Returns:
        float32 of shape [batch, width]: the model's only output, flattened.

    Raises:
        UsageError: the model has several outputs.
    """
    outputs = model.predict_on_batch(inputs(columns, features, rank=1))
    if not isinstance(outputs, np.ndarray):
        raise UsageError(
            "the model has several outputs, and a column of predictions has those of one",
            code="several-outputs",
            hint="let the model concatenate them, or write predictions with tfdist predict",
        )
    return outputs.reshape(len(outputs), -1).astype(np.float32)


def batch_predictor(content: bytes, features: Features, prefix: str = "") -> Callable[[Any], np.ndarray]:
    """Returns a function that predicts the rows of an Arrow record batch.

    Args:
        content: the bytes of the `.keras` file.
        features: the columns of each input.
        prefix: the first part of the columns' names in record batches.
    """
    model = load_model(content)
    names = list(dict.fromkeys(feature_columns(features)))

    def predict(batch: Any) -> np.ndarray:
        return predicted(model, {name: _array(batch.column(prefix + name), name) for name in names}, features)

    return predict


def with_predictions(batch: Any, outputs: np.ndarray, kind: str, name: str) -> Any:
    """Returns an Arrow record batch with a last column of predictions.

    Args:
        batch: the record batch.
        outputs: float32 of shape [rows, width].
        kind: `array` for all outputs, `class` for the number of the largest, `value` for the only one.
        name: the column's name.

    Raises:
        UsageError: `value` is asked for, and there are several outputs.
    """
    import pyarrow  # noqa: PLC0415 an extra

    if kind == "array":
        ends = np.arange(len(outputs) + 1, dtype=np.int32) * outputs.shape[1]
        column = pyarrow.ListArray.from_arrays(ends, outputs.ravel())
    elif kind == "class":
        column = pyarrow.array(outputs.argmax(axis=1).astype(np.float64))
    elif outputs.shape[1] == 1:
        column = pyarrow.array(outputs[:, 0].astype(np.float64))
    else:
        raise UsageError(
            f"predictionType is value, and the model has {outputs.shape[1]} outputs for a row",
            code="several-outputs",
            hint="write predictionType='array' or 'class'",
        )
    return pyarrow.RecordBatch.from_arrays([*batch.columns, column], [*batch.schema.names, name])


def _array(column: Any, name: str) -> np.ndarray:
    """Returns an Arrow column as an array.

    Raises:
        UsageError: it has empty values, or lists of different lengths.
    """
    values = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    values = getattr(values, "storage", values)
    if hasattr(values, "flatten") and "list" in str(values.type).partition("<")[0]:
        rows = len(values)
        flat = values.flatten()
        if values.null_count or flat.null_count:
            raise _empty(name)
        if len(flat) % rows or len(values.value_lengths().unique()) != 1:
            raise UsageError(
                f"the lists in the column {name!r} have different lengths",
                code="unequal-lists",
                hint="pad them to one length",
            )
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(rows, -1)
    if values.null_count:
        raise _empty(name)
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _empty(name: str) -> UsageError:
    return UsageError(
        f"the column {name!r} has empty values (null)",
        code="empty-values",
        hint="fill them in, or leave these rows out",
    )
