"""Writing the trained model for programs that have no tfdist: a SavedModel, or a `.keras` file."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import ResultNotSaved, TrainingError, UsageError
from tfdist_cli.spec.path_scheme import refuse_scheme
from tfdist_cli.train.model.train_step import last_build_spec
from tfdist_cli.train.tf_compat.keras_model import Functional, build_shapes, layers_of
from tfdist_cli.train.tf_compat.op_errors import shortened
from tfdist_cli.train.variables.sharding import Block, pieces

FORMATS = ("saved_model", "keras")
_SAVED_MODEL = {"saved_model.pb", "fingerprint.pb", "variables", "assets", "assets.extra"}
"""What an export for TensorFlow consists of."""

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT)

log = logging.getLogger("tfdist")


def export(
    model: keras.Model,
    path: str | Path,
    *,
    format: str = "saved_model",  # noqa: A002 what Keras and the recipe call it
    rebuild: Callable[[], keras.Model] | None = None,
) -> Path:
    """Writes a model with the weights it has now, wherever they live.

    What it has learned is first copied into a model of this process alone, so that nothing of the cluster is written
    with it.

    Args:
        model: the trained model, built.
        path: where it is written, in the place of an earlier export. A `.keras` file gets that ending.
        format: `saved_model`, a folder for `tf.saved_model.load` and TensorFlow Serving, or `keras`, a file for
            `keras.saving.load_model`: with what the model was compiled with, unless some of that is the user's own.
        rebuild: makes a model of the same structure; by default the model's own configuration does.

    Returns:
        The path written.

    Raises:
        UsageError: the format is unknown, or something else than an export is at `path`.
        TrainingError: the model cannot be made again from its configuration, `rebuild` makes another one, or what the
            model takes is not known, since it is a class of its own that was not trained by tfdist.
        ResultNotSaved: it cannot be written there.
    """
    if format not in FORMATS:
        raise UsageError(f"{format!r} is no export format", hint=f"use {' or '.join(FORMATS)}")
    refuse_scheme(path)
    path = Path(path)
    if format == "keras":
        path = path.with_name(path.name if path.suffix == ".keras" else f"{path.name}.keras")
    _check_free(path, format)
    plain = rebuild() if rebuild else _again(model)
    _build_like(model, plain)
    _check_same(model, plain)
    _copy(model, plain)
    with _written(path) as beside:
        if format == "keras":
            _let_go_of_own(model, plain)
            plain.save(beside)
        else:
            plain.export(str(beside), verbose=False, input_signature=_signature(model))
    return path


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Where an export is written before it is whole, and takes the place of an earlier one.

    Raises:
        ResultNotSaved: it cannot be written.
    """
    beside = path.with_name(f".{path.stem}.writing{path.suffix}")
    try:
        _remove(beside)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        _remove(path)
        beside.rename(path)
    except (OSError, tf.errors.OpError) as error:
        of_tensorflow = isinstance(error, tf.errors.OpError)
        reason = shortened(error).message if of_tensorflow else str(error)
        if of_tensorflow and not any(os.strerror(number) in reason for number in _OF_A_DISK):
            raise  # it is the model's
        with suppress(OSError):
            _remove(beside)
        raise ResultNotSaved(
            f"the export could not be written to {path}: {reason}",
            hint="make room there, or name another place: `tfdist export RUN --out PATH` writes it from a checkpoint",
        ) from error


def _check_free(path: Path, form: str) -> None:
    """Only an earlier export is replaced: what else is there may be somebody's work.

    Raises:
        UsageError: something else is there.
    """
    if form == "saved_model":
        free = not path.exists() or (path.is_dir() and {entry.name for entry in path.iterdir()} <= _SAVED_MODEL)
    else:
        free = not path.is_dir()
    if not free:
        raise UsageError(
            f"{path} exists, and is no earlier export",
            hint="name another place, or remove what is there",
        )


def _let_go_of_own(model: keras.Model, plain: keras.Model) -> None:
    """Leaves out what the model was compiled with where only the user's own code could make it again."""
    own = sorted(set(_own_names(model.get_compile_config())))
    if own:
        plain.compiled = False
        log.info("the .keras file has no loss, metrics and optimizer, since others don't have %s", ", ".join(own))


def _own_names(config: Any) -> Iterator[str]:
    """The classes and functions in a configuration that are not Keras's."""
    if isinstance(config, dict):
        name = config.get("registered_name")
        if name or config.get("class_name") == "__lambda__":
            yield str(name or "a lambda")
    for part in config.values() if isinstance(config, dict) else config if isinstance(config, (list, tuple)) else ():
        yield from _own_names(part)


