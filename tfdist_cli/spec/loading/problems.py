"""The problems of files and of `--set`: each has a place, a message and a code. All are reported together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from tfdist_cli.errors import UsageError, label

KeyPath = tuple[str | int, ...]
"""The path of a value: keys of maps and indices of lists, from the top of the file."""

CONFIDENTIAL = ("env", "secrets")
"""Keys whose values no message repeats."""
_SHOWN_AT_MOST = 50
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BARE_KEY = re.compile(r"[^\s.:'\"]+")


@dataclass(frozen=True, order=True)
class Place:
    """A position in a file.

    Args:
        file: the file's name as the user wrote it, or `--set path=value`.
        line: the line, from 1; 0 stands for the whole file.
        column: the column in characters, from 1.
    """

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, order=True)
class Problem:
    """One problem in a file.

    Args:
        place: where it is.
        key: the path of the value, such as `roles.worker.replicas`; empty for the whole file.
        message: what is wrong, and what was expected.
        code: the stable name of the problem; see `TfdistError`.
    """

    place: Place
    key: str
    message: str
    code: str

    def __str__(self) -> str:
        named = not self.key or self.place.file.startswith(f"--set {self.key}=")
        line = f"{self.place}: {self.message}" if named else f"{self.place}: {self.key}: {self.message}"
        return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), line)


class SpecError(UsageError):
    """A cluster file, a recipe file or a `--set` is invalid.

    Args:
        problems: all problems. `str()` has a line for each of the first 50.
        hint: what to do about them.
    """

    def __init__(self, problems: Iterable[Problem], *, hint: str | None = None) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        lines = [str(problem) for problem in self.problems[:_SHOWN_AT_MOST]]
        if len(self.problems) > _SHOWN_AT_MOST:
            lines.append("... and more")
        super().__init__("\n".join(lines), code=self.problems[0].code if self.problems else "", hint=hint)

    def labelled_lines(self) -> Iterator[tuple[str, str]]:
        """Yields one line for each problem, with the label of its own code."""
        for problem, line in zip_longest(self.problems[:_SHOWN_AT_MOST], self.message.splitlines()):
            yield label(problem.code if problem else ""), line


def dotted(path: KeyPath) -> str:
    """Returns the path as `--set` takes it: `roles.worker.hosts.0`. Keys with dots or spaces are quoted."""
    return ".".join(str(part) if _BARE_KEY.fullmatch(str(part)) else repr(part) for part in path)


def either(phrases: Iterable[str]) -> str:
    """Joins phrases: `a`, `a or b`, `a, b or c`."""
    *first, last = dict.fromkeys(phrases)
    return f"{', '.join(first)} or {last}" if first else last
