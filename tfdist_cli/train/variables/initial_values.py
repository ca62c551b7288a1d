"""Initial values of the variables of several mirrored workers, in types that TensorFlow broadcasts.

TensorFlow sends the chief's initial value of each variable to the other workers, but only in some types. A value of
another type crosses in a type that can represent all of its values: int8 as int32, bfloat16 as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError

_BROADCAST = frozenset({tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
_CARRIERS = {
    **dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64, tf.complex64), tf.int64),
    **dict.fromkeys(
        (tf.bfloat16, tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2), tf.float32
    ),
}


def carrier_of(dtype: tf.DType) -> tf.DType | None:
    """Returns the type in which TensorFlow's collectives can send values of a type; None if there is none."""
    return dtype if dtype in _BROADCAST else _CARRIERS.get(dtype)


def check_sent(dtype: tf.DType, holder: str) -> None:
    """Checks that values of a type can be sent to other workers.

    Args:
        dtype: the type.
        holder: what has this type.

    Raises:
        TrainingError: they cannot.
    """
    if carrier_of(dtype) is None:
        raise TrainingError(
            f"{holder} is of {dtype.name}, which TensorFlow does not send to other workers",
            code="variable-type-not-sent",
            hint="use another type of number, such as float32 or int64",
        )


def converted(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts a tensor to the carrier of its type, or back from it.

    Types of the same size have the same bits: a carrier's number is then no approximation of the value.

    Args:
        value: the tensor.
        dtype: the type to convert to.
    """
    if value.dtype == dtype:
        return value
    return tf.bitcast(value, dtype) if value.dtype.size == dtype.size else tf.cast(value, dtype)


def create_as_carrier(create: Callable[..., Any], creator: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Creates a variable whose initial value crosses in the carrier of its type.

    Args:
        create: the strategy's method that broadcasts the initial value and calls the creator, `(creator, **kwargs)`.
        creator: creates the variable of one device.
        kwargs: the arguments of the variable.

    Returns:
        The variable.

    Raises:
        TrainingError: no type can carry its values.
    """
    given = kwargs.get("initial_value")
    if given is None:
        return create(creator, **kwargs)
    dtype = _dtype_of(kwargs)
    check_sent(dtype, f"the variable {kwargs.get('name') or ''!r}")
    carrier = carrier_of(dtype)
    if carrier == dtype:
        return create(creator, **kwargs)

    def carried() -> tf.Tensor:
        value = given() if callable(given) else given
        return converted(tf.convert_to_tensor(value, dtype), carrier)

    def create_one(**received: Any) -> Any:
        value = received["initial_value"]
        own = {"dtype": dtype, "initial_value": lambda: converted(value(), dtype)}
        return creator(**received | own)

    return create(create_one, **kwargs | {"dtype": carrier, "initial_value": carried})


def _dtype_of(kwargs: dict[str, Any]) -> tf.DType:
    """Returns the type of the variable that is created with some arguments, which may have only an initial value.

    A function is then called, and its value takes its place.
    """
    if kwargs.get("dtype") is not None:
        return tf.as_dtype(kwargs["dtype"])
    with tf.init_scope():
        if callable(kwargs["initial_value"]):
            kwargs["initial_value"] = kwargs["initial_value"]()
        return tf.convert_to_tensor(kwargs["initial_value"]).dtype
