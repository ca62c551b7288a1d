"""The keys of the models of files: for suggestions in messages, and for finding the values that are paths."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tfdist_cli.spec.loading.problems import KeyPath
from tfdist_cli.spec.path_scheme import Url
from tfdist_cli.spec.sections.model import SpecModel


def model_at(model: type[SpecModel], path: KeyPath) -> type[SpecModel] | None:
    """Returns the model of the map at `path`; None where the map may have any keys, or where there is no map."""
    parts = iter(path)
    for part in parts:
        if isinstance(part, int):
            continue  # an item of a list of such models
        field = model.model_fields.get(part)
        below = _submodel(field) if field else None
        if field and below is None:
            below = _mapped(field)
            if below and next(parts, None) is None:
                return None  # it is the map itself
        if below is None:
            return None
        model = below
    return model


def all_paths(model: type[SpecModel], above: str = "") -> Iterator[str]:
    """Yields the path of every key of a file, dotted."""
    for name, field in model.model_fields.items():
        yield above + name
        below = _submodel(field)
        if below:
            yield from all_paths(below, f"{above}{name}.")


def suggest(key: str, model: type[SpecModel], top: type[SpecModel]) -> str:
    """Suggests a key in place of an unknown one.

    Args:
        key: the unknown key.
        model: the model of the map that contains it.
        top: the model of the whole file.

    Returns:
        A question with the key that has this name elsewhere, begins with it, or is most similar to it. Without one, the
        list of valid keys.
    """
    elsewhere = (path for path in all_paths(top) if path.rpartition(".")[2] == key)
    begun = (name for name in model.model_fields if name.startswith(f"{key}_"))
    similar = iter(get_close_matches(key, model.model_fields, n=1))
    meant = next(chain(elsewhere, begun, similar), None)
    if meant:
        return f"did you mean {meant!r}?"
    return f"expected {', '.join(model.model_fields)}"


def path_fields(model: type[SpecModel]) -> Iterator[str]:
    """Returns the keys of `model` whose values are paths."""
    return (name for name, field in model.model_fields.items() if Path in _types(field.annotation))


def location_fields(model: type[SpecModel]) -> Iterator[str]:
    """Returns the keys of `model` whose values are paths or addresses in storage services."""
    return (name for name in path_fields(model) if Url in _types(model.model_fields[name].annotation))


def submodels(model: type[SpecModel]) -> Mapping[str, type[SpecModel]]:
    """Returns the keys of `model` whose values are models, with those models."""
    return {name: below for name, field in model.model_fields.items() if (below := _submodel(field))}


def mapped_models(model: type[SpecModel]) -> Mapping[str, type[SpecModel]]:
    """Returns the keys of `model` whose values are maps from any key to a model, with those models."""
    return {name: below for name, field in model.model_fields.items() if (below := _mapped(field))}


def _mapped(field: FieldInfo) -> type[SpecModel] | None:
    """The model of the values of a map; None where there is none."""
    if get_origin(field.annotation) is not dict:
        return None
    return _model_in(get_args(field.annotation)[1])


def _submodel(field: FieldInfo) -> type[SpecModel] | None:
    return _model_in(field.annotation)


def _model_in(annotation: Any) -> type[SpecModel] | None:
    return next((leaf for leaf in _types(annotation) if issubclass(leaf, SpecModel)), None)


def _types(annotation: Any) -> Iterator[type]:
    """The classes of an annotation's alternatives and items: `Path` and `None` of `list[Path] | None`."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        for alternative in get_args(annotation):
            yield from _types(alternative)
    elif get_origin(annotation) is Annotated:
        yield from _types(get_args(annotation)[0])
    elif isinstance(annotation, type) and get_origin(annotation) is None:
        yield annotation
