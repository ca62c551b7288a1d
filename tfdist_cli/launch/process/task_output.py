"""Parses a task's output into bytes for the log, lines to show, and records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfdist_cli.protocol import records
from tfdist_cli.protocol.masking import Mask, MaskedStream

MAX_LINE = 64 * 1024
"""Bytes after which a line is split, so that memory stays bounded for a program that writes no line feeds."""
GREETINGS = ("WARNING: All log messages before absl::InitializeLog()", "] oneDNN custom operations are on.")
"""Lines that every TensorFlow process writes during the import, before any setting of its log applies. They are logged
but not shown, since they would hide the lines that matter."""
_SEPARATOR = records.RECORD_SEPARATOR.encode()


@dataclass
class Parsed:
    """Parsed output.

    Args:
        log: the bytes to log: all except the records.
        lines: complete lines of text to show, without their line feeds.
        records: the records, in order.
    """

    log: bytes = b""
    lines: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


class OutputParser:
    """Parses one stream of a task, independently of how it is cut into chunks.

    Args:
        mask: removes secrets from it.
    """

    def __init__(self, mask: Mask | None = None) -> None:
        self._masked = MaskedStream(mask or Mask())
        self._line = b""
        """The incomplete last line."""
        self._logged = 0
        """How many of its bytes have been returned for the log."""

    @property
    def unfinished(self) -> str:
        """The visible part of the incomplete last line."""
        return "" if _SEPARATOR in self._line else shown(self._line.decode(errors="replace"))

    def feed(self, data: bytes) -> Parsed:
        """Parses the next bytes."""
        return self._parse(self._masked.feed(data))

    def close(self) -> Parsed:
        """Parses the rest at the end of the stream: a last line without a line feed."""
        parsed = self._parse(self._masked.close())
        if self._line:
            self._take(self._line, parsed)
            self._line = b""
        return parsed

    def _parse(self, data: bytes) -> Parsed:
        parsed = Parsed()
        whole, feed, self._line = (self._line + data).rpartition(b"\n")
        if feed:
            self._take(whole + feed, parsed)
        while len(self._line) > MAX_LINE:
            piece, self._line = self._line[:MAX_LINE], self._line[MAX_LINE:]
            self._take(piece, parsed)
        if _SEPARATOR not in self._line:
            parsed.log += self._line[self._logged :]
            self._logged = len(self._line)
        return parsed

    def _take(self, block: bytes, parsed: Parsed) -> None:
        """Parses complete lines. The last one may lack its line feed if it was split."""
        if _SEPARATOR not in block:
            parsed.log += block[self._logged :]
            text = block.removesuffix(b"\n").decode(errors="replace")
            self._show(text.split("\n"), parsed)
        else:
            for line in _lines(block):
                self._take_line(line, parsed)
        self._logged = 0

    def _take_line(self, line: bytes, parsed: Parsed) -> None:
        """Parses one line that may contain records. The part before the first record may be logged already."""
        text = line.removesuffix(b"\n").decode(errors="surrogateescape")
        parts = list(records.split(text))
        logged = b""
        for part in parts:
            if isinstance(part, dict):
                parsed.records.append(part)
            else:
                raw = part.encode(errors="surrogateescape")
                logged += raw
                self._show([raw.decode(errors="replace")], parsed)
        if isinstance(parts[-1], str) and line.endswith(b"\n"):
            logged += b"\n"
        parsed.log += logged[self._logged :]
        self._logged = 0

    @staticmethod
    def _show(lines: list[str], parsed: Parsed) -> None:
        """Adds the lines to show."""
        parsed.lines += [shown(line) for line in lines if not _is_greeting(line)]


def shown(line: str) -> str:
    """The final state of a line on a terminal: a progress bar overwrites it after each carriage return."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


def _is_greeting(line: str) -> bool:
    return any(greeting in line for greeting in GREETINGS)


def _lines(block: bytes) -> list[bytes]:
    """The lines of a block, separated by line feeds only."""
    *whole, rest = block.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])
