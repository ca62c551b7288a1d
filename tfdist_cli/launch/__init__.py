"""Starts the tasks of a plan somewhere, watches them, and ends them together.

This package is also the function `tfdist.launch`: `tfdist_cli.launch("cluster.yaml")` calls `runs.handle.launch`. An
attribute of `tfdist_cli` with the package's name would be replaced when the package is imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls `tfdist_cli.runs.handle.launch`, which has the documentation.

        The function is above this package: it also handles runs in storage services.
        """
        return importlib.import_module("tfdist_cli.runs.handle").launch(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage
