"""Removes the values of secrets from logs and from what is shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

SECRETS = "TFDIST_SECRETS"
"""Set for a task by its launcher: the names of the variables that hold secrets, separated by commas."""
RUN_SECRET = "TFDIST_RUN_SECRET"  # noqa: S105 a name
"""Set for a task by its launcher: the secret with which the tasks of a run prove that they belong to it."""
SHORTEST = 8
"""Minimal length of a masked value, in characters: shorter ones occur in ordinary text."""
MASK = "***"


class Mask:
    """Replaces the values of secrets, both plain and escaped as in JSON.

    Args:
        values: the secrets.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms = {form for value in values if len(value) >= SHORTEST for form in (value, json.dumps(value)[1:-1])}
        # One value may begin with another one, so the longer one is replaced first.
        self._forms = tuple(sorted((form.encode(errors="surrogateescape") for form in forms), key=len, reverse=True))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Mask:
        """The mask of a task's own secrets."""
        return cls(environ.get(name, "") for name in (RUN_SECRET, *environ.get(SECRETS, "").split(",")))

    def text(self, text: str) -> str:
        """The text with the values replaced."""
        return self.apply(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")

    def apply(self, data: bytes) -> bytes:
        """The bytes with the values replaced."""
        for form in self._forms:
            data = data.replace(form, MASK.encode())
        return data

    def partial_match_length(self, data: bytes) -> int:
        """How many bytes at the end of the data may be the beginning of a value."""
        return max((_overlap(data, form) for form in self._forms), default=0)


class MaskedStream:
    """Masks a stream, independently of how it is cut into chunks. Possible beginnings of values are held back.

    Args:
        mask: replaces the values.
    """

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Returns the masked bytes that are complete."""
        data = self._mask.apply(self._held + data)
        kept = len(data) - self._mask.partial_match_length(data)
        self._held = data[kept:]
        return data[:kept]

    def close(self) -> bytes:
        """Returns the bytes that were held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, form: bytes) -> int:
    """The length of the longest suffix of `data` that is a proper prefix of `form`."""
    longest = min(len(data), len(form) - 1)
    end = data[len(data) - longest :]
    return next((len(end) - start for start in range(len(end)) if form.startswith(end[start:])), 0)
