"""The results of rounds in a file: a run of hours can be interrupted, and several runs add up.

A file has the rounds of one version of tfdist on one machine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
        source: what was measured, see `source_of`.
    """

    contest: str
    ours: float
    peer: float
    others: float
    day: str = ""
    source: str = ""


class Record:
    """A file of JSON lines, one for each round of a contest, in the order in which they were measured.

    Args:
        path: the file; None keeps nothing.
        source: what is measured, see `source_of`.

    Raises:
        OSError: the file cannot be written.
        ValueError: a line is no result, or the result of another version or machine.
    """

    def __init__(self, path: Path | None, source: str = "") -> None:
        self._path, self._source = path, source
        if path:
            path.touch()  # an error now, and not after the first round
        self.rounds: list[Measured] = list(_read(path, source)) if path else []

    def add(self, measured: Measured) -> None:
        """Appends a result."""
        measured = replace(measured, source=self._source)
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


def source_of(machine: str, checkout: Path) -> str:
    """Returns what tells versions and machines apart.

    Args:
        machine: its description, with the versions of packages.
        checkout: the checkout that is measured. Without Git, its version is not known.
    """
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        version = "unknown version"
    return f"{version}; {machine}"


def _read(path: Path, source: str) -> Iterator[Measured]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            measured = Measured(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no result of a round: {error}; remove this line") from error
        if measured.source != source:
            raise ValueError(
                f"{path}:{number} is of {measured.source!r}, not of {source!r}: delete the file or name another one"
            )
        yield measured
