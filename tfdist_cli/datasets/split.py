"""Checking the name of a split."""

from __future__ import annotations

from difflib import get_close_matches

from tfdist_cli.errors import UsageError


def check_split(split: str, known: tuple[str, ...], *, data: str) -> None:
    """Refuses a split that `data` doesn't have.

    Raises:
        UsageError: with the nearest name that it has.
    """
    if split in known:
        return
    near = get_close_matches(split, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else None
    raise UsageError(f"{data} has no split {split!r}, only {', '.join(known)}", hint=hint)
