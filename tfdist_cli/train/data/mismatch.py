"""Explains which element of the data does not fit a model: `x['age']`, `y`, `sample_weight`."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.data import BATCHING, grouping_method
from tfdist_cli.train.tf_compat.keras_model import COMPUTES_LOSS, layers_of, structure_of
from tfdist_cli.train.tf_compat.op_errors import message_of

_PARTS = ("x", "y", "sample_weight")
_BATCHED_TWICE = "batch the examples once"
_ID = re.compile(
    r"Detected at node (?P<node>\S+) [\s\S]*?indices\[[\d,]*\] = (?P<id>-?\d+) is not in \[0, (?P<rows>\d+)\)"
)
_ROW = re.compile(
    r"looks up rows that (?P<table>\S+) does not have: it has (?P<rows>\d+)\] \[(?P<least>-?\d+)\] \[(?P<most>-?\d+)\]"
)
"""What `EmbeddingTables` says: of the ids, counted from 0, the least and the largest one."""
_LABEL = re.compile(r"label value of (?P<label>-?\d+) which is outside the valid range of \[0, (?P<classes>\d+)\)")
_SHAPES = re.compile(
    r"(?:Incompatible shapes|incompatible shapes)[^\n]*?(?P<shapes>\[[\d,]*\] (?:vs\.|and) \[[\d,]*\])"
)


def leaves(part: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the arrays or `tf.TypeSpec`s in one part of the data, each with its name, such as `x['age']`."""
    if isinstance(part, Mapping):
        for key, each in part.items():
            yield from leaves(each, f"{name}[{key!r}]")
    elif isinstance(part, (tuple, list)) and not hasattr(part, "shape"):
        for number, each in enumerate(part):
            yield from leaves(each, f"{name}[{number}]")
    elif part is not None:
        yield name, part


def describe(element_spec: Any) -> str:
    """Describes the shapes and types of a batch for a message: `x float32 (None, 64), y int64 (None,)`."""
    parts = element_spec if isinstance(element_spec, tuple) else (element_spec,)
    named = [found for part, name in zip(parts, _PARTS, strict=False) for found in leaves(part, name)]
    return ", ".join(f"{name} {_type(spec)} {getattr(spec, 'shape', None)}" for name, spec in named)


def check_types(model: keras.Model, element_spec: Any) -> None:
    """Rejects strings where the model takes numbers. TensorFlow would fail in the first step only.

    Raises:
        TrainingError: a target, a sample weight, or an input that takes numbers, has strings.
    """
    _, y, weight = keras.utils.unpack_x_y_sample_weight(element_spec)
    wrong = [
        name for name, spec, own in _given_and_taken(model, element_spec) if own is not None and _is_text(spec, own)
    ]
    if type(model).compute_loss is keras.Model.compute_loss:
        wrong += [name for name, spec in [*leaves(y, "y"), *leaves(weight, "sample_weight")] if _is_text(spec)]
    if wrong:
        raise TrainingError(
            f"{wrong[0]} has strings, and the model takes numbers there",
            code="strings-for-numbers",
            hint="convert it to numbers with keras.layers.StringLookup, or read it as numbers",
        )


def comes_in_batches(model: keras.Model | None, dataset: tf.data.Dataset) -> bool:
    """Whether the elements of a dataset are batches that a model takes, and not single examples.

    If the model's inputs are known, they decide. Otherwise the dataset's last transformation that makes one element of
    several does.

    Args:
        model: the model; None if it is not known.
        dataset: the dataset.
    """
    pairs = _given_and_taken(model, dataset.element_spec) if model is not None else []
    shapes = [(tuple(spec.shape), tuple(own.shape)) for _, spec, own in pairs if own is not None and _has_rank(spec)]
    if shapes and all(len(given) == len(taken) and _fits(given[1:], taken[1:]) for given, taken in shapes):
        return True
    if shapes and all(_fits(given, taken[1:]) for given, taken in shapes):
        return False
    return grouping_method(dataset) in BATCHING


