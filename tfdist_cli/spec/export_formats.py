"""The formats of exported models, and the libraries that they need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tfdist_cli.errors import UsageError

FormatName = Literal["saved_model", "keras", "onnx", "litert", "openvino"]
Quantization = Literal["int8"]


@dataclass(frozen=True)
class ExportFormat:
    """A format.

    Args:
        file_name: the name of an export in a run's `export` folder.
        suffix: the suffix of the file; empty for a folder.
        files: all files and folders that an export can have if it is a folder.
        libraries: the modules that write it, beside TensorFlow and Keras.
        extra: the extra of this package with these libraries.
    """

    file_name: str
    suffix: str = ""
    files: frozenset[str] = frozenset()
    libraries: tuple[str, ...] = ()
    extra: str = ""


_SAVED_MODEL = frozenset({"saved_model.pb", "fingerprint.pb", "variables", "assets", "assets.extra"})
EXPORT_FORMATS: dict[FormatName, ExportFormat] = {
    "saved_model": ExportFormat("saved_model", files=_SAVED_MODEL),
    "keras": ExportFormat("model.keras", ".keras"),
    "onnx": ExportFormat("model.onnx", ".onnx", libraries=("onnx", "tf2onnx"), extra="onnx"),
    "litert": ExportFormat("model.tflite", ".tflite"),
    "openvino": ExportFormat(
        "openvino",
        files=frozenset({"model.xml", "model.bin"}),
        libraries=("openvino", "scipy"),  # Keras's OpenVINO modules import scipy
        extra="openvino",
    ),
}
VERSIONS = "serving"
"""The folder in a run's `export` folder that has a SavedModel for each version."""


def require_export_libraries(formats: Iterable[FormatName]) -> None:
    """Checks that the libraries of some formats are installed, without importing them.

    Raises:
        UsageError: one is not.
    """
    for name in formats:
        form = EXPORT_FORMATS[name]
        missing = [library for library in form.libraries if importlib.util.find_spec(library) is None]
        if missing:
            raise UsageError(
                f"{' and '.join(missing)} must be installed to export in the format {name}",
                code="export-library-missing",
                hint=f"pip install 'tfdist-cli[{form.extra}]'",
            )
