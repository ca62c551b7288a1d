"""Reads arrays as Keras users pass them: NumPy's, TensorFlow's, pandas', Python lists, in tuples and dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.mismatch import leaves

_NAMES = ("x", "y", "sample_weight")


def as_arrays(data: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays that `tf.data.Dataset.from_tensor_slices` takes as they are.

    A list, or a tuple, of numbers or strings, nested or not, is one array. One that has arrays in it is several inputs
    or outputs.

    Args:
        data: `(x,)`, `(x, y)` or `(x, y, sample_weight)`; the last ones may be None.

    Raises:
        TrainingError: a part is no array, has rows of several lengths or elements that TensorFlow does not have, or
            another number of examples than the others.
    """
    parts = list(data)
    while len(parts) > 1 and parts[-1] is None:
        parts.pop()
    arrays = tuple(_part(part, name) for part, name in zip(parts, _NAMES, strict=False))
    _check_lengths([found for part, name in zip(arrays, _NAMES, strict=False) for found in leaves(part, name)])
    return arrays


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
            f"{name} is of type {type(part).__name__}, and no array of examples",
            hint="pass NumPy arrays: tfdist.fit(model, (x, y))",
        )
    return part


def _is_array(part: Any) -> bool:
    """Whether it is, or holds, something else than a list of numbers."""
    if isinstance(part, (list, tuple)):
        return any(_is_array(each) for each in part)
    return isinstance(part, Mapping) or (hasattr(part, "shape") and np.ndim(part) > 0) or hasattr(part, "to_numpy")


def _of_list(part: Sequence[Any], name: str) -> np.ndarray:
    try:
        array = np.asarray(part)
    except ValueError as error:
        raise TrainingError(
            f"{name} is a list whose rows have several lengths",
            hint="pad them to one length, keras.utils.pad_sequences does, or pass a dataset of ragged batches",
        ) from error
    _check_elements(array, name)
    return array


def _check_elements(array: np.ndarray, name: str) -> None:
    kind = array.dtype.kind
    odd = next((each for each in array.flat if not isinstance(each, (str, bytes))), None) if kind == "O" else None
    if kind in "mMV" or odd is not None:
        what = f"Python objects, {type(odd).__name__} for one" if odd is not None else str(array.dtype)
        raise TrainingError(
            f"{name} is an array of {what}, which TensorFlow has no type for",
            hint="turn it into numbers: array.astype('float32'), with missing values filled in",
        )


def _check_lengths(named: Sequence[tuple[str, Any]]) -> None:
    lengths = {name: _length(array, name) for name, array in named}
    first, *others = lengths
    for other in others:
        if lengths[other] != lengths[first]:
            raise TrainingError(
                f"{first} has {lengths[first]} examples, and {other} has {lengths[other]}",
                hint="pass arrays with one entry for each example, as many in each; "
                "a list of arrays is several inputs, and numpy.stack makes one array of them",
            )


def _length(array: Any, name: str) -> int:
    shape = tf.TensorShape(array.shape)
    if not shape.rank or shape[0] is None:
        raise TrainingError(f"{name} is a single number, and no array of examples", hint="pass (x, y) arrays")
    return int(shape[0])
