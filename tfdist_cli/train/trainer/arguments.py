"""Checks of argument values, made before anything else: every task reports the same mistake at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import keras

from tfdist_cli.errors import UsageError

_FIT = "tfdist.fit(model, x, y, epochs=..., validation_data=...): docs/reference/python-api.md lists all arguments"


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Refuses arguments that `fit` does not have.

    Raises:
        UsageError: there is one.
    """
    for name in unknown:
        raise UsageError(f"tfdist.fit has no argument {name!r}", code="unknown-argument", hint=_FIT)


def check_counts(least: int, **arguments: Any) -> None:
    """Checks integers; None is allowed.

    Raises:
        UsageError: a value is not an integer, or is less than `least`.
    """
    for name, value in arguments.items():
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (is_integer and value >= least):
            raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}", code="invalid-argument")


def check_choice(choices: Sequence[Any], **arguments: Any) -> None:
    """Checks values that have to be one of a few.

    Raises:
        UsageError: a value is none of them.
    """
    for name, value in arguments.items():
        if value not in choices:
            raise UsageError(
                f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}", code="invalid-argument"
            )


def check_type(kind: type, **arguments: Any) -> None:
    """Checks objects of tfdist's public classes; None is allowed.

    Raises:
        UsageError: a value is something else.
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, kind):
            raise UsageError(
                f"{name} must be a tfdist.{kind.__name__}, got {value!r}",
                code="invalid-argument",
                hint=f"pass a tfdist.{kind.__name__}(...)",
            )


def as_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list.

    Args:
        callbacks: a list of Keras callbacks, one callback, or None, as Keras's `fit` takes them.

    Raises:
        UsageError: one of them is not a `keras.callbacks.Callback`.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    flat = keras.tree.flatten(callbacks)
    for callback in flat:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(
                f"callbacks must be of type keras.callbacks.Callback, got {callback!r}",
                code="invalid-argument",
                hint="pass a list of callbacks; keras.callbacks.LambdaCallback makes one from functions",
            )
    return flat
