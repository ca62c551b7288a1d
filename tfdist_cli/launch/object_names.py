"""Makes valid object names for Kubernetes and container engines from any text."""

from __future__ import annotations

import hashlib
import re

LONGEST_LABEL = 63
_HASHED = 7
"""Characters of the hash suffix, with its dash."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


def label(name: str, most: int = LONGEST_LABEL) -> str:
    """Returns a name as a label of RFC 1035: lower-case letters, digits and dashes, starting with a letter.

    A name that is not a label, or is too long, gets a hash as suffix, so that different names stay different.

    Args:
        name: any text.
        most: the maximum length of the label.
    """
    if _LABEL.fullmatch(name) and len(name) <= most:
        return name
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"x-{plain}"
    return f"{plain[: most - _HASHED].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[: _HASHED - 1]}"
