"""Reads arrays as Keras users pass them: from NumPy, TensorFlow, pandas or Python lists, in tuples and dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.mismatch import leaves

_NAMES = ("x", "y", "sample_weight")


def as_arrays(data: Sequence[Any]) -> tuple[Any, ...]:
    """Converts data to arrays that `tf.data.Dataset.from_tensor_slices` accepts.

    A list or tuple of numbers or strings, nested or not, is one array. A list or tuple of arrays is several inputs or
    outputs.

    Args:
        data: `(x,)`, `(x, y)` or `(x, y, sample_weight)`; the last parts may be None.

    Returns:
        The parts that are not None, in the same structure.

    Raises:
        TrainingError: a part is not an array, has rows of different lengths, has elements of a type that TensorFlow
            does not have, or has another number of examples than the others.
    """
    parts = list(data)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    arrays = tuple(_part(part, name) for part, name in zip(parts, _NAMES, strict=False))
    _check_lengths([found for part, name in zip(arrays, _NAMES, strict=False) for found in leaves(part, name)])
    return arrays


def is_array(data: Any) -> bool:
    """Whether data is one array, a DataFrame or a Series, and no list of numbers."""
    return hasattr(data, "shape") or hasattr(data, "to_numpy")


def _part(part: Any, name: str) -> Any:
    if isinstance(part, Mapping):
        return {key: _part(each, f"{name}[{key!r}]") for key, each in part.items()}
    if isinstance(part, (list, tuple)):
        if any(_is_array(each) for each in part):
            return tuple(_part(each, f"{name}[{number}]") for number, each in enumerate(part))
        return _of_list(part, name)
    if hasattr(part, "to_numpy"):  # a DataFrame or a Series of pandas
        part = part.to_numpy()
    if isinstance(part, np.ndarray):
        _check_elements(part, name)
    elif not hasattr(part, "shape"):
        raise TrainingError(
            f"{name} is not an array of examples: it has the type {type(part).__name__}",
            code="not-an-array",
            hint="pass NumPy arrays: tfdist.fit(model, (x, y))",
        )
    return part


def _is_array(part: Any) -> bool:
    """Whether a part is an array, or a list or dict that contains one; False for a plain list of numbers."""
    if isinstance(part, (list, tuple)):
        return any(_is_array(each) for each in part)
    return isinstance(part, Mapping) or (hasattr(part, "shape") and np.ndim(part) > 0) or hasattr(part, "to_numpy")


def _of_list(part: Sequence[Any], name: str) -> np.ndarray:
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise TrainingError(
            f"{name} is a list whose rows have different lengths",
            code="ragged-rows",
            hint="pad the rows to one length with keras.utils.pad_sequences, or pass a dataset of ragged batches",
        ) from error
    _check_elements(array, name)
    return array


def _check_elements(array: np.ndarray, name: str) -> None:
    kind = array.dtype.kind
    odd = next((each for each in array.flat if not isinstance(each, (str, bytes))), None) if kind == "O" else None
    if kind in "mMV" or odd is not None:
        what = f"Python objects such as {type(odd).__name__}" if odd is not None else str(array.dtype)
        raise TrainingError(
            f"{name} is an array of {what}, and TensorFlow has no such type",
            code="unsupported-array-type",
            hint="convert it to numbers with array.astype('float32'), and fill in missing values first",
        )


def _check_lengths(named: Sequence[tuple[str, Any]]) -> None:
    lengths = {name: _length(array, name) for name, array in named}
    first, *others = lengths
    for other in others:
        if lengths[other] != lengths[first]:
            raise TrainingError(
                f"{first} has {lengths[first]} examples, and {other} has {lengths[other]}",
                code="array-lengths-differ",
                hint="pass arrays with one entry per example and the same number of entries; "
                "a list of arrays is several inputs, and numpy.stack makes one array of them",
            )


def _length(array: Any, name: str) -> int:
    shape = tf.TensorShape(array.shape)
    if not shape.rank or shape[0] is None:
        raise TrainingError(
            f"{name} is not an array of examples: it is a single number", code="not-an-array", hint="pass (x, y) arrays"
        )
    return int(shape[0])
