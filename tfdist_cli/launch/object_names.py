"""Names that other programs take, made of names that people write."""

from __future__ import annotations

import hashlib
import re

LONGEST_LABEL = 63
_HASHED = 7
"""Characters of a hash, with the dash before it."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def label(name: str, most: int = LONGEST_LABEL) -> str:
    """A name as a label of RFC 1035: letters, digits and dashes, a letter first.

    One that is none, or is too long, ends with a hash of itself, so that different names stay different.

    Args:
        name: any text.
        most: the most characters that the label may have.
    """
    if _LABEL.fullmatch(name) and len(name) <= most:
        return name
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"x-{plain}"
    return f"{plain[: most - _HASHED].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[: _HASHED - 1]}"
