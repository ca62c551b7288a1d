"""Starts the tasks of a plan somewhere, watches them, and ends them together.

This package is also the function `tfdist.launch`: `tfdist_cli.launch("cluster.yaml")` calls `handle.launch`. An
attribute of `tfdist_cli` with the package's name would be replaced when the package is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls `tfdist_cli.launch.handle.launch`, which has the documentation."""
        from tfdist_cli.launch.handle import launch  # noqa: PLC0415 tasks and helpers import this package, too

        return launch(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage
