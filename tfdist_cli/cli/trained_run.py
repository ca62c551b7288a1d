"""A run that commands use for its model: its directory or address, and its recipe."""

from __future__ import annotations

from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.plan import RECIPE_FILE
from tfdist_cli.run_storage.recipe import recipe_of_copy
from tfdist_cli.runs.source import open_run
from tfdist_cli.spec.loading.load import load_recipe
from tfdist_cli.spec.path_scheme import Location, checked_location
from tfdist_cli.spec.recipe_files import KEPT
from tfdist_cli.spec.sections.recipe import Recipe


def opened_with_recipe(run: str) -> tuple[Location, Recipe]:
    """Returns a run's directory, or its address, and the recipe that it has trained.

    Raises:
        UsageError: there is no run, or it trained no recipe.
    """
    with open_run(run, (RECIPE_FILE, f"{KEPT}/*")) as source:
        recipe_file = source.path / RECIPE_FILE
        if not recipe_file.is_file():
            hint = "choose a run directory that trained a recipe"
            raise UsageError(f"{run} has no {RECIPE_FILE}", code="no-recipe-in-run", hint=hint)
        at = checked_location(run)
        recipe = recipe_of_copy(load_recipe(recipe_file), source.path)
        return at.absolute() if isinstance(at, Path) else at, recipe
