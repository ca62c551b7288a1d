"""Writes the files of a model in each format of an export."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import keras

from tfdist_cli.errors import ResultNotSaved, UsageError
from tfdist_cli.spec.export_formats import FormatName
from tfdist_cli.train.tf_compat.op_errors import summary


def write_model(model: keras.Model, path: Path, format: FormatName, input_signature: list[Any] | None) -> None:  # noqa: A002
    """Writes a model.

    Args:
        model: the model; its variables are in this process.
        path: the file or folder, which does not exist.
        format: the format.
        input_signature: the `tf.TensorSpec`s of the inputs; None if Keras derives them from the model.

    Raises:
        ResultNotSaved: the model has operations that the format does not have.
    """
    if format == "keras":
        model.save(path)
    elif format == "saved_model":
        model.export(str(path), verbose=False, input_signature=input_signature)
    else:
        _convert(model, path, format, input_signature)


def _convert(model: keras.Model, path: Path, format: FormatName, input_signature: list[Any] | None) -> None:  # noqa: A002
    """Writes a model in a format that is not TensorFlow's."""
    target = path
    if format == "openvino":
        path.mkdir()
        target = path / "model.xml"
    if format == "onnx" and input_signature is None:
        # Keras exports to ONNX only what was called.
        model(model.inputs[0] if isinstance(model, keras.Sequential) else model.input)
    try:
        # tf2onnx and LiteRT print warnings for their developers.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            model.export(str(target), format=format, verbose=False, input_signature=input_signature)
        if format == "onnx":
            import onnx  # noqa: PLC0415 an extra

            onnx.checker.check_model(target)  # tf2onnx writes operations that it does not know as they are
    except OSError:
        raise
    except Exception as error:  # each converter has its own errors
        raise ResultNotSaved(
            f"the model {model.name!r} cannot be converted to the format {format}: {summary(error)}",
            code="export-not-converted",
            hint="export it as saved_model or keras, which have all operations",
        ) from error


def quantize_weights(model: keras.Model) -> None:
    """Stores the weights of a model's `Dense`, `EinsumDense` and `Embedding` layers as int8 with a scale each channel.

    Activations keep their type, so no calibration is needed.

    Raises:
        UsageError: this Keras cannot.
        ResultNotSaved: the model has no such layer.
    """
    require_quantization()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns for each layer that keeps its type
        model.quantize(config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))
    if not any(weight.dtype == "int8" for weight in model.weights):
        raise ResultNotSaved(
            f"Keras can quantize no layer of the model {model.name!r}",
            code="nothing-to-quantize",
            hint="export it without 'quantize'",
        )


def require_quantization() -> None:
    """Checks that this Keras can quantize weights alone.

    Raises:
        UsageError: it cannot.
    """
    if not hasattr(keras.quantizers, "Int8QuantizationConfig"):
        raise UsageError(
            f"Keras {keras.__version__} cannot quantize weights alone",
            code="keras-too-old",
            hint="install Keras 3.14 or newer, or export without 'quantize'",
        )
