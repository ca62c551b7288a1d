"""`tfdist validate`: checks the files."""

from __future__ import annotations

from collections import Counter

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import ClusterArgument, RecipeOption, SetOption
from tfdist_cli.plan.machine import Machine
from tfdist_cli.plan.warnings import warnings_of
from tfdist_cli.run_storage.recipe import RecipeFetcher
from tfdist_cli.spec.loading.load import load_run
from tfdist_cli.spec.loading.recipe_module import check_module

EXAMPLES = (
    "tfdist validate cluster.yaml",
    "tfdist validate cluster.yaml --recipe recipes/ctr.yaml --set train.epochs=3",
)


def validate(cluster: ClusterArgument, recipe: RecipeOption = None, overrides: SetOption = None) -> None:
    """Check a cluster and its recipe, and report every problem.

    Each problem is reported with file, line and column: unknown keys, wrong values, roles that do not fit the strategy,
    unset variables, a missing recipe module. Warnings, such as of a public address, do not change the exit code.
    Nothing is started or imported.
    """
    spec, recipe_spec = load_run(cluster, recipe, overrides or (), fetch=RecipeFetcher())
    console.print_warnings(warnings_of(spec, Machine.here()))
    counts = Counter(task.role for task in spec.tasks)
    tasks = ", ".join(
        f"{count} {role}{'s' if count > 1 and not role.endswith('s') else ''}" for role, count in counts.items()
    )
    trains = ""
    if recipe_spec:
        check_module(recipe_spec, str(spec.recipe))
        trains = f"; trains {recipe_spec.module}"
        if recipe_spec.source:
            trains += f" of {recipe_spec.source.address} with SHA-256 {recipe_spec.source.sha256}"
    console.write(f"OK: {spec.name}: {spec.strategy} with {tasks}{trains}")
