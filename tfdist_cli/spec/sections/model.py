"""The base class of the models of files: strict, frozen, without unknown keys, and with documented fields."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    InstanceOf,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.address import Address
from tfdist_cli.spec.path_scheme import HINT, Location, Url, location, scheme_problem

VARIABLE_SCHEMA = {
    "type": "string",
    "pattern": r"^\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}$",
    "description": "${VAR}",
}
"""The schema of `${VAR}`, which a file may have in place of a number or a word."""


class SpecModel(BaseModel):
    """A map in a cluster or recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, description in descriptions(cls).items():
            properties[name]["description"] = description
        return schema


@functools.cache
def descriptions(model: type[SpecModel]) -> Mapping[str, str]:
    """Returns the description of each field of `model`: the docstring below it.

    `ConfigDict(use_attribute_docstrings=True)` does the same when a module is imported. For all models this takes a
    sixth of `tfdist validate`, which needs the descriptions only for an error.
    """
    found = {name: field.description for name, field in model.model_fields.items() if field.description}
    if len(found) == len(model.model_fields):
        return found
    source = ast.parse(inspect.getsource(model))
    definition = next(node for node in source.body if isinstance(node, ast.ClassDef))
    for statement, text in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(statement.target)] = inspect.cleandoc(str(text.value.value))
    return found


@dataclass(frozen=True)
class KeyProblem:
    """A problem with one key of a map.

    Args:
        keys: the path of the key, from the map that is checked; empty for the map itself.
        message: what is wrong.
        code: the stable name of the problem; see `TfdistError`.
    """

    keys: tuple[str, ...]
    message: str
    code: str


class Inconsistent(ValueError):
    """Values that are valid alone but not together.

    Args:
        problems: each problem, with the key that a message points to.
    """

    def __init__(self, problems: Sequence[KeyProblem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = tuple(problems)


def _parse_address(value: Any) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):  # pydantic does not handle a TypeError
        raise InvalidValue(f"expected an address, 'host' or 'host:port', got {value!r}", code="wrong-type")
    return Address.parse(value)


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise InvalidValue(f"expected a path, got {value!r}: put a path in quotes", code="wrong-type")
    if not str(value):
        raise InvalidValue("the path is empty", code="empty-path")
    if "\0" in str(value):
        raise InvalidValue("a path cannot contain a NUL character", code="nul-in-value")
    found = location(value)
    if isinstance(found, Url):
        raise InvalidValue(f"{scheme_problem(value)}; {HINT}", code="unsupported-scheme")
    return found


def _parse_location(value: Any) -> Location:
    return location(value) if isinstance(value, str) and scheme_problem(value) else _parse_path(value)


def _parse_url(value: Any) -> Url:
    found = _parse_location(value)
    if not isinstance(found, Url):
        raise InvalidValue(
            f"expected an address in a storage service, 's3://bucket/folder', got {value!r}", code="wrong-type"
        )
    return found


AddressField = Annotated[
    Address,
    BeforeValidator(_parse_address),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "examples": ["10.85.125.105:2222", "gpu01", "[::1]:2222"]}),
]
PathField = Annotated[
    Path, BeforeValidator(_parse_path), PlainSerializer(str), WithJsonSchema({"type": "string", "minLength": 1})
]
"""A path. The loader resolves a relative path against the folder of the file that contains it."""
LocationField = Annotated[
    Path | InstanceOf[Url],
    BeforeValidator(_parse_location),
    PlainSerializer(str),
    WithJsonSchema(
        {"type": "string", "minLength": 1, "examples": ["checkpoints", "s3://bucket/run", "gs://bucket/run"]}
    ),
]
"""A path, or an address in a storage service."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 in hexadecimal digits."""
UrlField = Annotated[
    InstanceOf[Url],
    BeforeValidator(_parse_url),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": "^[a-z0-9]+://.", "examples": ["s3://bucket/model"]}),
]
"""An address in a storage service."""
