"""Places the layers of a model on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.protocol.records import emit
from tfdist_cli.train.data.shard import ALL, DatasetFunction, checked
from tfdist_cli.train.engine.model_parallel.layer_times import LayerTimes
from tfdist_cli.train.engine.model_parallel.micro_batches import MicroBatches
from tfdist_cli.train.model.stages import (
    NamedLayer,
    divide_by_name,
    divide_evenly,
    layers_in_order,
    most_stages,
    whole_layers,
)
from tfdist_cli.train.tf_compat.keras_model import layers_are_built
from tfdist_cli.train.tf_compat.patching import replaced
from tfdist_cli.train.variables.placement import log
from tfdist_cli.train.variables.stages import Stages

Times = Callable[[], Mapping[int, float] | None]
"""Returns the seconds of each layer, by its `id`; None if stages are not divided by them."""


def times_of_layers(stages: Stages, model: keras.Model, data: DatasetFunction, micro_batches: int) -> Times:
    """Returns a function that measures each layer with the first micro-batch of the data, once.

    Args:
        stages: the stages. Without `balance: time`, nothing is measured.
        model: the model, whose layers have their variables when the function is called.
        data: the batches.
        micro_batches: the parts of a batch.
    """

    @cache
    def measured() -> Mapping[int, float] | None:
        if stages.rules.balance != "time":
            return None
        return measured_times(model, next(iter(checked(data, ALL))), micro_batches, stages.workers)

    return measured


def measured_times(
    model: keras.Model, batch: Any, micro_batches: int, devices: Sequence[str] = ("",)
) -> Mapping[int, float]:
    """Measures each layer with the first micro-batch of a batch.

    Args:
        model: the model, with its variables.
        batch: the batch.
        micro_batches: the parts of a batch.
        devices: the devices of the workers; "" is this process.

    Returns:
        The seconds of each layer, by its `id`.

    Raises:
        TrainingError: the model cannot be called with the batch's inputs.
    """
    spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
    part = MicroBatches.of(spec, micro_batches).parts(batch)[0]
    return LayerTimes(whole_layers(layers_in_order(model)), devices).measure(model, part.batch)


def place_layers(stages: Stages, model: keras.Model, times: Times = lambda: None) -> None:
    """Places the layers by the rules of the stages; does nothing before the layers have their variables.

    Raises:
        TrainingError: the layers do not fit the stages.
    """
    if not layers_are_built(model):
        return
    seconds = times()
    layers = divided(layers_in_order(model), stages.rules.place, stages.count, seconds)
    if layers == stages.assigned:
        return
    stages.assign(layers)
    if seconds is not None:
        _log_stages(layers, stages.count, seconds)


def _log_stages(layers: Sequence[tuple[keras.Layer, int]], count: int, seconds: Mapping[int, float]) -> None:
    for stage in range(count):
        own = [layer for layer, number in layers if number == stage]
        total = sum(seconds.get(id(layer), 0.0) for layer in own)
        names = [layer.name for layer in own if layer.weights]
        log.info("stage %d: %s to %s, %.1f ms for a micro-batch", stage, names[0], names[-1], 1000 * total)


def report_most_workers(stages: Stages, model: keras.Model) -> None:
    """Reports to the launcher how many workers there can be, if each is a stage and none a replica."""
    if not stages.rules.place and not stages.rules.stages:
        most = most_stages(layers_in_order(model))
        emit("limit", role="worker", most=most, reason=f"only {most} layers of the model have weights")


@contextmanager
def placed_before_slots(stages: Stages, model: keras.Model, times: Times) -> Iterator[None]:
    """Within it, the layers are placed before the model's optimizer creates its slots, which then need not move."""
    build = model.optimizer.build

    def build_slots(variables: Sequence[keras.Variable]) -> None:
        place_layers(stages, model, times)
        build(variables)

    with replaced(model.optimizer, {"build": build_slots}):
        yield


def divided(
    layers: Sequence[NamedLayer], place: Mapping[str, str] | None, count: int, times: Mapping[int, float] | None
) -> list[tuple[keras.Layer, int]]:
    """Returns the layers of a model, each with its stage.

    Args:
        layers: the layers, with their variables.
        place: the worker of each layer, by a pattern of names; None to divide the layers by bytes or times.
        count: the number of stages.
        times: the seconds of each layer, by its `id`; None to divide the layers by their bytes.

    Raises:
        TrainingError: the layers do not fit the stages.
    """
    return divide_by_name(layers, place) if place else divide_evenly(layers, count, times)