def _given_and_taken(model: keras.Model, element_spec: Any) -> list[tuple[str, Any, Any]]:
    """Returns the name and the `tf.TypeSpec` of each array in the inputs, and the model's input, None if not known."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    given, inputs = list(leaves(x, "x")), _inputs(model)
    taken: list[Any] = [None] * len(given)
    if isinstance(x, Mapping):
        structure = structure_of(model, "inputs")
        by_key = dict(leaves(structure, "x")) if isinstance(structure, Mapping) else {}
        by_name = {f"x[{each.name!r}]": each for each in inputs} | by_key
        taken = [by_name.get(name) for name, _ in given]
    elif len(inputs) == len(given):
        taken = inputs
    return [(name, spec, own) for (name, spec), own in zip(given, taken, strict=True)]


def _has_rank(spec: Any) -> bool:
    shape = getattr(spec, "shape", None)
    return shape is not None and shape.rank is not None


def check_batched_once(model: keras.Model, element_spec: Any) -> None:
    """Rejects batches of batches, which may be too few for a single step.

    Args:
        model: a model. One without known inputs is not checked.
        element_spec: the `tf.TypeSpec`s of a batch.

    Raises:
        TrainingError: an input has one dimension more than the model takes.
    """
    for name, spec, own in _given_and_taken(model, element_spec):
        if own is None:
            continue
        squeezable = spec.shape.rank and spec.shape[-1] == 1  # Keras removes this dimension
        if not squeezable and (error := _batched_twice(name, spec, own)):
            raise error


def explained(model: keras.Model, element_spec: Any, error: Exception) -> TrainingError:
    """Returns the error that explains why a model cannot be built for these batches.

    Args:
        model: a compiled model.
        element_spec: the `tf.TypeSpec`s of a batch.
        error: the error that Keras raised.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    if _in_loss(error):
        why = _structures("y", y, structure_of(model, "outputs"), "outputs")
        message = why or f"y does not fit the model's output, or its loss: {message_of(error)}"
        hint = f"the data's batches are {describe(element_spec)}"
        return TrainingError(message, code="targets-do-not-fit", hint=hint)
    why = _structures("x", x, structure_of(model, "inputs"), "inputs")
    if why:
        hint = f"the data's batches are {describe(element_spec)}"
        return TrainingError(why, code="inputs-do-not-fit", hint=hint)
    for name, spec, own in _given_and_taken(model, element_spec):
        if own is None:
            continue
        if twice := _batched_twice(name, spec, own):
            return twice
        given, taken = tuple(spec.shape), tuple(own.shape)
        if len(given) == len(taken) - 1 and None not in given[:1] and _fits(given, taken[1:]):
            return TrainingError(
                f"{name} has the shape {given}, and the model takes {taken}: the data is not in batches",
                code="not-batched",
                hint="pass tfdist.fit a dataset of batches, as dataset.batch(32) makes it, or arrays of examples",
            )
        if len(given) != len(taken) or not _fits(given[1:], taken[1:]):
            return TrainingError(
                f"{name} has the shape {given} in a batch, and the model takes {taken}",
                code="shape-does-not-fit",
                hint=f"the data's batches are {describe(element_spec)}",
            )
    return TrainingError(
        f"the model cannot be built for batches of {describe(element_spec)}: {message_of(error)}",
        code="model-build-failed",
        hint="the shapes of the data have to fit the model's inputs and its loss",
    )


