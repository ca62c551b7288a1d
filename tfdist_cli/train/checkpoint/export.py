"""Export of a trained model for programs without tfdist: weights of a cluster, written by one process."""

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
from tfdist_cli.spec.export_formats import EXPORT_FORMATS, FormatName, Quantization, require_export_libraries
from tfdist_cli.spec.path_scheme import Location, Url, checked_location
from tfdist_cli.storage.tree import check_replaceable, upload_result
from tfdist_cli.train.checkpoint.model_files import quantize_weights, require_quantization, write_model
from tfdist_cli.train.checkpoint.signatures import Signatures, write_saved_model
from tfdist_cli.train.layers.dynamic_tables import index_variables
from tfdist_cli.train.model.train_step import last_build_spec
from tfdist_cli.train.tf_compat.keras_model import Functional, build_shapes, layers_of
from tfdist_cli.train.tf_compat.op_errors import shortened
from tfdist_cli.train.variables.sharding import Block, pieces

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT)

log = logging.getLogger("tfdist")


def export(
    model: keras.Model,
    path: str | Path,
    *,
    format: FormatName = "saved_model",  # noqa: A002 the name that Keras and recipes use
    rebuild: Callable[[], keras.Model] | None = None,
    version: int | None = None,
    quantize: Quantization | None = None,
    signatures: Signatures | None = None,
) -> Location:
    """Exports a model with its current weights, on whichever tasks they are.

    The weights are first copied into a model of this process alone, so that nothing of the cluster is exported.

    Args:
        model: the trained model, built.
        path: where to write it, on this machine or in a storage service: `s3://bucket/model`. An earlier export there
            is replaced. A file gets the suffix of its format.
        format: `saved_model`, a folder for `tf.saved_model.load` and TensorFlow Serving; `keras`, a file for
            `keras.saving.load_model`; `onnx`, a file for ONNX Runtime; `litert`, a `.tflite` file; or `openvino`, a
            folder with `model.xml` and `model.bin`. A `.keras` file contains the loss, metrics and optimizer unless
            some of them are the user's own.
        rebuild: returns a model of the same structure; by default it is rebuilt from its configuration.
        version: writes a SavedModel to the folder `path/VERSION`. TensorFlow Serving serves the highest.
        quantize: `int8` stores the weights of `Dense`, `EinsumDense` and `Embedding` layers in a quarter of the bytes,
            in all formats but `keras`.
        signatures: a function of a model that returns further signatures of a SavedModel by their names: a Keras model,
            a `tf.function` with an `input_signature`, or a function and its input signature. It is called with the
            model that is written. The model itself is `serve`, and `serving_default` unless that is among them.

    Returns:
        The path or the address written.

    Raises:
        UsageError: the format is unknown, its library is not installed, the storage service cannot be used, `path`
            exists and is not an export, or the signatures are invalid.
        TrainingError: the model cannot be rebuilt from its configuration, `rebuild` returns another model, or the
            model's inputs are not known, since it is a subclassed model that was not trained by tfdist.
        ResultNotSaved: the export cannot be written, or the format does not have the model's operations.
    """
    _check_arguments(format, version, quantize, signatures)
    at = checked_location(path)
    suffix = EXPORT_FORMATS[format].suffix
    if suffix and not at.name.endswith(suffix):
        at = Url(f"{at}{suffix}") if isinstance(at, Url) else at.with_name(f"{at.name}{suffix}")
    if version is not None:
        at = at / str(version)
    if isinstance(at, Url):
        return _export_to_service(model, at, format, rebuild, quantize, signatures)
    path = at
    _check_replaceable(path, format)
    plain = rebuild() if rebuild else _rebuild(model)
    _build_like(model, plain)
    _check_same(model, plain)
    _copy(model, plain)
    input_signature = None if format == "keras" else _signature(model)
    if format == "keras":
        _drop_custom_compile_config(model, plain)
    if quantize:
        quantize_weights(plain)
    with _written(path) as temporary:
        if signatures or (format == "saved_model" and index_variables(plain)):
            write_saved_model(plain, temporary, input_signature, signatures)
        else:
            write_model(plain, temporary, format, input_signature)
    return path


def upload_export(path: Path, url: Url, format: FormatName) -> None:  # noqa: A002 as in `export`
    """Uploads an export.

    Args:
        path: the export.
        url: where it is stored; an earlier export there is replaced.
        format: its format.

    Raises:
        UsageError: `url` exists and is not an export.
        ResultNotSaved: it could not be uploaded.
    """
    if files := EXPORT_FORMATS[format].files:
        check_replaceable(url, files)
    upload_result(path, url, last="model.xml" if format == "openvino" else "saved_model.pb")


