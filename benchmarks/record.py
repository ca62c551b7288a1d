"""The results of rounds in a file: a run of hours can be interrupted, and several runs add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date, datetime, timezone
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """One round of a contest.

    Args:
        contest: its name.
        ours: steps per second of tfdist.
        peer: the same of its peer.
        others: the fraction of the machine that other processes used.
        day: when it was measured, in UTC.
    """

    contest: str
    ours: float
    peer: float
    others: float
    day: str = ""


class Record:
    """A file of JSON lines, one for each round of a contest, in the order in which they were measured.

    Args:
        path: the file; None keeps nothing.

    Raises:
        ValueError: a line is no result.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rounds: list[Measured] = list(_read(path)) if path and path.exists() else []

    def add(self, measured: Measured) -> None:
        """Appends a result."""
        self.rounds.append(measured)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(measured)) + "\n")

    def of(self, contest: str) -> list[Measured]:
        """Returns the rounds of a contest."""
        return [each for each in self.rounds if each.contest == contest]


def today() -> date:
    """Returns the date in UTC."""
    return datetime.now(timezone.utc).date()


def _read(path: Path) -> Iterator[Measured]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Measured(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no result of a round: {error}") from error
