"""Another prediction of a model by the function of the one before, which was traced and compiled for it.

Keras keeps a model's `predict_function` until `compile`. Here, too, the model keeps its last `PredictionFunction`. It
is used again unless something has changed that it was traced from: the variables, which layers are trained, what
`compile` sets, or the type of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfdist_cli.train.engine.reuse import TracedParts, type_of
from tfdist_cli.train.prediction.function import PredictionFunction

_ATTRIBUTE = "tfdist_last_prediction"
"""The attribute of a model that holds its last prediction, so that both are freed together."""


@dataclass(frozen=True)
class _LastPrediction:
    """What a model's last prediction was traced to, and from."""

    function: PredictionFunction
    inputs: tuple[Any, list[str]]
    model: TracedParts


def last_or_new(
    model: keras.Model, input_spec: Any, owners: Sequence[Any], make: Callable[[], PredictionFunction]
) -> PredictionFunction:
    """Returns the function of the model's last prediction, if it is that of another one as well.

    Args:
        model: the model, built.
        input_spec: the `tf.TypeSpec`s of a batch's inputs.
        owners: the strategy and the workers of the function: it is not used with others.
        make: makes a function, if there is none.
    """
    # `model.make_predict_function(force=True)` asks for a new trace
    parts, inputs = TracedParts.of(model, *owners, model.predict_function), type_of(input_spec)
    last: _LastPrediction | None = getattr(model, _ATTRIBUTE, None)
    if last is None or last.inputs != inputs or not last.model.are(parts):
        setattr(model, _ATTRIBUTE, None)  # its memory is free before there is another
        last = _LastPrediction(make(), inputs, parts)
        setattr(model, _ATTRIBUTE, last)
    return last.function
