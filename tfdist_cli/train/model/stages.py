"""Divides the layers of a model into stages: as the user names them, or with about equal bytes or times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import keras
import numpy as np

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.keras_model import sublayers


@dataclass(frozen=True)
class NamedLayer:
    """A layer of a model.

    Args:
        name: its name, after those of the layers that contain it: `encoder/attention`.
        layer: the layer.
        within: the names of the layers that contain it, the innermost one first.
        whole: whether it is the smallest part that is placed without being named: a layer that is no model.
    """

    name: str
    layer: keras.Layer
    within: tuple[str, ...]
    whole: bool


def layers_in_order(model: keras.Model) -> list[NamedLayer]:
    """Returns the layers of a model, in the order of their calls as far as Keras knows it; outer ones before inner."""
    return list(_walk(model, (), divided=True))


def _walk(layer: Any, within: tuple[str, ...], *, divided: bool) -> Iterator[NamedLayer]:
    inner = layer.layers if isinstance(layer, keras.Model) else sublayers(layer)
    for each in inner:
        name = f"{within[0]}/{each.name}" if within else each.name
        splits = divided and isinstance(each, keras.Model)
        yield NamedLayer(name, each, within, whole=divided and not splits)
        yield from _walk(each, (name, *within), divided=splits)


def divide_evenly(
    layers: Sequence[NamedLayer], count: int, costs: Mapping[int, float] | None = None
) -> list[tuple[keras.Layer, int]]:
    """Divides layers into stages whose largest is as small as possible.

    Args:
        layers: the layers.
        count: the number of stages.
        costs: the size of each layer of `whole_layers`, by its `id`; None for the number of its weights.

    Returns:
        Each layer with its stage. A layer without weights is in the stage of the one before it.

    Raises:
        TrainingError: fewer layers have weights than there are stages.
    """
    whole = whole_layers(layers)
    weights = _weights(whole)
    begins = _possible_begins(weights)
    if len(begins) < count:
        raise TrainingError(
            f"the model cannot be split into {count} stages: only {len(begins)} of its layers have weights",
            code="model-not-splittable",
            hint="use fewer stages, or name inner layers in place: {'block/attention': worker:0}",
        )
    sizes = np.array(weights if costs is None else [costs.get(id(layer), 0) for layer in whole], np.float64)
    starts = {begins[first] for first in _cuts(np.add.reduceat(sizes, [0, *begins[1:]]), count)}
    stage, divided = 0, []
    for index, layer in enumerate(whole):
        stage += index in starts
        divided.append((layer, stage))
    return divided


def most_stages(layers: Sequence[NamedLayer]) -> int:
    """Returns into how many stages `divide_evenly` can divide layers."""
    return len(_possible_begins(_weights(whole_layers(layers))))


def _possible_begins(weights: Sequence[int]) -> list[int]:
    """The indices of the layers at which a stage can begin: those with weights of their own."""
    return [index for index, size in enumerate(weights) if size]


def whole_layers(layers: Sequence[NamedLayer]) -> list[keras.Layer]:
    """Returns the smallest parts of a model that are placed without being named, in the order of their calls."""
    return [each.layer for each in layers if each.whole]


def _weights(layers: Sequence[keras.Layer]) -> list[int]:
    """The number of weights of each layer, without those of a layer before it."""
    sizes, seen = [], set[int]()
    for layer in layers:
        own = [weight for weight in layer.weights if id(weight) not in seen]
        seen.update(map(id, own))
        sizes.append(sum(int(np.prod(weight.shape)) for weight in own))
    return sizes


def _cuts(sizes: Sequence[float] | np.ndarray, count: int) -> list[int]:
    """The index at which each part but the first starts; the largest part is as small as possible, none is empty."""
    sums = np.concatenate([[0], np.cumsum(sizes)])
    best = {(1, end): (float(sums[end]), 0) for end in range(1, len(sizes) + 1)}
    for parts in range(2, count + 1):
        for end in range(parts, len(sizes) + 1):
            best[parts, end] = min(
                (max(best[parts - 1, start][0], float(sums[end] - sums[start])), start)
                for start in range(parts - 1, end)
            )
    cuts, end = [], len(sizes)
    for parts in range(count, 1, -1):
        end = best[parts, end][1]
        cuts.append(end)
    return cuts


def divide_by_name(layers: Sequence[NamedLayer], place: Mapping[str, str]) -> list[tuple[keras.Layer, int]]:
    """Divides layers as the user has named them.

    Returns:
        Each layer with its stage, inner layers before those that contain them. A layer that no pattern matches is where
        the layer is that contains it, or if it has no weights, where the one before it is.

    Raises:
        TrainingError: a pattern matches no layer, or a layer with weights is not placed.
    """
    numbers = {task: number for number, task in enumerate(sorted(set(place.values()), key=_index))}
    for pattern in place:
        if not any(fnmatchcase(each.name, pattern) for each in layers):
            raise TrainingError(
                f"place names {pattern!r}, which no layer of the model has as its name",
                code="unknown-layer",
                hint=f"its layers are {', '.join(each.name for each in layers)[:300]}",
            )
    found: dict[str, int] = {}
    stage = 0
    divided: list[tuple[int, keras.Layer, int]] = []
    for each in layers:
        named = next((task for pattern, task in place.items() if fnmatchcase(each.name, pattern)), None)
        outer = next((found[name] for name in each.within if name in found), None)
        own = numbers[named] if named is not None else outer
        if own is None and each.whole:
            if _unplaced(each, layers, place):
                raise TrainingError(
                    f"place names no worker for the layer {each.name!r}",
                    code="layer-not-placed",
                    hint="add it to place, or '*' as the last pattern for all other layers",
                )
            own = None if each.layer.weights else stage
        if own is not None:
            found[each.name] = stage = own
            divided.append((len(each.within), each.layer, own))
    return [(layer, own) for _, layer, own in sorted(divided, key=lambda each: -each[0])]


def _unplaced(layer: NamedLayer, layers: Sequence[NamedLayer], place: Mapping[str, str]) -> bool:
    """Whether weights of a layer that is not named are in no inner layer that is."""
    inner = [each for each in layers if layer.name in each.within]
    placed = {
        id(weight)
        for each in inner
        if any(fnmatchcase(each.name, pattern) for pattern in place)
        for weight in each.layer.weights
    }
    return any(id(weight) not in placed for weight in layer.layer.weights)


def _index(task: str) -> int:
    return int(task.partition(":")[2])
