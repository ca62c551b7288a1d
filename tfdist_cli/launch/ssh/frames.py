"""The protocol between the launcher and the agent on a host: frames, each with a kind, fields and a payload.

On the wire a frame is a line `KIND n m`, then n bytes of JSON, then m bytes of payload. Both sides read and write in
blocking calls. A host whose frames are not read blocks, and so runs no faster than the launcher.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import IO, Any

GREETING = b"tfdist-agent 1\n"
"""The first line that an agent sends. Output of the shell's start files may precede it."""
_LONGEST_LINE = 100


class ConnectionEnded(Exception):
    """The other side has closed the connection, or it is broken."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Args:
        kind: the type of message.
        fields: its values, in plain JSON types.
        payload: raw bytes.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def encode(self) -> bytes:
        """Returns the frame's bytes on the wire."""
        fields = json.dumps(self.fields, separators=(",", ":")).encode()
        return b"%s %d %d\n" % (self.kind.encode(), len(fields), len(self.payload)) + fields + self.payload


class Channel:
    """Both directions of one connection. Any thread may write; only one thread may read.

    Args:
        source: the stream of incoming frames, buffered.
        sink: the stream of outgoing frames, unbuffered.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source = source
        self._sink = sink
        self._writing = threading.Lock()

    def read(self) -> Frame:
        """Waits for the next frame, and returns it.

        Raises:
            ConnectionEnded: the other side sends no more.
        """
        try:
            words = self._source.readline(_LONGEST_LINE).split()
            if len(words) != 3:
                raise ConnectionEnded
            kind, fields, payload = words[0].decode(), self._exactly(int(words[1])), self._exactly(int(words[2]))
        except (OSError, ValueError) as error:
            raise ConnectionEnded from error
        return Frame(kind, json.loads(fields), payload)

    def write(self, frame: Frame) -> None:
        """Sends a frame. Blocks while the other side does not read.

        Raises:
            ConnectionEnded: the other side has closed the connection.
        """
        data = memoryview(frame.encode())
        try:
            with self._writing:
                while data:
                    data = data[self._sink.write(data) :]
        except (OSError, ValueError) as error:
            raise ConnectionEnded from error

    def await_greeting(self) -> None:
        """Skips the output before the greeting, whose last line may have no line feed.

        Raises:
            ConnectionEnded: the agent sends no greeting.
        """
        line = b""
        while not line.endswith(GREETING):
            line = self._source.readline(64 * 1024)
            if not line:
                raise ConnectionEnded

    def greet(self) -> None:
        """Sends the agent's greeting."""
        self._sink.write(GREETING)

    def close(self) -> None:
        """Closes the outgoing direction. The other side exits when it reads the end."""
        try:
            self._sink.close()
        except OSError:
            return  # the connection is broken already

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise ConnectionEnded
        return data
