"""Names the part of the data that does not fit a model: `x['age']`, `y`, `sample_weight`."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.tf_compat.keras_model import COMPUTES_LOSS, layers_of, structure_of

_PARTS = ("x", "y", "sample_weight")
_BATCHED_TWICE = (
    "batch the examples once: a recipe's dataset() returns single examples, and tfdist.fit takes batches of examples"
)
_ID = re.compile(
    r"Detected at node (?P<node>\S+) [\s\S]*?indices\[[\d,]*\] = (?P<id>-?\d+) is not in \[0, (?P<rows>\d+)\)"
)
_LABEL = re.compile(r"label value of (?P<label>-?\d+) which is outside the valid range of \[0, (?P<classes>\d+)\)")
_SHAPES = re.compile(
    r"(?:Incompatible shapes|incompatible shapes)[^\n]*?(?P<shapes>\[[\d,]*\] (?:vs\.|and) \[[\d,]*\])"
)
_KERAS = re.compile(r"Exception encountered when calling [^\n]*\n+|\x1b\[\d+m|\n+Arguments received by[\s\S]*")


def leaves(part: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays, or specifications, in one part of the data, each with its name."""
    if isinstance(part, Mapping):
        for key, each in part.items():
            yield from leaves(each, f"{name}[{key!r}]")
    elif isinstance(part, (tuple, list)) and not hasattr(part, "shape"):
        for number, each in enumerate(part):
            yield from leaves(each, f"{name}[{number}]")
    elif part is not None:
        yield name, part


def describe(element_spec: Any) -> str:
    """A batch's shapes and types for a message: `x float32 (None, 64), y int64 (None,)`."""
    parts = element_spec if isinstance(element_spec, tuple) else (element_spec,)
    named = [found for part, name in zip(parts, _PARTS, strict=False) for found in leaves(part, name)]
    return ", ".join(f"{name} {_type(spec)} {getattr(spec, 'shape', None)}" for name, spec in named)


def check_types(model: keras.Model, element_spec: Any) -> None:
    """Refuses strings where numbers belong, which TensorFlow would find out in the first step.

    Raises:
        TrainingError: an input that takes numbers, a target or a weight is of strings.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(element_spec)
    given, inputs = list(leaves(x, "x")), _inputs(model)
    taken: list[Any] = [None] * len(given)
    if isinstance(x, Mapping):
        by_name = {f"x[{each.name!r}]": each for each in inputs}
        taken = [by_name.get(name) for name, _ in given]
    elif len(inputs) == len(given):
        taken = inputs
    wrong = [name for (name, spec), own in zip(given, taken, strict=True) if own is not None and _is_text(spec, own)]
    if type(model).compute_loss is keras.Model.compute_loss:
        wrong += [name for name, spec in [*leaves(y, "y"), *leaves(weight, "sample_weight")] if _is_text(spec)]
    if wrong:
        raise TrainingError(
            f"{wrong[0]} is of strings, and the model takes numbers there",
            hint="turn it into numbers, keras.layers.StringLookup does, or read it as numbers",
        )


def explained(model: keras.Model, element_spec: Any, error: Exception) -> TrainingError:
    """Why a model cannot be built for batches of these.

    Args:
        model: a compiled model.
        element_spec: the `tf.TypeSpec`s of a batch.
        error: what Keras said.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    if _in_loss(error):
        why = _structures("y", y, structure_of(model, "outputs"), "outputs")
        message = why or f"y does not fit the model's output, or its loss: {_told(error)}"
        return TrainingError(message, hint=f"the data's batches are {describe(element_spec)}")
    why = _structures("x", x, structure_of(model, "inputs"), "inputs")
    if why:
        return TrainingError(why, hint=f"the data's batches are {describe(element_spec)}")
    for (name, spec), own in zip(leaves(x, "x"), _inputs(model), strict=False):
        given, taken = tuple(spec.shape), tuple(own.shape)
        if len(given) == len(taken) + 1 and _fits(given[2:], taken[1:]):
            return TrainingError(
                f"{name} has the shape {given} in a batch, and the model takes {taken}: it has been batched twice",
                hint=_BATCHED_TWICE,
            )
        if len(given) == len(taken) - 1 and None not in given[:1] and _fits(given, taken[1:]):
            return TrainingError(
                f"{name} has the shape {given}, and the model takes {taken}: the data is not in batches",
                hint="give tfdist.fit a dataset of batches, dataset.batch(32), or arrays of examples",
            )
        if len(given) != len(taken) or not _fits(given[1:], taken[1:]):
            return TrainingError(
                f"{name} has the shape {given} in a batch, and the model takes {taken}",
                hint=f"the data's batches are {describe(element_spec)}",
            )
    return TrainingError(
        f"the model cannot be built for batches of {describe(element_spec)}: {_told(error)}",
        hint="the shapes of the data have to fit the model's inputs and its loss",
    )


