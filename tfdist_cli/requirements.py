"""What a command that trains needs, told before anything starts."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tfdist_cli.errors import UsageError

BACKEND = "KERAS_BACKEND"
_TENSORFLOW = "tensorflow"


def require_tensorflow(environ: Mapping[str, str] = os.environ) -> None:
    """Looks for TensorFlow, and for what Keras is to compute with; importing them would take 2 s.

    Args:
        environ: the environment of the process that is to train.

    Raises:
        UsageError: there is no TensorFlow, with the extra to install; or Keras is to use another backend.
    """
    if importlib.util.find_spec(_TENSORFLOW) is None:
        raise UsageError(
            "TensorFlow is not installed here, and training needs it",
            hint="pip install 'tfdist-cli[cpu]', or 'tfdist-cli[cuda]' for NVIDIA GPUs",
        )
    require_backend(environ)


def require_backend(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses Keras's other backends.

    Raises:
        UsageError: `KERAS_BACKEND` or Keras's configuration file names one, or Keras has been imported with one.
    """
    backend, where = keras_backend(environ)
    keras = sys.modules.get("keras")
    if environ is os.environ and hasattr(keras, "config"):
        backend = keras.config.backend()  # type: ignore[union-attr] # it has a config
    if backend == _TENSORFLOW:
        return
    hint = f"unset {BACKEND}, or set it to tensorflow, before Keras is imported"
    if where != BACKEND:
        hint = f'write "backend": "tensorflow" in {where}, or set {BACKEND}=tensorflow'
    raise UsageError(f"{where} has Keras use {backend}, and tfdist trains with TensorFlow", hint=hint)


def keras_backend(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The backend that Keras is going to use, and where that is written, as Keras reads it.

    The doctor's probe has this function once more, since it is sent to other machines by itself.
    """
    if environ.get(BACKEND):
        return environ[BACKEND], BACKEND
    home = Path.home() if os.access(Path.home(), os.W_OK) else Path("/tmp")  # noqa: S108 Keras's own choice
    path = Path(environ["KERAS_HOME"]) if environ.get("KERAS_HOME") else home / ".keras"
    try:
        found = json.loads((path / "keras.json").read_text(encoding="utf-8"))
        return str(found.get("backend", _TENSORFLOW)), str(path / "keras.json")
    except (OSError, ValueError, AttributeError):  # Keras passes over a file that it cannot read
        return _TENSORFLOW, BACKEND