def _again(model: keras.Model) -> keras.Model:
    try:
        config = keras.saving.serialize_keras_object(model)
        if any(_own_names(config.get("compile_config"))):
            del config["compile_config"]  # it need not be made again
        return keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TrainingError(
            f"{type(model).__name__} cannot be made again from its configuration: {error}",
            hint="register it with keras.saving.register_keras_serializable() and give it get_config()",
        ) from error


def _build_like(model: keras.Model, plain: keras.Model) -> None:
    """Makes the variables of a model that has not been called yet."""
    if isinstance(plain, Functional) or all(layer.built for layer in layers_of(plain)):
        return
    inputs = _inputs(model)
    if inputs is None:
        inputs = _called_with(model)
    # Keras's `build` makes no variables of a model that is a class of its own, a call does.
    plain(tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), inputs))


def _inputs(model: keras.Model) -> Any:
    """The `tf.TypeSpec`s of what the model takes, in batches of any size; None if it was not trained here."""
    batches = last_build_spec(model)
    if batches is None:
        return None

    def of_any_size(spec: Any) -> Any:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec

    return tf.nest.map_structure(of_any_size, keras.utils.unpack_x_y_sample_weight(batches)[0])


def _called_with(model: keras.Model) -> Any:
    """What stands in for the inputs of a model that was not trained here: Keras keeps their shapes, not their types.

    Raises:
        TrainingError: the shapes of one input, or one structure of them, are not known.
    """
    shapes = build_shapes(model)
    if not shapes or len(shapes) > 1:
        raise TrainingError(
            f"the model {model.name!r} cannot be exported: what it takes is not known",
            hint="train or evaluate it before, with tfdist",
        )
    return keras.tree.map_shape_structure(
        lambda shape: tf.TensorSpec([None, *shape[1:]], model.input_dtype), next(iter(shapes.values()))
    )


def _signature(model: keras.Model) -> list[Any] | None:
    """What an exported model is to take; None where Keras knows it by the model's own inputs.

    Raises:
        TrainingError: nobody knows.
    """
    if isinstance(model, (keras.Sequential, Functional)):
        return None
    inputs = _inputs(model)
    if inputs is None:
        raise TrainingError(
            f"the model {model.name!r} cannot be exported as a SavedModel: the types of its inputs are not known",
            hint="train or evaluate it before, with tfdist, or export it with format='keras'",
        )
    return [inputs]


def _check_same(model: keras.Model, plain: keras.Model) -> None:
    """Raises a `TrainingError` where one model cannot be given what the other has learned."""
    some, others = ([(weight.path, tuple(weight.shape)) for weight in each.weights] for each in (model, plain))
    found = next((pair for pair in zip(some, others, strict=False) if pair[0][1] != pair[1][1]), None)
    counts = [(len(each.weights), len(layers_of(each))) for each in (model, plain)]
    if found:
        (path, shape), (_, other) = found
        difference = f"{path} has the shape {shape}, and that of the model made again is {other}"
    elif counts[0] != counts[1]:
        own, again = (f"{variables} variables in {layers} layers" for variables, layers in counts)
        difference = f"it has {own}, and the model made again {again}"
    else:
        return
    raise TrainingError(
        f"the model {model.name!r} cannot be exported: {difference}",
        hint="a recipe's model(), or `rebuild`, has to make the same layers each time; and get_config() of a class of "
        "your own has to hold what its __init__ takes",
    )


def _copy(model: keras.Model, plain: keras.Model) -> None:
    """Gives what one model has learned to another; of variables that are spread, a few rows at a time."""
    for weight, own in zip(model.weights, plain.weights, strict=True):
        for piece in pieces(weight):
            if isinstance(piece, Block):
                replace(piece, shard=own.value, start=piece.first).write(piece.read())
            else:
                own.assign(piece.read())
    for layer, same in zip(layers_of(model), layers_of(plain), strict=True):
        if isinstance(same, keras.layers.Normalization):
            same.finalize_state()  # what it computes with follows from its variables
        if hasattr(layer, "save_assets"):  # what has been learned without variables: vocabularies, weights of words
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                try:
                    same.load_own_variables(store)
                    same.load_assets(folder)
                except (AttributeError, TypeError) as error:
                    if "idf_weights" not in store:
                        raise
                    raise TrainingError(
                        f"Keras {keras.__version__} cannot load the weights of words that {layer.name!r} has adapted",
                        hint="install Keras 3.14 or newer, or use another output_mode than tf_idf",
                    ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
