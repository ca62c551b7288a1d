"""Writes YAML and JSON for programs and people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from tfdist_cli.spec.loading.dump import Dumper


def to_yaml(documents: Iterable[Any]) -> str:
    """Returns plain values as YAML, a document for each."""
    return yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000
    )


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns a plain value as JSON. JSON has no NaN and no infinity: they become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
