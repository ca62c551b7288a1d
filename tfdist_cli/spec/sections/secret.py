"""Secrets: environment variables of tasks whose values are in no cluster file and in no run directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pydantic import model_validator

from tfdist_cli.errors import InvalidValue, UsageError
from tfdist_cli.spec.sections.model import Inconsistent, KeyProblem, PathField, SpecModel

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretSpec(SpecModel):
    """The source of a secret's value: `{env: NAME}` or `{file: path}`.

    No message repeats a key or value of this map: it may be the secret itself, written there by mistake.
    """

    env: str | None = None
    """The environment variable of the launcher that holds the value."""
    file: PathField | None = None
    """The file that holds the value, relative to this file. Newlines at its end are removed."""

    @model_validator(mode="after")
    def _one_source(self) -> SecretSpec:
        if (self.env is None) == (self.file is None):
            message = "a secret has one source: write {env: VARIABLE} or {file: path}"
            raise Inconsistent([KeyProblem((), message, code="invalid-secret-source")])
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            message = "expected the name of an environment variable, not a value: {env: WANDB_API_KEY}, without ${}"
            raise Inconsistent([KeyProblem(("env",), message, code="invalid-variable-name")])
        return self

    @property
    def source(self) -> str:
        """A word of shell that expands to the value: `"$NAME"`."""
        if self.env is not None:
            return f'"${self.env}"'
        return '"$(cat ' + "'" + str(self.file).replace("'", "'\\''") + "'" + ')"'

    def read(self, environ: Mapping[str, str] = os.environ) -> str:
        """Reads the value.

        Raises:
            InvalidValue: there is none. The message gives the reason, never the value.
        """
        value = self._from_file() if self.env is None else environ.get(self.env)
        if value is None:
            raise InvalidValue("the environment variable that its 'env' names is not set", code="variable-not-set")
        if not value:
            raise InvalidValue("its value is empty", code="empty-secret")
        if "\0" in value:
            raise InvalidValue("its value contains a NUL, which no environment variable can hold", code="nul-in-value")
        return value

    def _from_file(self) -> str:
        try:
            return "" if self.file is None else self.file.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise InvalidValue(f"{self.file} cannot be read: {error.strerror}", code="unreadable-file") from None
        except UnicodeDecodeError:
            raise InvalidValue(f"{self.file} is not UTF-8 text", code="not-utf-8") from None


def read_secrets(
    secrets: Mapping[str, SecretSpec], role: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Reads the values of a role's secrets.

    Args:
        secrets: each variable, with the source of its value.
        role: the role, for messages.
        environ: the environment variables of the launcher.

    Raises:
        UsageError: a secret has no value.
    """
    values = {}
    for name, spec in secrets.items():
        try:
            values[name] = spec.read(environ)
        except InvalidValue as error:
            raise UsageError(
                f"roles.{role}.secrets.{name}: {error}",
                code="secret-not-found",
                hint="secrets are read at each launch of a run: set the variable, or write the file, before it",
            ) from None
    return values
