"""Places the layers of a model on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras

from tfdist_cli.train.model.stages import divide_by_bytes, divide_by_name, layers_in_order
from tfdist_cli.train.tf_compat.keras_model import layers_are_built
from tfdist_cli.train.tf_compat.patching import replaced
from tfdist_cli.train.variables.stages import Stages


def place_layers(stages: Stages, model: keras.Model) -> None:
    """Places the layers by the rules of the stages; does nothing before the layers have their variables.

    Raises:
        TrainingError: the layers do not fit the stages.
    """
    if not layers_are_built(model):
        return
    stages.assign(divided(model, stages.rules.place, stages.count))


@contextmanager
def placed_before_slots(stages: Stages, model: keras.Model) -> Iterator[None]:
    """Within it, the layers are placed before the model's optimizer creates its slots, which then need not move."""
    build = model.optimizer.build

    def build_slots(variables: Sequence[keras.Variable]) -> None:
        place_layers(stages, model)
        build(variables)

    with replaced(model.optimizer, {"build": build_slots}):
        yield


def divided(model: keras.Model, place: Mapping[str, str] | None, count: int) -> list[tuple[keras.Layer, int]]:
    """Returns the layers of a model, each with its stage.

    Args:
        model: the model, with its variables.
        place: the worker of each layer, by a pattern of names; None to divide the layers by their bytes.
        count: the number of stages.

    Raises:
        TrainingError: the layers do not fit the stages.
    """
    layers = layers_in_order(model)
    return divide_by_name(layers, place) if place else divide_by_bytes(layers, count)
