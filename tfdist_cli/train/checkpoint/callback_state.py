"""What a training's process knows beside variables: callbacks' attributes, and its random number generators.

Keras callbacks have no way to give their state away. So what counts as state is found by watching: an attribute
that has another value than when the training began, or had one in an earlier launch, is state; the others are what the
user has configured, and stay as they are configured now. What numbers, texts, arrays and lists can say is saved.
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
"""What a callback chooses from to tell the better of two values."""
_OF_THE_PROCESS: dict[Any, set[str]] = {
    keras.callbacks.TensorBoard: TENSORBOARD_PROCESS_ATTRIBUTES,
}
"""What belongs to files and clocks of the process that a callback is in."""


class CallbackStates:
    """What callbacks come to know in a training.

    Args:
        callbacks: the callbacks, which have heard that the training begins.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = dict(zip(_names(callbacks), callbacks, strict=True))
        self._begun = {
            name: {key: _print(value) for key, value in _attributes(callback).items()}
            for name, callback in self._callbacks.items()
        }
        self._restored: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        """The callbacks' classes, those that are there more than once with a number."""
        return list(self._callbacks)

    def save(self) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """What is state, callback by callback, as JSON, and the arrays in it, which a callback may change later."""
        saved: list[dict[str, Any]] = []
        arrays: list[np.ndarray] = []
        for name, callback in self._callbacks.items():
            state = {
                key: _encoded(value, arrays)
                for key, value in _attributes(callback).items()
                if (name, key) in self._restored or _differs(value, self._begun[name].get(key))
            }
            saved.append({"callback": name, "state": state})
        return saved, arrays

    def restore(self, saved: Sequence[dict[str, Any]], arrays: Sequence[np.ndarray]) -> None:
        """Gives the callbacks back what was saved of those of the same class."""
        for entry in saved:
            name = entry["callback"]
            if name not in self._callbacks:
                continue  # it is not there any more
            for key, form in entry["state"].items():
                setattr(self._callbacks[name], key, _decoded(form, arrays))
                self._restored.add((name, key))


def random_states() -> dict[str, Any]:
    """Where this process's global random number generators are: Python's, NumPy's, and TensorFlow's if it has one."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    if numpy["bit_generator"] == "MT19937":
        states["numpy"] = numpy | {"state": numpy["state"] | {"key": numpy["state"]["key"].tolist()}}
    generator = global_generator()
    if generator is not None:
        states["tensorflow"] = generator.state.numpy().tolist()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Lets the global random number generators go on from where `random_states` has found them."""
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "tensorflow" in states:
        tf.random.get_global_generator().reset(tf.constant(states["tensorflow"], tf.int64))


class _Unsaid(Exception):
    """A value that cannot be written down."""


def _names(callbacks: Sequence[Any]) -> list[str]:
    names: list[str] = []
    for callback in callbacks:
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        same = sum(name.split("#")[0] == kind for name in names)
        names.append(f"{kind}#{same + 1}" if same else kind)
    return names


def _attributes(callback: Any) -> dict[str, Any]:
    """The attributes of a callback that can be written down, and may be state."""
    of_the_process = [keys for kind, keys in _OF_THE_PROCESS.items() if isinstance(callback, kind)]
    left_out = {CALLBACK_MODEL, "params"}.union(*of_the_process)
    found = {}
    for key, value in vars(callback).items():
        if key in left_out:
            continue
        with contextlib.suppress(_Unsaid, RecursionError):
            _encoded(value, [])
            found[key] = value
    return found


def _print(value: Any) -> tuple[str, list[str]]:
    """What it takes to know later whether a value has changed: it may be large, and be changed in place."""
    arrays: list[np.ndarray] = []
    form = json.dumps(_encoded(value, arrays))
    return form, [_digest(array) for array in arrays]


def _differs(value: Any, begun: tuple[str, list[str]] | None) -> bool:
    arrays: list[np.ndarray] = []
    if begun is None or json.dumps(_encoded(value, arrays)) != begun[0]:
        return True
    return [_digest(array) for array in arrays] != begun[1]


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _encoded(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value as JSON; each array is added to `arrays`, and has its number there in its place."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return {"dict": [[_encoded(key, arrays), _encoded(item, arrays)] for key, item in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if type(value) is kind:
            return {name: [_encoded(item, arrays) for item in value], "maxlen": getattr(value, "maxlen", None)}
    for name, function in _COMPARISONS.items():
        if value is function:
            return {"comparison": name}
    return _encoded_array(value, arrays)


def _encoded_array(value: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        value = value.numpy()
    if not isinstance(value, (np.ndarray, np.generic)):
        raise _Unsaid
    array = np.asarray(value)
    form = {"array": len(arrays), "dtype": array.dtype.name, "shape": array.shape, "scalar": not np.ndim(value)}
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)  # NumPy's files have no such type
    elif array.dtype.kind not in "biufcSUMm":
        raise _Unsaid
    arrays.append(array)
    return form


def _decoded(form: Any, arrays: Sequence[np.ndarray]) -> Any:
    if not isinstance(form, dict):
        return form
    if "comparison" in form:
        return _COMPARISONS[form["comparison"]]
    if "array" in form:
        array = arrays[form["array"]]
        if form["dtype"] == "bfloat16":
            array = array.view(tf.bfloat16.as_numpy_dtype)
        return array[()] if form["scalar"] else array
    if "dict" in form:
        return {_decoded(key, arrays): _decoded(item, arrays) for key, item in form["dict"]}
    name, items = next((name, form[name]) for name in _COLLECTIONS if name in form)
    decoded = [_decoded(item, arrays) for item in items]
    return deque(decoded, form["maxlen"]) if name == "deque" else _COLLECTIONS[name](decoded)