def found_in_step(model: keras.Model, error: Exception) -> TrainingError | None:
    """Translates an op error caused by the data's values into an error that names the element; None for others."""
    text = str(error)
    if (match := _ID.search(text)) and (layer := _embedding(model, match["node"])):
        return _id_out_of_range(layer, int(match["id"]), int(match["rows"]))
    if match := _ROW.search(text):
        least, rows = int(match["least"]), int(match["rows"])
        return _id_out_of_range(match["table"].rpartition("/")[0], least if least < 0 else int(match["most"]), rows)
    if match := _LABEL.search(text):
        return TrainingError(
            f"y has the label {match['label']}, and the model has outputs for 0 to {int(match['classes']) - 1}",
            code="label-out-of-range",
            hint="number the classes from 0, or give the last layer more units",
        )
    if "Cast string to" in text:
        return TrainingError(
            "the data has strings where the model, its loss or a metric takes numbers",
            code="strings-for-numbers",
            hint="convert them to numbers with keras.layers.StringLookup, or read them as numbers",
        )
    if "compile_loss" in text and (match := _SHAPES.search(text)):
        return TrainingError(
            f"y does not fit the model's output in the loss: shapes {match['shapes']}",
            code="targets-do-not-fit",
            hint="give y the shape of the model's output, (examples, 1) for one unit; sample_weight has one number "
            "per example",
        )
    return None


def _batched_twice(name: str, spec: Any, own: Any) -> TrainingError | None:
    """Returns the error for an input of batches of batches; None for others."""
    given, taken = tuple(spec.shape), tuple(own.shape)
    if len(given) != len(taken) + 1 or not _fits(given[2:], taken[1:]):
        return None
    return TrainingError(
        f"{name} has the shape {given} in a batch, and the model takes {taken}: it was batched twice",
        code="batched-twice",
        hint=_BATCHED_TWICE,
    )


def _type(spec: Any) -> str:
    dtype = getattr(spec, "dtype", None)
    return getattr(dtype, "name", None) or type(spec).__name__


def _is_text(spec: Any, own: Any = None) -> bool:
    return getattr(spec, "dtype", None) == tf.string and (own is None or own.dtype != "string")


def _fits(given: tuple[int | None, ...], taken: tuple[int | None, ...]) -> bool:
    return len(given) == len(taken) and all(
        None in pair or pair[0] == pair[1] for pair in zip(given, taken, strict=True)
    )


def _inputs(model: keras.Model) -> list[Any]:
    """Returns the inputs of a functional model in order; [] for a subclassed model, whose inputs are unknown."""
    return list(keras.tree.flatten(structure_of(model, "inputs")))


def _structures(name: str, part: Any, own: Any, what: str) -> str | None:
    """Explains how a part of the data differs from the model, in keys or number of arrays; None if it does not."""
    taken = keras.tree.flatten(own)
    if not taken:
        return None
    names = sorted(map(str, own)) if isinstance(own, Mapping) else [each.name for each in taken]
    if what == "outputs" and not isinstance(own, Mapping):
        names = []
    if isinstance(part, Mapping) and len(taken) == 1 and not isinstance(own, Mapping):
        return f"{name} has the keys {_listed(part)}, and the model has one {what.rstrip('s')} without a key"
    if isinstance(part, Mapping) and names:
        missing = sorted(set(names) - {str(key) for key in part})
        if missing:
            return f"{name} has the keys {_listed(part)}, and the model also has the {what} {_listed(missing)}"
    count = len(list(leaves(part, name)))
    if count != len(taken):
        these = f": {_listed(names)}" if names else ""
        number = what if len(taken) > 1 else what.rstrip("s")
        return f"{name} has {count} {_arrays(count)}, and the model has {len(taken)} {number}{these}"
    return None


def _arrays(count: int) -> str:
    return "array" if count == 1 else "arrays"


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names)


def _in_loss(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in COMPUTES_LOSS for frame in frames)


def _id_out_of_range(layer: str, number: int, rows: int) -> TrainingError:
    number -= rows if number < 0 else 0  # Keras counts negative ids from the end
    return TrainingError(
        f"x has the id {number}, and the layer {layer!r} has the ids 0 to {rows - 1}",
        code="id-out-of-range",
        hint="remove this id from the data, or give the layer a larger input_dim",
    )


def _embedding(model: keras.Model, node: str) -> str | None:
    """Returns the name of the `Embedding` layer that a graph node belongs to; TensorFlow numbers scopes of one name."""
    parts = node.split("/")
    names = [layer.name for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding)]
    found = [name for name in names for part in parts if re.fullmatch(rf"{re.escape(name)}(_\d+)?", part)]
    return max(found, key=len, default=None)
