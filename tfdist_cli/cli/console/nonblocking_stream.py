"""Writing to a terminal or a pipe that may not be read: a pager, Ctrl-S, a connection that has stalled."""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

_PATIENCE = 1.0
"""Seconds that a reader may pause; from then on nobody waits for it until it reads again."""


class NonBlockingStream(io.TextIOBase):
    """A stream that waits for its reader a moment and no more: what is not read in time is left out, and counted.

    A slow reader slows down whoever writes. One that has stopped must not: a launcher that waits in a write hears no
    Ctrl-C, and its tasks wait for it.

    Args:
        descriptor: where to write; it is non-blocking.
        like: the stream whose encoding and terminal it has.
    """

    def __init__(self, descriptor: int, like: TextIO) -> None:
        self._descriptor = descriptor
        self._like = like
        self._left_out = 0
        """Lines that were left out since the reader has stopped."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has it as a plain attribute
        """As of the stream it stands for."""
        return self._like.encoding

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._like.isatty()

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Writes the text, or what of it finds a reader."""
        data = self._encoded(text)
        if self._left_out and self._is_ready(0.0):
            notice = (
                f"\n[tfdist] nobody read this for a while: {self._left_out} lines were left out; the logs have all\n"
            )
            self._left_out = 0
            data = self._encoded(notice) + data
        if self._left_out:
            self._left_out += text.count("\n")
            return len(text)
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                if not self._is_ready(_PATIENCE):
                    self._left_out = max(1, bytes(rest).count(b"\n"))
                    break
        return len(text)

    def _encoded(self, text: str) -> bytes:
        return text.encode(self.encoding, self._like.errors or "replace")

    def _is_ready(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))


@contextmanager
def unwaiting(stream: TextIO) -> Iterator[TextIO]:
    """The stream, or one in its place that never waits long; a file always takes what is written."""
    descriptor = _opened_anew(stream)
    if descriptor is None:
        yield stream
        return
    try:
        stream.flush()
        yield cast("TextIO", NonBlockingStream(descriptor, stream))
    finally:
        os.close(descriptor)


def _opened_anew(stream: TextIO) -> int | None:
    """A non-blocking descriptor of a terminal or pipe: one of its own, since others share the stream's."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # no Linux, somebody else's terminal, or no descriptor at all
        return None
    return None
