"""One YAML file, a TensorFlow cluster, a trained Keras 3 model.

In a program of your own:

    import tfdist_cli as tfdist

    with tfdist.scope():
        model = build()
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = tfdist.fit(model, dataset_fn, epochs=5)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_cli.integrations import ray, spark
    from tfdist_cli.protocol.environment import run_dir
    from tfdist_cli.runs.handle import Run, launch
    from tfdist_cli.spec.sections.updates import EmbeddingRule, LearningRate, ShardRule, Updates
    from tfdist_cli.tables.reader import TableReader
    from tfdist_cli.train import layers
    from tfdist_cli.train.checkpoint.export import export
    from tfdist_cli.train.cluster.join import is_chief, scope
    from tfdist_cli.train.data.files import list_files, read_file, read_lines, read_records
    from tfdist_cli.train.data.parquet import read_parquet
    from tfdist_cli.train.data.shard import Shard
    from tfdist_cli.train.prediction.predict import predict
    from tfdist_cli.train.trainer.config.checkpoints import Checkpoints
    from tfdist_cli.train.trainer.config.validation import Validation
    from tfdist_cli.train.trainer.evaluate import evaluate
    from tfdist_cli.train.trainer.fit import fit

    __version__: str

_MODULES = {
    "Checkpoints": "tfdist_cli.train.trainer.config.checkpoints",
    "EmbeddingRule": "tfdist_cli.spec.sections.updates",
    "LearningRate": "tfdist_cli.spec.sections.updates",
    "Run": "tfdist_cli.runs.handle",
    "Shard": "tfdist_cli.train.data.shard",
    "ShardRule": "tfdist_cli.spec.sections.updates",
    "TableReader": "tfdist_cli.tables.reader",
    "Updates": "tfdist_cli.spec.sections.updates",
    "Validation": "tfdist_cli.train.trainer.config.validation",
    "evaluate": "tfdist_cli.train.trainer.evaluate",
    "export": "tfdist_cli.train.checkpoint.export",
    "fit": "tfdist_cli.train.trainer.fit",
    "is_chief": "tfdist_cli.train.cluster.join",
    "list_files": "tfdist_cli.train.data.files",
    "predict": "tfdist_cli.train.prediction.predict",
    "read_file": "tfdist_cli.train.data.files",
    "read_lines": "tfdist_cli.train.data.files",
    "read_parquet": "tfdist_cli.train.data.parquet",
    "read_records": "tfdist_cli.train.data.files",
    "run_dir": "tfdist_cli.protocol.environment",
    "scope": "tfdist_cli.train.cluster.join",
}

__all__ = [
    "Checkpoints",
    "EmbeddingRule",
    "LearningRate",
    "Run",
    "Shard",
    "ShardRule",
    "TableReader",
    "Updates",
    "Validation",
    "evaluate",
    "export",
    "fit",
    "is_chief",
    "launch",
    "layers",
    "list_files",
    "predict",
    "ray",
    "read_file",
    "read_lines",
    "read_parquet",
    "read_records",
    "run_dir",
    "scope",
    "spark",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: a machine that only launches may not have TensorFlow."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("tfdist-cli")
    if name == "launch":  # a package that can be called
        return importlib.import_module("tfdist_cli.launch")
    if name in ("ray", "spark"):
        return importlib.import_module(f"tfdist_cli.integrations.{name}")
    if name == "layers":
        importlib.import_module("tfdist_cli.requirements").require_backend()
        return importlib.import_module("tfdist_cli.train.layers")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if ".train." in _MODULES[name]:
        importlib.import_module("tfdist_cli.requirements").require_backend()
    try:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ModuleNotFoundError(
            "TensorFlow is not installed here, and training needs it: pip install 'tfdist-cli[cpu]', "
            "or 'tfdist-cli[cuda]' for NVIDIA GPUs",
            name="tensorflow",
        ) from error
    globals()[name] = value
    return value
