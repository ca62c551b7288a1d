"""What a command that trains needs, told before anything starts."""

from __future__ import annotations

import importlib.util

from tfdist_cli.errors import UsageError


def require_tensorflow() -> None:
    """Raises `UsageError`, naming the extra to install, where there is no TensorFlow; importing it would take 2 s."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UsageError(
            "TensorFlow is not installed here, and training needs it",
            hint="pip install 'tfdist-cli[cpu]', or 'tfdist-cli[cuda]' for NVIDIA GPUs",
        )
