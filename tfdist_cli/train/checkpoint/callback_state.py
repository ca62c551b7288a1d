"""The state of a training's process beside variables: callbacks' attributes and random number generators.

Keras callbacks have no method that returns their state. So state is detected by comparison: an attribute is state if it
has changed since the training began, in this launch or an earlier one. All other attributes are configuration, and keep
the values that the user gives them in this launch. Numbers, strings, arrays, and collections of them are saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.tf_compat.keras_model import CALLBACK_MODEL, TENSORBOARD_PROCESS_ATTRIBUTES
from tfdist_cli.train.tf_compat.variables import global_generator

_PLAIN = (type(None), bool, int, float, str)
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, deque)}
_COMPARISONS: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (keras.ops, np)
    for name in ("less", "less_equal", "greater", "greater_equal")
}
"""Functions that callbacks choose from to compare metrics."""
_PROCESS_ATTRIBUTES: dict[Any, set[str]] = {
    keras.callbacks.TensorBoard: TENSORBOARD_PROCESS_ATTRIBUTES,
}
"""Attributes that describe files and clocks of the callback's process; they are not saved."""


class CallbackStates:
    """The state of callbacks during a training.

    Args:
        callbacks: the callbacks; their `on_train_begin` was called.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = dict(zip(_names(callbacks), callbacks, strict=True))
        self._initial = {
            name: {key: _fingerprint(value) for key, value in _attributes(callback).items()}
            for name, callback in self._callbacks.items()
        }
        self._restored: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        """The callbacks' class names; a class that occurs more than once has a number."""
        return list(self._callbacks)

    def save(self) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Returns the state of each callback as JSON, and the arrays in it. Callbacks may change these arrays later."""
        saved: list[dict[str, Any]] = []
        arrays: list[np.ndarray] = []
        for name, callback in self._callbacks.items():
            state = {
                key: _encode(value, arrays)
                for key, value in _attributes(callback).items()
                if (name, key) in self._restored or _differs(value, self._initial[name].get(key))
            }
            saved.append({"callback": name, "state": state})
        return saved, arrays

    def restore(self, saved: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Restores the saved state of callbacks of the same class."""
        for entry in saved:
            name = entry["callback"]
            if name not in self._callbacks:
                continue  # the user has removed this callback
            for key, encoded in entry["state"].items():
                setattr(self._callbacks[name], key, _decode(encoded, arrays))
                self._restored.add((name, key))


def random_states() -> dict[str, Any]:
    """Returns the states of the global random number generators: Python's, NumPy's, and TensorFlow's if it exists."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    if numpy["bit_generator"] == "MT19937":
        states["numpy"] = numpy | {"state": numpy["state"] | {"key": numpy["state"]["key"].tolist()}}
    generator = global_generator()
    if generator is not None:
        states["tensorflow"] = generator.state.numpy().tolist()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Sets the global random number generators to states that `random_states` returned."""
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "tensorflow" in states:
        tf.random.get_global_generator().reset(tf.constant(states["tensorflow"], tf.int64))


class _NotEncodable(Exception):
    """A value that cannot be saved."""


def _names(callbacks: Sequence[Any]) -> list[str]:
    names: list[str] = []
    for callback in callbacks:
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        same = sum(name.split("#")[0] == kind for name in names)
        names.append(f"{kind}#{same + 1}" if same else kind)
    return names


def _attributes(callback: Any) -> dict[str, Any]:
    """Returns the attributes of a callback that can be saved and may be state."""
    of_the_process = [keys for kind, keys in _PROCESS_ATTRIBUTES.items() if isinstance(callback, kind)]
    excluded = {CALLBACK_MODEL, "params"}.union(*of_the_process)
    found = {}
    for key, value in vars(callback).items():
        if key in excluded:
            continue
        with contextlib.suppress(_NotEncodable, RecursionError):
            _encode(value, [])
            found[key] = value
    return found


def _fingerprint(value: Any) -> tuple[str, list[str]]:
    """Returns a fingerprint that tells whether a value has changed; it may be large, and be changed in place."""
    arrays: list[np.ndarray] = []
    encoded = json.dumps(_encode(value, arrays))
    return encoded, [_digest(array) for array in arrays]


def _differs(value: Any, initial: tuple[str, list[str]] | None) -> bool:
    return initial is None or _fingerprint(value) != initial


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns a value as JSON. Each array is appended to `arrays`, and replaced by its index there."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return {"dict": [[_encode(key, arrays), _encode(item, arrays)] for key, item in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if type(value) is kind:
            return {name: [_encode(item, arrays) for item in value], "maxlen": getattr(value, "maxlen", None)}
    for name, function in _COMPARISONS.items():
        if value is function:
            return {"comparison": name}
    return _encode_array(value, arrays)


def _encode_array(value: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        value = value.numpy()
    if not isinstance(value, (np.ndarray, np.generic)):
        raise _NotEncodable
    array = np.asarray(value)
    encoded = {"array": len(arrays), "dtype": array.dtype.name, "shape": array.shape, "scalar": not np.ndim(value)}
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)  # NumPy's file format does not have this type
    elif array.dtype.kind not in "biufcSUMm":
        raise _NotEncodable
    arrays.append(array)
    return encoded


def _decode(encoded: Any, arrays: Sequence[np.ndarray]) -> Any:
    if not isinstance(encoded, dict):
        return encoded
    if "comparison" in encoded:
        return _COMPARISONS[encoded["comparison"]]
    if "array" in encoded:
        array = arrays[encoded["array"]]
        if encoded["dtype"] == "bfloat16":
            array = array.view(tf.bfloat16.as_numpy_dtype)
        return array[()] if encoded["scalar"] else array
    if "dict" in encoded:
        return {_decode(key, arrays): _decode(item, arrays) for key, item in encoded["dict"]}
    name, items = next((name, encoded[name]) for name in _COLLECTIONS if name in encoded)
    values = [_decode(item, arrays) for item in items]
    return deque(values, encoded["maxlen"]) if name == "deque" else _COLLECTIONS[name](values)
