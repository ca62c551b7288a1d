"""The model function of a training: tasks import it by its name, so that no code travels with the data."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from tfdist_cli.errors import UsageError

_NAME = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")
_HINT = "define it with `def` in a module of its own, such as models.py, and import it: from models import {name}"


@dataclass(frozen=True)
class ModelFunction:
    """A function that returns a compiled model.

    Args:
        name: `package.module:function`.
        folder: the folder that Python found the module's package in; None if it is not known here.
        arguments: keyword arguments for the function, as JSON has them.

    Raises:
        UsageError: an argument is no number, text, list or dictionary.
    """

    name: str
    folder: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            same = json.loads(json.dumps(dict(self.arguments)))
        except (TypeError, ValueError) as error:
            raise _bad_arguments(str(error)) from None
        if same != dict(self.arguments):
            raise _bad_arguments("keys of dictionaries have to be texts, and tuples to be lists")

    @classmethod
    def of(cls, given: Callable[..., Any] | str, arguments: Mapping[str, Any] | None = None) -> ModelFunction:
        """Returns the function that another process can import.

        Args:
            given: the function, or its name, `package.module:function`.
            arguments: keyword arguments for it.

        Raises:
            UsageError: another process cannot import it.
        """
        name = given if isinstance(given, str) else _name_of(given)
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"the model function is {name!r}",
                code="model-function-not-importable",
                hint="pass a function, or a name such as 'models:build'",
            )
        module, _, _ = name.partition(":")
        return cls(name, _folder_of(module), dict(arguments or {}))

    def as_params(self) -> dict[str, Any]:
        """Returns the parameters of `tfdist_cli.task.table_recipe` that name the function."""
        return {"model": self.name, "folder": self.folder, "arguments": dict(self.arguments)}


def _name_of(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not callable(function) or not module or not name:
        raise _not_importable(f"the model function is {function!r}, which has no name in a module", "build")
    if "<lambda>" in name:
        raise _not_importable("the model function is a lambda", "build")
    if "<locals>" in name:
        raise _not_importable(f"the model function {name} is defined in another function", name.rpartition(".")[2])
    if module in ("__main__", "__mp_main__"):
        raise _not_importable(f"the model function {name} is defined in the program itself or in a notebook", name)
    if _found(sys.modules.get(module), name) is not function:
        raise _not_importable(f"{module}.{name} is not the model function that was given", name)
    return f"{module}:{name}"


def _found(module: ModuleType | None, name: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def _folder_of(module: str) -> str | None:
    """Returns the folder on Python's path that has a module's top package; None if it is not found here."""
    loaded = sys.modules.get(module)
    try:
        spec = getattr(loaded, "__spec__", None) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location or not spec.origin:
        return None
    depth = module.count(".") + (1 if spec.submodule_search_locations is not None else 0)
    return str(Path(spec.origin).absolute().parents[depth])


def _not_importable(what: str, name: str) -> UsageError:
    return UsageError(
        f"{what}, and the tasks have to import it",
        code="model-function-not-importable",
        hint=_HINT.format(name=name),
    )


def _bad_arguments(why: str) -> UsageError:
    return UsageError(
        f"model_args cannot be passed to the tasks: {why}",
        code="invalid-model-args",
        hint="pass numbers, texts, booleans, lists, and dictionaries of them",
    )
