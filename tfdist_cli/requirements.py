"""Checks what is installed before anything starts: TensorFlow, Keras with its TensorFlow backend, and trackers."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.trackers import TRACKERS

BACKEND = "KERAS_BACKEND"
_TENSORFLOW = "tensorflow"


def require_tensorflow(environ: Mapping[str, str] = os.environ) -> None:
    """Checks for TensorFlow and for the backend of Keras without importing them, which would take 2 s.

    Args:
        environ: the environment of the process that trains.

    Raises:
        UsageError: TensorFlow is not installed, or Keras is configured for another backend.
    """
    if importlib.util.find_spec(_TENSORFLOW) is None:
        raise UsageError(
            "TensorFlow is not installed, and training needs it",
            code="no-tensorflow",
            hint="pip install 'tfdist-cli[cpu]', or 'tfdist-cli[cuda]' for NVIDIA GPUs",
        )
    require_backend(environ)


def require_backend(environ: Mapping[str, str] = os.environ) -> None:
    """Checks that Keras uses TensorFlow.

    Raises:
        UsageError: `KERAS_BACKEND` or the configuration file of Keras names another backend, or Keras was imported with
            another one.
    """
    backend, where = keras_backend(environ)
    keras = sys.modules.get("keras")
    if environ is os.environ and hasattr(keras, "config"):
        backend = keras.config.backend()  # type: ignore[union-attr] # hasattr checked it
    if backend == _TENSORFLOW:
        return
    hint = f"unset {BACKEND}, or set it to tensorflow, before Keras is imported"
    if where != BACKEND:
        hint = f'write "backend": "tensorflow" in {where}, or set {BACKEND}=tensorflow'
    message = f"{where} selects the backend {backend} for Keras, and tfdist trains with TensorFlow"
    raise UsageError(message, code="keras-backend", hint=hint)


def require_trackers(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> None:
    """Checks that trackers' libraries are installed, without importing them, and that MLflow has a place to write.

    Raises:
        UsageError: one is not; or MLflow's client is installed alone, and no server is set; or a name is unknown.
    """
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise UsageError(f"there is no tracker {name!r}", code="unknown-tracker", hint=f"choose one of {known}")
        tracker = TRACKERS[name]
        if tracker.module and not _is_installed(tracker.module):
            raise UsageError(
                f"{tracker.title} is not installed",
                code="no-tracker-library",
                hint=f"pip install 'tfdist-cli[{tracker.extra}]'",
            )
        if tracker.local_needs and not environ.get(tracker.server) and not _is_installed(tracker.local_needs):
            raise UsageError(
                f"{tracker.title} has no place to write to: {tracker.server} is not set",
                code="no-tracking-server",
                hint=f"set {tracker.server} to the address of a server, or pip install {tracker.module}, which brings "
                "a local database",
            )


def _is_installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    # A folder such as wandb/, which the library creates for its files, is found too, but has no origin.
    return spec is not None and spec.origin is not None


def keras_backend(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Returns the backend that Keras will use, and the variable or file that selects it, as Keras reads them.

    The doctor's probe has a copy of this function: it is a single file that is sent to other machines.
    """
    if environ.get(BACKEND):
        return environ[BACKEND], BACKEND
    home = Path.home() if os.access(Path.home(), os.W_OK) else Path("/tmp")  # noqa: S108 Keras's own choice
    path = Path(environ["KERAS_HOME"]) if environ.get("KERAS_HOME") else home / ".keras"
    try:
        found = json.loads((path / "keras.json").read_text(encoding="utf-8"))
        return str(found.get("backend", _TENSORFLOW)), str(path / "keras.json")
    except (OSError, ValueError, AttributeError):  # Keras ignores a file that it cannot read
        return _TENSORFLOW, BACKEND
