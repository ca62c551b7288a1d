"""The check of a split's name."""

from __future__ import annotations

from difflib import get_close_matches

from tfdist_cli.errors import UsageError


def check_split(split: str, known: tuple[str, ...], *, data: str) -> None:
    """Checks the name of a split.

    Args:
        split: the name.
        known: the names of all splits.
        data: the data set, for the message.

    Raises:
        UsageError: there is no such split; the hint is the most similar name.
    """
    if split in known:
        return
    near = get_close_matches(split, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else None
    raise UsageError(f"{data} has no split {split!r}, only {', '.join(known)}", code="unknown-split", hint=hint)
