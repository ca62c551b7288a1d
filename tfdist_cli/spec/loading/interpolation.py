"""Replaces `${VAR}` and `${VAR:-default}` with environment variables, and `$$` with a dollar."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.loading.scalars import Scalar, resolve

_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>[^{}]*))?\}", re.DOTALL)
_DOLLAR = re.compile(rf"\$\$|{_REFERENCE.pattern}|(?P<broken>\$\{{[^}}]*\}}?)", re.DOTALL)


def read_scalar(text: str, environ: Mapping[str, str], *, plain: bool) -> Scalar:
    """Returns the value of a scalar in a file.

    The value of an environment variable is always a scalar: it is not parsed as YAML.

    Args:
        text: the scalar, without its quotes.
        environ: the environment variables.
        plain: whether the scalar has no quotes. Then `2`, or a scalar that is one `${VAR}`, may be a number, a boolean
            or null.

    Raises:
        InvalidValue: a variable is not set and has no default, or `${` starts none of the two forms.
    """
    if "$" not in text:
        return resolve(text) if plain else text
    filled = _DOLLAR.sub(lambda match: _filled(match, environ), text)
    return resolve(filled) if plain and _REFERENCE.fullmatch(text) else filled


def escape(text: str) -> str:
    """Escapes text, so that `read_scalar` returns it unchanged."""
    return text.replace("$", "$$")


def _filled(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    if match["broken"]:
        message = f"{match[0]!r} is not a variable: write ${{NAME}} or ${{NAME:-default}}, or $$ for a dollar"
        raise InvalidValue(message, code="malformed-variable")
    name, default = match["name"], match["default"]
    value = environ.get(name)
    if value is None and default is None:
        message = f"the environment variable {name} is not set: set it, or write ${{{name}:-default}}"
        raise InvalidValue(message, code="variable-not-set")
    if default is not None and not value:
        return default
    value = value or ""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidValue(f"the environment variable {name} is not UTF-8", code="not-utf-8") from None
    return value
