"""The base of every specification model: strict, frozen, unknown keys refused, each key documented."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.path_scheme import HINT, scheme_problem

VARIABLE_SCHEMA = {
    "type": "string",
    "pattern": r"^\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^{}]*)?\}$",
    "description": "${VAR}",
}
"""What may stand in a file in the place of a number or a word."""


class SpecModel(BaseModel):
    """A part of a file that users write."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, validate_default=True
    )


class Inconsistent(ValueError):
    """Values that are right by themselves but not together.

    Args:
        problems: for each problem the keys of the value that is best looked at first, and what is wrong.
    """

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(message for _, message in problems))
        self.problems = tuple(problems)


def _parse_address(value: Any) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):  # pydantic takes no TypeError for an answer
        raise ValueError(f"expected an address, 'host' or 'host:port', got {value!r}")  # noqa: TRY004
    return Address.parse(value)


def _parse_path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError(f"expected a path, got {value!r}: put a path in quotes")  # noqa: TRY004
    if not str(value):
        raise ValueError("the path is empty")
    if "\0" in str(value):
        raise ValueError("a path cannot hold a NUL")
    if problem := scheme_problem(value):
        raise ValueError(f"{problem}; {HINT}")
    return Path(value)


AddressField = Annotated[
    Address,
    BeforeValidator(_parse_address),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "examples": ["10.85.125.105:2222", "gpu01", "[::1]:2222"]}),
]
PathField = Annotated[
    Path, BeforeValidator(_parse_path), PlainSerializer(str), WithJsonSchema({"type": "string", "minLength": 1})
]
"""A path; the loader makes it absolute: it starts at the folder of the file that it stands in."""
