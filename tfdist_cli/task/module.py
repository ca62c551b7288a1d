"""A recipe's Python module: imports it and calls its functions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.recipe import Export, Recipe
from tfdist_cli.train.data.sharding.same_draws import SameDraws


@dataclass(frozen=True)
class RecipeModule:
    """The functions of a recipe's module.

    Args:
        module: the user's module.
        params: the recipe's `params`; each call gets its own copy.
    """

    module: ModuleType
    params: dict[str, Any]
    _splits: dict[str, SameDraws] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def load(cls, recipe: Recipe) -> RecipeModule:
        """Imports the module of a recipe; the recipe's folder is searched first.

        Raises:
            UsageError: the module does not exist, or does not define `model` or `dataset`.
            Exception: any error that the module itself raises.
        """
        if recipe.module_dir is not None:
            sys.path.insert(0, str(recipe.module_dir))
        try:
            module = importlib.import_module(recipe.module)
        except ModuleNotFoundError as error:
            if error.name is None or not (recipe.module + ".").startswith(error.name + "."):
                raise  # the module exists, but a module that it imports does not
            raise UsageError(
                f"the recipe's module {recipe.module!r} was not found in {recipe.module_dir} or on Python's path",
                code="no-such-module",
                hint="put the module beside the recipe, or install the package it is in",
            ) from None
        for name, form in (("model", "model(params)"), ("dataset", "dataset(params, split, shard)")):
            if not callable(getattr(module, name, None)):
                raise UsageError(
                    f"{module.__file__} has no function {name!r}",
                    code="recipe-function-missing",
                    hint=f"define {form} in it; see docs/reference/recipe.md",
                )
        return cls(module, dict(recipe.params))

    def model(self) -> Any:
        """Returns the compiled model."""
        return self.module.model(deepcopy(self.params))

    def dataset(self, split: str, shard: Any) -> Any:
        """Returns the data of a shard; all calls for a split draw the same random numbers."""
        return self._splits.setdefault(split, SameDraws(partial(self._dataset, split), split))(shard)

    def _dataset(self, split: str, shard: Any) -> Any:
        return self.module.dataset(deepcopy(self.params), split, shard)

    def callbacks(self) -> Any:
        """Returns the Keras callbacks that the module defines; None if it defines none."""
        define = getattr(self.module, "callbacks", None)
        return define(deepcopy(self.params)) if define else None

    def signatures(self, spec: Export) -> Any:
        """Returns the function that an export names for its signatures; None if it names none.

        Raises:
            UsageError: the module has no such function.
        """
        if spec.signatures is None:
            return None
        found = getattr(self.module, spec.signatures, None)
        if not callable(found):
            raise UsageError(
                f"{self.module.__file__} has no function {spec.signatures!r}",
                code="recipe-function-missing",
                hint=f"define {spec.signatures}(model) in it, or remove export.signatures",
            )
        return found
