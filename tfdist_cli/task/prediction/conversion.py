"""Converts the columns of examples to the types of a model's inputs, without a silent change of a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist_cli.errors import UsageError


def converted(values: np.ndarray, dtype: Any, *, column: str, place: Callable[[int], str]) -> np.ndarray:
    """Returns the values of a column in the type of an input.

    Args:
        values: the column: numbers or texts, one entry per example.
        dtype: the NumPy type of the input.
        column: the column's name, for the message.
        place: the number of an example → where it is in the file.

    Raises:
        UsageError: a value is no number, or none that an input of integers takes.
        ValueError, TypeError: the values cannot be converted for another reason, such as their shape.
    """
    wanted = np.dtype(dtype)
    if np.issubdtype(wanted, np.integer) and values.dtype.kind in "iuf":
        _check_integers(values, wanted, column, place)
        return values.astype(wanted)
    try:
        return values.astype(wanted)
    except (ValueError, TypeError, OverflowError):
        if values.ndim != 1 or wanted.kind in "bOSU":
            raise
        return np.array([_number(value, wanted, column, place, row) for row, value in enumerate(values)]).astype(wanted)


def _check_integers(values: np.ndarray, wanted: np.dtype, column: str, place: Callable[[int], str]) -> None:
    limits = np.iinfo(wanted)
    wrong = (values < limits.min) | (values > limits.max)
    if values.dtype.kind == "f":
        wrong |= values != np.trunc(values)  # also nan
    if wrong.any():
        first = tuple(np.argwhere(wrong)[0])
        raise _wrong(values[first].item(), wanted, column, place(int(first[0])))


def _number(value: Any, wanted: np.dtype, column: str, place: Callable[[int], str], row: int) -> float:
    """Returns an integer for a type of integers, which `1.0` is, too."""
    if isinstance(value, (np.ndarray, list)):
        raise TypeError(f"a value has {len(value)} entries")
    whole = np.issubdtype(wanted, np.integer)
    try:
        number = _integer(value) if whole else float(value)
    except (ValueError, TypeError, OverflowError):
        raise _wrong(value, wanted, column, place(row)) from None
    if whole and not np.iinfo(wanted).min <= number <= np.iinfo(wanted).max:
        raise _wrong(value, wanted, column, place(row))
    return number


def _integer(value: Any) -> int:
    try:
        return int(str(value))
    except ValueError:
        number = float(value)
        if not number.is_integer():
            raise
        return int(number)


def _wrong(value: Any, wanted: np.dtype, column: str, place: str) -> UsageError:
    taken = f"whole numbers of the type {wanted}" if np.issubdtype(wanted, np.integer) else "numbers"
    return UsageError(
        f"{place}: the column {column!r} has {_shown(value)}, and the model takes {taken} there",
        code="value-does-not-fit",
        hint="correct the value, or choose the columns that are inputs with --columns",
    )


def _shown(value: Any) -> str:
    text = repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_LONGEST = 60
"""Characters of a value that a message shows."""
