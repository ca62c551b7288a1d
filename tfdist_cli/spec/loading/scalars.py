"""The values of unquoted YAML scalars: the core schema of YAML 1.2, https://yaml.org/spec/1.2.2/#103-core-schema.

PyYAML follows YAML 1.1, where `on` is a boolean, `1e-3` is text and the address `10:2222` is the number 2822.
"""

from __future__ import annotations

import re

from tfdist_cli.errors import InvalidValue

Scalar = str | int | float | bool | None

NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 100


def is_text(text: str) -> bool:
    """Whether an unquoted scalar is text rather than null, a boolean or a number."""
    return not any(pattern.fullmatch(text) for pattern in (NULL, BOOL, INT, FLOAT))


def resolve(text: str) -> Scalar:
    """Returns the value of an unquoted scalar.

    Raises:
        InvalidValue: a number of more than 100 characters.
    """
    if NULL.fullmatch(text):
        return None
    if BOOL.fullmatch(text):
        return text.lower() == "true"
    whole = INT.fullmatch(text)
    if not whole and not FLOAT.fullmatch(text):
        return text
    if len(text) > _LONGEST_NUMBER:
        message = f"a number of {len(text)} digits is too long: put it in quotes if it is text"
        raise InvalidValue(message, code="out-of-range")
    if not whole:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
