"""`tfdist.spark`: trains on DataFrames, in the executors of the program's own SparkSession."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist_cli.errors import UsageError

if TYPE_CHECKING:
    from tfdist_cli.integrations.spark.estimator import KerasEstimator, KerasModel
    from tfdist_cli.integrations.spark.training import fit

_MODULES = {"KerasEstimator": "estimator", "KerasModel": "estimator", "fit": "training"}
__all__ = ["KerasEstimator", "KerasModel", "fit"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used.

    Raises:
        UsageError: pyspark is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("pyspark", "py4j", "numpy"):
            raise
        raise UsageError(
            f"tfdist.spark needs the package {error.name}, which is not installed",
            code="package-missing",
            hint="pip install 'tfdist-cli[spark,cpu]'",
        ) from None
