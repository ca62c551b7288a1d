"""Taking the values of secrets out of what is logged and shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

SECRETS = "TFDIST_SECRETS"
"""Set for a task by what starts it: the names of the variables that hold secrets, with commas between them."""
RUN_SECRET = "TFDIST_RUN_SECRET"  # noqa: S105 a name
"""Set for a task by what starts it: what the tasks of one run prove to each other that they belong to it with."""
SHORTEST = 8
"""Characters that a value has to have to be looked for: a shorter one stands in ordinary text too."""
MASK = "***"


class Mask:
    """Replaces the values of secrets, as they are and as JSON writes them.

    Args:
        values: the secrets.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms = {form for value in values if len(value) >= SHORTEST for form in (value, json.dumps(value)[1:-1])}
        # One may begin with another: the longer one is looked for first.
        self._forms = tuple(sorted((form.encode(errors="surrogateescape") for form in forms), key=len, reverse=True))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Mask:
        """The mask of a task's own secrets."""
        return cls(environ.get(name, "") for name in (RUN_SECRET, *environ.get(SECRETS, "").split(",")))

    def text(self, text: str) -> str:
        """The text without the values."""
        return self.apply(text.encode(errors="surrogateescape")).decode(errors="surrogateescape")

    def apply(self, data: bytes) -> bytes:
        """The bytes without the values."""
        for form in self._forms:
            data = data.replace(form, MASK.encode())
        return data

    def partial_match_length(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a value."""
        return max((_overlap(data, form) for form in self._forms), default=0)


class MaskedStream:
    """Masks a stream however its bytes are cut: what may be the beginning of a value waits for what follows it.

    Args:
        mask: what to take out.
    """

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The next bytes that can be shown."""
        data = self._mask.apply(self._held + data)
        kept = len(data) - self._mask.partial_match_length(data)
        self._held = data[kept:]
        return data[:kept]

    def close(self) -> bytes:
        """What was held back at the end of the stream."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, form: bytes) -> int:
    """The length of the longest end of `data` that is a beginning of `form`, but not all of it."""
    longest = min(len(data), len(form) - 1)
    end = data[len(data) - longest :]
    return next((len(end) - start for start in range(len(end)) if form.startswith(end[start:])), 0)
