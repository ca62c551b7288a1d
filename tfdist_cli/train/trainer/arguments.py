"""What `fit` is given, looked at before anything else: a mistake is told at once, and on every task alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import keras

from tfdist_cli.errors import UsageError

_OF_KERAS = {
    "x": "the data is the second argument: tfdist.fit(model, (x, y))",
    "y": "pass inputs and targets as one: tfdist.fit(model, (x, y))",
    "sample_weight": "pass it with the data: tfdist.fit(model, (x, y, sample_weight))",
    "class_weight": "give each example its weight, as the third part of the data: (x, y, sample_weight)",
    "validation_split": "divide the arrays yourself, and pass validation_data=(x, y)",
    "validation_steps": "pass validation_data=tfdist.Validation(data, steps=...)",
    "validation_freq": "pass validation_data=tfdist.Validation(data, every_epochs=...)",
    "validation_batch_size": "pass a dataset of batches as validation_data",
    "initial_epoch": "leave it out: with checkpoints=tfdist.Checkpoints(dir) a training goes on where it was",
    "verbose": "leave it out: logging.getLogger('tfdist').addHandler(logging.NullHandler()) keeps it silent",
}
_FIT = "tfdist.fit(model, data, epochs=..., validation_data=...): docs/reference/python-api.md lists all arguments"


def refuse_unknown(more: Sequence[Any], unknown: Mapping[str, Any]) -> None:
    """Says what is to be written instead of an argument that `fit` does not have.

    Args:
        more: arguments without a name that follow the data.
        unknown: arguments by name.

    Raises:
        UsageError: there is one.
    """
    if more:
        raise UsageError("tfdist.fit takes the model and the data, and all else by name", hint=_OF_KERAS["y"])
    for name in unknown:
        raise UsageError(f"tfdist.fit has no argument {name!r}", hint=_OF_KERAS.get(name, _FIT))


def check_counts(least: int, **given: Any) -> None:
    """Checks whole numbers, None where there is none.

    Raises:
        UsageError: one is no whole number, or less than `least`.
    """
    for name, value in given.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise UsageError(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")


def check_choice(choices: Sequence[Any], **given: Any) -> None:
    """Checks what has a few values only.

    Raises:
        UsageError: one has another value.
    """
    for name, value in given.items():
        if value not in choices:
            raise UsageError(f"{name} is {value!r}", hint=f"use {' or '.join(map(repr, choices))}")


def check_kind(kind: type, **given: Any) -> None:
    """Checks objects of tfdist's own, None where there is none.

    Raises:
        UsageError: one is something else.
    """
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{name} is {value!r}", hint=f"pass a tfdist.{kind.__name__}(...)")


def as_callbacks(given: Any) -> list[keras.callbacks.Callback]:
    """The callbacks as a list.

    Args:
        given: several callbacks, one, or None, as Keras takes them.

    Raises:
        UsageError: one is none of Keras's.
    """
    if given is None:
        return []
    callbacks = keras.tree.flatten(given)
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise UsageError(
                f"{callback!r} is no callback",
                hint="pass a list of keras.callbacks.Callback; LambdaCallback makes one of functions",
            )
    return callbacks
