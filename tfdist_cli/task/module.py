"""A recipe's Python module: finding it, importing it, and calling what it defines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from copy import deepcopy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.recipe import Recipe


@dataclass(frozen=True)
class RecipeModule:
    """A recipe's functions.

    Args:
        module: the user's module.
        params: what its functions are given, each a copy of its own.
    """

    module: ModuleType
    params: dict[str, Any]

    @classmethod
    def load(cls, recipe: Recipe) -> RecipeModule:
        """Imports the module of a recipe, from the recipe's folder first.

        Raises:
            UsageError: there is no such module, or it lacks `model` or `dataset`.
            Exception: whatever the module itself raises.
        """
        if recipe.module_dir is not None:
            sys.path.insert(0, str(recipe.module_dir))
        try:
            module = importlib.import_module(recipe.module)
        except ModuleNotFoundError as error:
            if error.name is None or not (recipe.module + ".").startswith(error.name + "."):
                raise  # the module is there; something that it imports is not
            raise UsageError(
                f"the recipe's module {recipe.module!r} was not found in {recipe.module_dir} or on Python's path",
                hint="put the module beside the recipe, or install the package it is in",
            ) from None
        for name, form in (("model", "model(params)"), ("dataset", "dataset(params, split, shard)")):
            if not callable(getattr(module, name, None)):
                raise UsageError(
                    f"{module.__file__} has no function {name!r}",
                    hint=f"define {form} in it; see docs/reference/recipe.md",
                )
        return cls(module, dict(recipe.params))

    def model(self) -> Any:
        """The compiled model."""
        return self.module.model(deepcopy(self.params))

    def dataset(self, split: str, shard: Any) -> Any:
        """A shard's examples, one by one, as a `tf.data.Dataset`."""
        return self.module.dataset(deepcopy(self.params), split, shard)

    def callbacks(self) -> Any:
        """The Keras callbacks of the recipe, as its module returns them; None when it doesn't define any."""
        define = getattr(self.module, "callbacks", None)
        return define(deepcopy(self.params)) if define else None
