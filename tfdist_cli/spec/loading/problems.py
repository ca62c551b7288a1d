"""What can be wrong in a file or a `--set`: every problem with its place, all of them told at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from tfdist_cli.errors import UsageError, label

KeyPath = tuple[str | int, ...]
"""The way to a value: keys of maps and indices of lists, from the top."""

CONFIDENTIAL = ("env", "secrets")
"""Keys below which no message repeats a value."""
_SHOWN_AT_MOST = 50
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BARE_KEY = re.compile(r"[^\s.:'\"]+")


@dataclass(frozen=True, order=True)
class Place:
    """Where something stands.

    Args:
        file: a file's name as the user wrote it, or `--set path=value`.
        line: from 1; 0 when the whole of `file` is meant.
        column: from 1, in characters.
    """

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong.

    Args:
        place: where.
        key: the value's path, `roles.worker.replicas`; empty when the file as a whole is meant.
        message: what is wrong and what was expected.
        code: the stable name of the problem; see `TfdistError`.
    """

    place: Place
    key: str
    message: str
    code: str = ""

    def __str__(self) -> str:
        named = not self.key or self.place.file.startswith(f"--set {self.key}=")
        line = f"{self.place}: {self.message}" if named else f"{self.place}: {self.key}: {self.message}"
        return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), line)


class SpecError(UsageError):
    """A cluster, a recipe or a `--set` that cannot be used.

    Args:
        problems: everything that is wrong; `str()` has a line for each, 50 lines at most.
        hint: what to do about it.
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
    """The path as `--set` takes it: `roles.worker.hosts.0`; a key that would be misread is quoted."""
    return ".".join(str(part) if _BARE_KEY.fullmatch(str(part)) else repr(part) for part in path)


def either(phrases: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *first, last = dict.fromkeys(phrases)
    return f"{', '.join(first)} or {last}" if first else last
