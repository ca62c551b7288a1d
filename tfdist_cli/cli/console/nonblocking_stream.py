"""A stream for terminals and pipes whose reader may stop reading: a pager, Ctrl-S, a stalled connection."""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

_PATIENCE = 1.0
"""Seconds to wait for a reader that has stopped; after that, output is dropped until it reads again."""


class NonBlockingStream(io.TextIOBase):
    """A stream that waits for its reader for a limited time, then drops lines and counts them.

    A slow reader may slow down the writer. A stopped reader must not block it: a launcher that is blocked in a write
    does not react to Ctrl-C, and its tasks wait for it.

    Args:
        descriptor: a non-blocking file descriptor to write to.
        like: the stream whose encoding and terminal state it reports.
    """

    def __init__(self, descriptor: int, like: TextIO) -> None:
        self._descriptor = descriptor
        self._like = like
        self._dropped = 0
        """Lines dropped since the reader stopped."""

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has it as a plain attribute
        """The encoding of the original stream."""
        return self._like.encoding

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._like.isatty()

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Writes the text; drops it if the reader has stopped."""
        data = self._encoded(text)
        if self._dropped and self._is_ready(0.0):
            notice = f"\n[tfdist] this output was not read: {self._dropped} lines were dropped; the logs are complete\n"
            self._dropped = 0
            data = self._encoded(notice) + data
        if self._dropped:
            self._dropped += text.count("\n")
            return len(text)
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                if not self._is_ready(_PATIENCE):
                    self._dropped = max(1, bytes(rest).count(b"\n"))
                    break
        return len(text)

    def _encoded(self, text: str) -> bytes:
        return text.encode(self.encoding, self._like.errors or "replace")

    def _is_ready(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))


@contextmanager
def nonblocking(stream: TextIO) -> Iterator[TextIO]:
    """Yields a non-blocking replacement of a terminal or pipe; other streams are yielded as they are."""
    descriptor = _reopen(stream)
    if descriptor is None:
        yield stream
        return
    try:
        stream.flush()
        yield cast("TextIO", NonBlockingStream(descriptor, stream))
    finally:
        os.close(descriptor)


def _reopen(stream: TextIO) -> int | None:
    """Opens a non-blocking descriptor of a terminal or pipe. The stream's own may be shared with other processes."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:  # not Linux, a terminal of another user, or no descriptor
        return None
    return None
