"""Writing the trained model for programs that have no tfdist: a SavedModel, or a `.keras` file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from tfdist_cli.errors import TrainingError, UsageError
from tfdist_cli.train.shards import Block, pieces

FORMATS = ("saved_model", "keras")


def export(
    model: keras.Model,
    path: str | Path,
    *,
    format: str = "saved_model",  # noqa: A002 what Keras and the recipe call it
    rebuild: Callable[[], keras.Model] | None = None,
) -> Path:
    """Writes a model with the weights it has now, wherever they live.

    The weights are first copied into a model of this process alone, so that nothing of the cluster is written with it.

    Args:
        model: the trained model, built.
        path: where it is written; replaced when it exists. A `.keras` file gets that ending.
        format: `saved_model`, a folder for `tf.saved_model.load` and TensorFlow Serving, or `keras`, a file for
            `keras.saving.load_model`.
        rebuild: makes a model of the same structure; by default the model's own configuration does.

    Returns:
        The path written.

    Raises:
        UsageError: the format is unknown.
        TrainingError: the model cannot be made again from its configuration.
    """
    if format not in FORMATS:
        raise UsageError(f"{format!r} is no export format", hint=f"use {' or '.join(FORMATS)}")
    plain = rebuild() if rebuild else _again(model)
    if not plain.built:
        plain.build(_input_shape(model))
    _copy(model, plain)
    path = Path(path)
    if format == "keras":
        path = path.with_name(path.name if path.suffix == ".keras" else f"{path.name}.keras")
    beside = path.with_name(f".{path.stem}.writing{path.suffix}")
    _remove(beside)
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "keras":
        plain.save(beside)
    else:
        plain.export(str(beside), verbose=False)
    _remove(path)
    beside.rename(path)
    return path


def _again(model: keras.Model) -> keras.Model:
    try:
        return keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TrainingError(
            f"{type(model).__name__} cannot be made again from its configuration: {error}",
            hint="register it with keras.saving.register_keras_serializable() and give it get_config()",
        ) from error


def _copy(model: keras.Model, plain: keras.Model) -> None:
    """Gives the weights of one model to another; of those that are spread, a few rows at a time."""
    for weight, own in zip(model.weights, plain.weights, strict=True):
        for piece in pieces(weight):
            if isinstance(piece, Block):
                replace(piece, shard=own.value, start=piece.first).write(piece.read())
            else:
                own.assign(piece.read())


def _input_shape(model: keras.Model) -> Any:
    shapes = model._build_shapes_dict
    return next(iter(shapes.values())) if shapes and len(shapes) == 1 else shapes


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
