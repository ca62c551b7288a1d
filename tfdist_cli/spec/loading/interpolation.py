"""Filling `${VAR}` and `${VAR:-default}` in from the environment; `$$` is a dollar."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist_cli.spec.loading.scalars import Scalar, resolve

_REFERENCE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>[^{}]*))?\}", re.DOTALL)
_DOLLAR = re.compile(rf"\$\$|{_REFERENCE.pattern}|(?P<broken>\$\{{[^}}]*\}}?)", re.DOTALL)


def read_scalar(text: str, environ: Mapping[str, str], *, plain: bool) -> Scalar:
    """The value of a scalar as it stands in a file.

    What comes from the environment is only ever a scalar: its text is not read as YAML.

    Args:
        text: the scalar, without its quotes.
        environ: the variables.
        plain: it stands without quotes: `2`, or a `${VAR}` that is all of it, may be a number, a boolean or null.

    Raises:
        ValueError: a variable that is not set and has no default, or a `${` that is none of the forms.
    """
    if "$" not in text:
        return resolve(text) if plain else text
    filled = _DOLLAR.sub(lambda match: _filled(match, environ), text)
    return resolve(filled) if plain and _REFERENCE.fullmatch(text) else filled


def escape(text: str) -> str:
    """Text that `read_scalar` gives back as it is."""
    return text.replace("$", "$$")


def _filled(match: re.Match[str], environ: Mapping[str, str]) -> str:
    if match[0] == "$$":
        return "$"
    if match["broken"]:
        raise ValueError(f"{match[0]!r} is not understood: write ${{NAME}} or ${{NAME:-default}}, or $$ for a dollar")
    name, default = match["name"], match["default"]
    value = environ.get(name)
    if value is None and default is None:
        raise ValueError(f"the environment variable {name} is not set: set it, or write ${{{name}:-default}}")
    if default is not None and not value:
        return default
    value = value or ""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the environment variable {name} is not UTF-8") from None
    return value