def _export_to_service(
    model: keras.Model,
    url: Url,
    format: FormatName,  # noqa: A002 as in `export`
    rebuild: Callable[[], keras.Model] | None,
    quantize: Quantization | None,
    signatures: Signatures | None,
) -> Url:
    folder = Path(tempfile.mkdtemp(prefix="tfdist-export-"))
    path = folder / url.name
    export(model, path, format=format, rebuild=rebuild, quantize=quantize, signatures=signatures)
    upload_export(path, url, format)
    _remove(folder)  # kept if it could not be uploaded
    return url


def _check_arguments(format: Any, version: Any, quantize: Any, signatures: Any) -> None:  # noqa: A002 as in `export`
    problem = None
    if format not in EXPORT_FORMATS:
        problem = f"format must be {' or '.join(map(repr, EXPORT_FORMATS))}, got {format!r}"
    elif quantize not in {None, "int8"}:
        problem = f"quantize must be 'int8' or None, got {quantize!r}"
    elif quantize and format == "keras":
        problem = "a .keras file has no quantized weights"  # Keras could not load those of layers in other layers
    elif version is not None and format != "saved_model":
        problem = f"only a SavedModel has a version, and format is {format!r}"
    elif version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        problem = f"version must be an integer of at least 0, got {version!r}"
    elif signatures is not None and format != "saved_model":
        problem = f"only a SavedModel has signatures, and format is {format!r}"
    elif signatures is not None and not callable(signatures):
        problem = f"signatures must be a function of the model, got {signatures!r}"
    if problem:
        raise UsageError(problem, code="invalid-argument")
    require_export_libraries([format])
    if quantize:
        require_quantization()


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write an export to, and then renames it to `path`, replacing an earlier export.

    Raises:
        ResultNotSaved: it cannot be written.
    """
    temporary = path.with_name(f".{path.stem}.writing{path.suffix}")
    try:
        _remove(temporary)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _remove(path)
        temporary.rename(path)
    except (ResultNotSaved, UsageError):
        _remove(temporary)
        raise
    except (OSError, tf.errors.OpError) as error:
        of_tensorflow = isinstance(error, tf.errors.OpError)
        reason = shortened(error).message if of_tensorflow else str(error)
        if of_tensorflow and not any(os.strerror(number) in reason for number in _DISK_ERRORS):
            raise  # the model's error, not the disk's
        with suppress(OSError):
            _remove(temporary)
        raise ResultNotSaved(
            f"the export could not be written to {path}: {reason}",
            code="export-not-written",
            hint="free space there, or choose another path: `tfdist export RUN --out PATH` exports from a checkpoint",
        ) from error


def _check_replaceable(path: Path, format: FormatName) -> None:  # noqa: A002 as in `export`
    """Checks that nothing but an earlier export is replaced.

    Raises:
        UsageError: `path` exists, and is not an export.
    """
    if files := EXPORT_FORMATS[format].files:
        replaceable = not path.exists() or (path.is_dir() and {entry.name for entry in path.iterdir()} <= files)
    else:
        replaceable = not path.is_dir()
    if not replaceable:
        raise UsageError(
            f"{path} exists, and is not an earlier export",
            code="export-path-exists",
            hint="choose another path, or remove it",
        )


def _drop_custom_compile_config(model: keras.Model, plain: keras.Model) -> None:
    """Leaves out the loss, metrics and optimizer if loading them needs the user's code."""
    custom = sorted(set(_custom_names(model.get_compile_config())))
    if custom:
        plain.compiled = False
        log.info(
            "the .keras file has no loss, metrics and optimizer: loading needs your code for %s", ", ".join(custom)
        )


def _custom_names(config: Any) -> Iterator[str]:
    """Yields the classes and functions in a configuration that are not Keras's."""
    if isinstance(config, dict):
        name = config.get("registered_name")
        if name or config.get("class_name") == "__lambda__":
            yield str(name or "a lambda")
    for part in config.values() if isinstance(config, dict) else config if isinstance(config, (list, tuple)) else ():
        yield from _custom_names(part)


