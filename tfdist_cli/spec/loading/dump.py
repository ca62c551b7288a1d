"""Writes a cluster or a recipe as YAML that loads back to it."""

from __future__ import annotations

from typing import Any

import yaml

from tfdist_cli.spec.loading.interpolation import escape
from tfdist_cli.spec.loading.scalars import is_text
from tfdist_cli.spec.sections.model import SpecModel


def dump(model: SpecModel) -> str:
    """Returns the model as YAML, without keys that have an empty default. The paths of a loaded model are absolute."""
    return yaml.dump(
        _escaped(_tree(model)), Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120
    )


class Dumper(yaml.SafeDumper):
    """Writes YAML that any parser reads back: quoted where text looks like another type, multi-line text as blocks."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Writes equal values twice in place of an alias."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Chooses the style of a text."""
        # PyYAML would write NEL and other line separators unescaped, and no parser reads them back.
        style = "'" if not is_text(data) else None if data.isprintable() else '"'
        if "\n" in data and data.replace("\n", "").isprintable():
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


Dumper.add_representer(str, Dumper.represent_str)


def _tree(model: SpecModel) -> dict[str, Any]:
    data = model.model_dump()
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, SpecModel):
            data[name] = _tree(value)
        elif isinstance(value, dict) and any(isinstance(item, SpecModel) for item in value.values()):
            data[name] = {key: _tree(item) if isinstance(item, SpecModel) else item for key, item in value.items()}
        elif isinstance(value, list):
            data[name] = [
                _tree(item) if isinstance(item, SpecModel) else dumped
                for item, dumped in zip(value, data[name], strict=True)
            ]
        elif value == field.default and value in (None, {}):
            del data[name]
    return data


def _escaped(value: Any) -> Any:
    """Escapes the dollars in values. Keys are text, also the numbers of classes, and have no variables."""
    if isinstance(value, dict):
        return {str(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value
