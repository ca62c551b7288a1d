"""Checks that a recipe's Python module exists, without importing it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from tfdist_cli.spec.loading.problems import Place, Problem, SpecError
from tfdist_cli.spec.sections.recipe import Recipe


def check_module(recipe: Recipe, file: str, folders: Sequence[str] = ()) -> None:
    """Looks for the module as a task does: in the recipe's folder, then on Python's path.

    Args:
        recipe: the recipe.
        file: the recipe's file, for the message.
        folders: further folders on the path of a task's Python.

    Raises:
        SpecError: there is no such module.
    """
    found = find_module(recipe, folders)
    if found is None:
        message = f"there is no module {recipe.module!r}, neither in {recipe.module_dir} nor on Python's path"
        raise SpecError([Problem(Place(file), "module", message, code="no-such-module")], hint=_hint(recipe))


def find_module(recipe: Recipe, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """Returns where a recipe's module is, without importing it; None if there is none. See `check_module`."""
    top, *below = recipe.module.split(".")
    found = find_top_module(top, recipe, folders)
    for part in below:
        inside: Sequence[str] = (found and found.submodule_search_locations) or ()
        found = PathFinder.find_spec(part, list(inside))  # the full name would import the parent package
    return found


def find_top_module(name: str, recipe: Recipe, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """Returns where a module or package is that a recipe's module can import by a name without dots; or None."""
    beside = [] if recipe.module_dir is None else [str(recipe.module_dir)]
    return PathFinder.find_spec(name, [*beside, *folders]) or _installed(name)


def _installed(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module made by hand, such as __main__
        return None


def _hint(recipe: Recipe) -> str:
    folder = recipe.module_dir or Path()
    names = sorted(path.stem for path in folder.glob("*.py")) if folder.is_dir() else []
    near = get_close_matches(recipe.module, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"put {recipe.module}.py beside the recipe, or install its package"
