"""The demo: cluster files and recipes of the repository, which the wheel contains in the folder `demo`."""

from __future__ import annotations

from pathlib import Path

import tfdist_cli
from tfdist_cli.init.files import Files

FILES = (
    "configs/local.yaml",
    "configs/local_evaluator.yaml",
    "configs/local_multi_worker_mirrored.yaml",
    "configs/local_single.yaml",
    "recipes/digits_cnn.py",
    "recipes/digits_cnn.yaml",
    "recipes/digits_mlp.yaml",
    "recipes/digits_softmax.yaml",
    "recipes/mlp.py",
)
"""The files, below the repository's root."""
FIRST = FILES[0]
"""The cluster file to begin with."""


def demo_files() -> Files:
    """Returns the demo's files. In a checkout they are read from the repository."""
    package = Path(tfdist_cli.__file__).parent
    folder = package / "demo" if (package / "demo").is_dir() else package.parent
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}
