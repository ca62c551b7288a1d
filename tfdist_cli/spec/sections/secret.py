"""Secrets: variables of tasks whose values stand neither in a file that users write nor in a run's directory."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pydantic import model_validator

from tfdist_cli.errors import UsageError
from tfdist_cli.spec.sections.model import Inconsistent, PathField, SpecModel

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretSpec(SpecModel):
    """Where the value of a secret is: `{env: NAME}` or `{file: path}`.

    No message repeats what stands there: it may be the value itself, by mistake.
    """

    env: str | None = None
    """The variable of the launcher's own environment that has the value."""
    file: PathField | None = None
    """The file that has the value, relative to this file; line feeds at its end don't count."""

    @model_validator(mode="after")
    def _one_source(self) -> SecretSpec:
        if (self.env is None) == (self.file is None):
            raise Inconsistent([((), "a secret has one source: write {env: VARIABLE} or {file: path}")])
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            message = "expected the name of an environment variable, not a value: {env: WANDB_API_KEY}, without ${}"
            raise Inconsistent([(("env",), message)])
        return self

    @property
    def source(self) -> str:
        """The source as a shell word that has the value: `"$NAME"`."""
        if self.env is not None:
            return f'"${self.env}"'
        return '"$(cat ' + "'" + str(self.file).replace("'", "'\\''") + "'" + ')"'

    def read(self, environ: Mapping[str, str] = os.environ) -> str:
        """The value.

        Raises:
            ValueError: there is none; says why.
        """
        value = self._from_file() if self.env is None else environ.get(self.env)
        if value is None:
            raise ValueError("the environment variable that its 'env' names is not set")
        if not value:
            raise ValueError("its value is empty")
        if "\0" in value:
            raise ValueError("its value holds a NUL, which no environment variable can")
        return value

    def _from_file(self) -> str:
        try:
            return "" if self.file is None else self.file.read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.file} is not UTF-8 text") from None


def read_secrets(
    secrets: Mapping[str, SecretSpec], role: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The values of a role's secrets.

    Args:
        secrets: variable → where its value is.
        role: whose they are, for messages.
        environ: where variables are looked up.

    Raises:
        UsageError: one of them has no value.
    """
    values = {}
    for name, spec in secrets.items():
        try:
            values[name] = spec.read(environ)
        except ValueError as error:
            raise UsageError(
                f"roles.{role}.secrets.{name}: {error}",
                hint="secrets are read when a run is launched, and again when it goes on: set the variable, or write "
                "the file, before that",
            ) from None
    return values