def _rebuild(model: keras.Model) -> keras.Model:
    try:
        config = keras.saving.serialize_keras_object(model)
        if any(_custom_names(config.get("compile_config"))):
            del config["compile_config"]  # its user code need not be loadable
        return keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise TrainingError(
            f"{type(model).__name__} cannot be rebuilt from its configuration: {error}",
            code="model-not-rebuildable",
            hint="register it with keras.saving.register_keras_serializable() and give it get_config()",
        ) from error


def _build_like(model: keras.Model, plain: keras.Model) -> None:
    """Creates the variables of a model that has not been called yet."""
    if isinstance(plain, Functional) or all(layer.built for layer in layers_of(plain)):
        return
    inputs = _inputs(model)
    if inputs is None:
        inputs = _inputs_of_last_call(model)
    # Keras's `build` does not create the variables of a subclassed model, a call does.
    plain(tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), inputs))


def _inputs(model: keras.Model) -> Any:
    """Returns the `tf.TypeSpec`s of the model's inputs for any batch size; None if it was not trained by tfdist."""
    batches = last_build_spec(model)
    if batches is None:
        return None

    def of_any_size(spec: Any) -> Any:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec

    return tf.nest.map_structure(of_any_size, keras.utils.unpack_x_y_sample_weight(batches)[0])


def _inputs_of_last_call(model: keras.Model) -> Any:
    """Returns specs of the inputs of a model that was not trained by tfdist. Keras keeps their shapes, not their types.

    Raises:
        TrainingError: Keras does not know the shapes, or knows those of several arguments.
    """
    shapes = build_shapes(model)
    if not shapes or len(shapes) > 1:
        raise TrainingError(
            f"the model {model.name!r} cannot be exported: its inputs are not known",
            code="model-inputs-unknown",
            hint="train or evaluate it with tfdist first",
        )
    return keras.tree.map_shape_structure(
        lambda shape: tf.TensorSpec([None, *shape[1:]], model.input_dtype), next(iter(shapes.values()))
    )


def _signature(model: keras.Model) -> list[Any] | None:
    """Returns the input signature of a SavedModel; None if Keras derives it from the model's own inputs.

    Raises:
        TrainingError: it is not known.
    """
    if isinstance(model, (keras.Sequential, Functional)):
        return None
    inputs = _inputs(model)
    if inputs is None:
        raise TrainingError(
            f"the model {model.name!r} cannot be exported without Keras: the types of its inputs are not known",
            code="model-inputs-unknown",
            hint="train or evaluate it with tfdist first, or export it with format='keras'",
        )
    return [inputs]


def _check_same(model: keras.Model, plain: keras.Model) -> None:
    """Checks that the weights of one model fit the other.

    Raises:
        TrainingError: they do not.
    """
    some, others = ([(weight.path, tuple(weight.shape)) for weight in each.weights] for each in (model, plain))
    found = next((pair for pair in zip(some, others, strict=False) if pair[0][1] != pair[1][1]), None)
    counts = [(len(each.weights), len(layers_of(each))) for each in (model, plain)]
    if found:
        (path, shape), (_, other) = found
        difference = f"{path} has the shape {shape}, and {other} in the rebuilt model"
    elif counts[0] != counts[1]:
        own, rebuilt = (f"{variables} variables in {layers} layers" for variables, layers in counts)
        difference = f"it has {own}, and the rebuilt model has {rebuilt}"
    else:
        return
    raise TrainingError(
        f"the model {model.name!r} cannot be exported: {difference}",
        code="model-rebuilt-differently",
        hint="a recipe's model(), or `rebuild`, has to create the same layers each time; and get_config() of your own "
        "class has to return the arguments of its __init__",
    )


def _copy(model: keras.Model, plain: keras.Model) -> None:
    """Copies the weights of one model to another; of sharded variables, a few rows at a time."""
    some, others = ([*each.weights, *index_variables(each)] for each in (model, plain))
    for weight, own in zip(some, others, strict=True):
        for piece in pieces(weight):
            if isinstance(piece, Block):
                replace(piece, shard=own.value, start=piece.first).write(piece.read())
            else:
                own.assign(piece.read())
    for layer, same in zip(layers_of(model), layers_of(plain), strict=True):
        if isinstance(same, keras.layers.Normalization):
            same.finalize_state()  # computes further attributes from its variables
        if hasattr(layer, "save_assets"):  # adapted without variables: vocabularies, tf-idf weights
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
                        f"Keras {keras.__version__} cannot load the tf-idf weights of {layer.name!r}",
                        code="keras-too-old",
                        hint="install Keras 3.14 or newer, or use another output_mode than tf_idf",
                    ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