def found_in_step(model: keras.Model, error: Exception) -> TrainingError | None:
    """What an operation of a step failed of, where it is the data's values; None where it is something else."""
    text = str(error)
    if (told := _ID.search(text)) and (layer := _embedding(model, told["node"])):
        number, rows = int(told["id"]), int(told["rows"])
        number -= rows if number < 0 else 0  # Keras counts negative ids from the end
        return TrainingError(
            f"x has the id {number}, which the table of the layer {layer!r} does not have: its ids are 0 to {rows - 1}",
            hint="look for it in the data, or give the layer a larger input_dim",
        )
    if told := _LABEL.search(text):
        return TrainingError(
            f"y has the label {told['label']}, and the model has outputs for 0 to {int(told['classes']) - 1}",
            hint="number the classes from 0, or give the last layer more units",
        )
    if "Cast string to" in text:
        return TrainingError(
            "the data has strings where the model, its loss or a metric takes numbers",
            hint="turn them into numbers, keras.layers.StringLookup does, or read them as numbers",
        )
    if "compile_loss" in text and (told := _SHAPES.search(text)):
        return TrainingError(
            f"y does not fit the model's output in the loss: shapes {told['shapes']}",
            hint="y takes the shape of the model's output, (examples, 1) for one unit; sample_weight has one number "
            "for each example",
        )
    return None


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
    """A model's inputs in their order; none where it is a class of its own, which does not say."""
    return list(keras.tree.flatten(structure_of(model, "inputs")))


def _structures(name: str, part: Any, own: Any, what: str) -> str | None:
    """How one part of the data differs from what a model has: in its keys, or in the number of its arrays."""
    taken = keras.tree.flatten(own)
    if not taken:
        return None
    names = sorted(map(str, own)) if isinstance(own, Mapping) else [each.name for each in taken]
    if what == "outputs" and not isinstance(own, Mapping):
        names = []
    if isinstance(part, Mapping) and len(taken) == 1 and not isinstance(own, Mapping):
        return f"{name} has the keys {_listed(part)}, and the model has one {what.rstrip('s')}, without a key"
    if isinstance(part, Mapping) and names:
        missing = sorted(set(names) - {str(key) for key in part})
        if missing:
            return f"{name} has the keys {_listed(part)}, and lacks {_listed(missing)}, of the model's {what}"
    count = len(list(leaves(part, name)))
    if count != len(taken):
        these = f": {_listed(names)}" if names else ""
        number = what if len(taken) > 1 else what.rstrip("s")
        return f"{name} is {count} {_arrays(count)}, and the model has {len(taken)} {number}{these}"
    return None


def _arrays(count: int) -> str:
    return "array" if count == 1 else "arrays"


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names)


def _in_loss(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in COMPUTES_LOSS for frame in frames)


def _told(error: Exception) -> str:
    """What Keras said, without the colours and the list of arguments."""
    return _KERAS.sub("", str(error)).strip()


def _embedding(model: keras.Model, node: str) -> str | None:
    """The name of the `Embedding` whose operation a node of a graph is; scopes of one name are numbered."""
    parts = node.split("/")
    names = [layer.name for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding)]
    found = [name for name in names for part in parts if re.fullmatch(rf"{re.escape(name)}(_\d+)?", part)]
    return max(found, key=len, default=None)
