"""What `tfdist launch` checks before it starts a recipe, without importing the recipe's module or TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist_cli.check.source import ModuleSource, data_findings, function_findings, read_module
from tfdist_cli.errors import UsageError
from tfdist_cli.finding import Finding
from tfdist_cli.requirements import require_tensorflow
from tfdist_cli.spec.loading.recipe_module import find_module, find_top_module
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.strategies import computes_gradients

_CHECKED_BEFORE = {"keras", "tensorflow"}
"""Modules that `require_tensorflow` reports."""


def quick_findings(cluster: Cluster, recipe: Recipe, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Returns what is wrong with a recipe, errors first.

    Where tasks run in containers or on other hosts, their Python may have other modules and settings: what this one
    lacks is not reported.

    Args:
        cluster: the cluster.
        recipe: the recipe that it trains. Its module exists if tasks run on this machine.
        environ: the environment of the launcher, which its tasks inherit.
    """
    here = cluster.launcher_traits.local_processes
    found = list(_backend_findings(cluster, environ)) if here else []
    module = find_module(recipe, _folders(cluster))
    if module and module.origin and module.origin.endswith(".py"):
        source = read_module(Path(module.origin))
        if isinstance(source, Finding):
            return [*found, source]
        found += function_findings(source)
        found += data_findings(source, _shards(cluster, recipe))
        if here:
            found += _import_findings(source, recipe, _folders(cluster))
    return sorted(found, key=lambda finding: finding.level)


def _shards(cluster: Cluster, recipe: Recipe) -> int:
    if recipe.train.share != "split":
        return 1
    return sum(computes_gradients(cluster.strategy, task.role) for task in cluster.tasks)


def _folders(cluster: Cluster) -> Sequence[str]:
    """The folders in which the tasks' Python looks for modules, beside the recipe's."""
    paths = [spec.env.get("PYTHONPATH", "") for role in ROLES if (spec := cluster.roles.of(role))]
    return [*(folder for path in paths for folder in path.split(os.pathsep) if folder), str(Path.cwd())]


def _backend_findings(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the roles that train without TensorFlow, or with Keras on another backend; one if all have the same."""
    found: dict[str, Finding] = {}
    for task in cluster.tasks:
        if not (task.traits.trains or task.traits.evaluates):
            continue
        try:
            require_tensorflow({**environ, **cluster.role(task).env})
        except UsageError as error:
            finding = Finding(error.code, "error", f"role {task.role}", error.message, error.hint or "")
            found.setdefault(error.message, finding)
    yield from found.values()


def _import_findings(source: ModuleSource, recipe: Recipe, folders: Sequence[str]) -> Iterator[Finding]:
    for name, line in source.imported:
        if name == "tfdist" and find_top_module(name, recipe, folders) is None:
            yield Finding(
                code="wrong-import",
                level="error",
                place=f"{source.path}:{line}",
                message="the recipe's module imports 'tfdist', which is the name of the command",
                fix="write `import tfdist_cli as tfdist`: tfdist_cli is the name of the package",
            )
        elif name not in _CHECKED_BEFORE and find_top_module(name, recipe, folders) is None:
            yield Finding(
                code="missing-import",
                level="error",
                place=f"{source.path}:{line}",
                message=f"the recipe's module imports {name!r}, which is not installed here",
                fix=f"install the package that has the module {name}, or put {name}.py beside the recipe",
            )
