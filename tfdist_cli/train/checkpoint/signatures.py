"""Named signatures of a SavedModel: functions of a trained model that TensorFlow Serving calls by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import UsageError
from tfdist_cli.train.layers.dynamic_tables import index_variables

Signature = Any
"""A Keras model; a `tf.function` with an `input_signature`; or a function and its input signature."""
Signatures = Callable[[keras.Model], Mapping[str, Signature]]
"""Returns the signatures of a model by their names."""
SERVE = "serve"
"""Keras's name of the endpoint that calls the whole model. It is `serving_default` too, unless that is defined."""
_HINT = (
    "return {'embed': keras.Model(model.inputs, layer.output)}, a tf.function with an input_signature, or a function "
    "and its input signature: (function, [tf.TensorSpec([None, 3], tf.float32)])"
)


def write_saved_model(
    model: keras.Model, path: Path, input_signature: Sequence[Any] | None, signatures: Signatures | None = None
) -> None:
    """Writes a SavedModel with the model as `serve`, and with further signatures.

    Args:
        model: the model; its variables are in this process.
        path: the folder, which does not exist.
        input_signature: the `tf.TensorSpec`s of the model's inputs; None if the model knows them.
        signatures: returns the further signatures of this model; None for none.

    Raises:
        UsageError: the signatures are invalid, or cannot be written.
    """
    archive = keras.export.ExportArchive()
    archive.track_and_add_endpoint(SERVE, model, input_signature or _inputs(model))
    if indices := index_variables(model):
        archive.add_variable_collection("indices", indices)  # Keras tracks only what it trains or saves itself
    for name, signature in _checked(signatures(model) if signatures else {}).items():
        _add(archive, name, signature)
    try:
        archive.write_out(str(path), verbose=False)
    except AssertionError as error:  # TensorFlow found a resource of a function in no object that is saved
        raise UsageError(
            f"a signature of the model {model.name!r} uses a table or a variable that is not saved with the model",
            code="signature-not-exportable",
            hint="make it an attribute of the model or of one of its layers: model.table = table",
        ) from error


def _checked(found: Any) -> Mapping[str, Signature]:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in found):
        raise UsageError(
            f"signatures must be a dict of names and functions, got {found!r}", code="invalid-signatures", hint=_HINT
        )
    if SERVE in found:
        raise UsageError(
            f"the signature {SERVE!r} is the model itself",
            code="reserved-signature",
            hint="name it 'serving_default' to replace the default of TensorFlow Serving, or choose another name",
        )
    return found


def _add(archive: Any, name: str, signature: Signature) -> None:
    try:
        match signature:
            case keras.Model():
                archive.track_and_add_endpoint(name, signature, _inputs(signature))
            case (function, specs) if callable(function):
                archive.add_endpoint(name, function, specs)
            case _ if hasattr(signature, "get_concrete_function"):
                signature.get_concrete_function()  # Keras exports what was traced
                archive.add_endpoint(name, signature)
            case _:
                raise TypeError(f"it is a {type(signature).__name__}")  # noqa: TRY301 reported with the others
    except (TypeError, ValueError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"the signature {name!r} cannot be exported: {reason}", code="invalid-signatures", hint=_HINT
        ) from error


def _inputs(model: keras.Model) -> list[Any]:
    """Returns the input signature of a model made of `keras.Input`, for any batch size.

    Raises:
        AttributeError: it is a subclassed model, which has no inputs of its own.
    """
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return [keras.tree.map_structure(_spec, inputs)]


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, tensor.name)
