"""A task's output, from bytes as they come to what is logged, what is shown and which records it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfdist_cli.protocol import records
from tfdist_cli.protocol.masking import Mask, MaskedStream

MAX_LINE = 64 * 1024
"""Bytes after which a line is taken to be over: memory stays bounded for a program that never ends one."""
GREETINGS = ("WARNING: All log messages before absl::InitializeLog()", "] oneDNN custom operations are on.")
"""What every TensorFlow process says as it is imported, before any setting of its log takes hold. It stays in the logs;
on a terminal, and as the last line that a task said, it would hide what is to be seen."""
_SEPARATOR = records.RECORD_SEPARATOR.encode()


@dataclass
class Parsed:
    """What some bytes of output came to.

    Args:
        log: the bytes to log: all but the records.
        lines: complete lines of text to show, without their line feeds.
        records: the records, in order.
    """

    log: bytes = b""
    lines: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


class OutputParser:
    """Takes one stream of a task apart, however its bytes are cut into chunks.

    Args:
        mask: takes secrets out of it.
    """

    def __init__(self, mask: Mask | None = None) -> None:
        self._masked = MaskedStream(mask or Mask())
        self._line = b""
        """The line that goes on, so far."""
        self._logged = 0
        """How many of its bytes have been given out to be logged."""

    @property
    def unfinished(self) -> str:
        """What the line that goes on shows."""
        return "" if _SEPARATOR in self._line else shown(self._line.decode(errors="replace"))

    def feed(self, data: bytes) -> Parsed:
        """Parses the next bytes."""
        return self._parse(self._masked.feed(data))

    def close(self) -> Parsed:
        """Parses what is left when the stream has ended: a last line without a line feed."""
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
        """Parses complete lines; the block's last line may lack its line feed when it is taken to be over."""
        if _SEPARATOR not in block:
            parsed.log += block[self._logged :]
            text = block.removesuffix(b"\n").decode(errors="replace")
            self._show(text.split("\n"), parsed)
        else:
            for line in _lines(block):
                self._take_line(line, parsed)
        self._logged = 0

    def _take_line(self, line: bytes, parsed: Parsed) -> None:
        """Parses one line that may hold records; it was logged in part only when the record came later."""
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
        """Adds the lines that are to be seen."""
        parsed.lines += [shown(line) for line in lines if not _greets(line)]


def shown(line: str) -> str:
    """What a terminal would show of a line in the end: a progress bar rewrites it after each carriage return."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part), "")


def _greets(line: str) -> bool:
    return any(greeting in line for greeting in GREETINGS)


def _lines(block: bytes) -> list[bytes]:
    """The lines of a block; only a line feed ends one."""
    *whole, rest = block.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])
