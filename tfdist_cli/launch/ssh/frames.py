"""What a launcher and the agent on a host say to one another: frames, each a kind, fields and bytes.

On the wire a frame is a line `KIND n m`, then n bytes of JSON, then m bytes as they are. Both sides read and write in
blocking calls: a host that is not read from is slowed down to the speed of the launcher.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import IO, Any

GREETING = b"tfdist-agent 1\n"
"""What an agent says first; what a shell's start files have printed stands before it."""
_LONGEST_LINE = 100


class Ended(Exception):
    """Nothing more comes: the connection is gone."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Args:
        kind: what it is about.
        fields: what it says, in plain JSON types.
        payload: bytes that go with it.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def encode(self) -> bytes:
        """Its bytes on the wire."""
        said = json.dumps(self.fields, separators=(",", ":")).encode()
        return b"%s %d %d\n" % (self.kind.encode(), len(said), len(self.payload)) + said + self.payload


class Channel:
    """Both directions of one connection. Any thread may write; one reads.

    Args:
        source: where the other side's frames come from, buffered.
        sink: where ours go, not buffered.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source = source
        self._sink = sink
        self._writing = threading.Lock()

    def read(self) -> Frame:
        """The next frame, once it is there.

        Raises:
            Ended: there is none.
        """
        try:
            words = self._source.readline(_LONGEST_LINE).split()
            if len(words) != 3:
                raise Ended
            kind, said, payload = words[0].decode(), self._exactly(int(words[1])), self._exactly(int(words[2]))
        except (OSError, ValueError) as error:
            raise Ended from error
        return Frame(kind, json.loads(said), payload)

    def write(self, frame: Frame) -> None:
        """Sends a frame; waits while the other side has enough to read.

        Raises:
            Ended: nobody reads.
        """
        data = memoryview(frame.encode())
        try:
            with self._writing:
                while data:
                    data = data[self._sink.write(data) :]
        except (OSError, ValueError) as error:
            raise Ended from error

    def await_greeting(self) -> None:
        """Passes over what comes before the agent's first word; a start file may print no line feed at its end.

        Raises:
            Ended: it never comes.
        """
        line = b""
        while not line.endswith(GREETING):
            line = self._source.readline(64 * 1024)
            if not line:
                raise Ended

    def greet(self) -> None:
        """Says the agent's first word."""
        self._sink.write(GREETING)

    def close(self) -> None:
        """Sends no more, which tells the other side to end."""
        try:
            self._sink.close()
        except OSError:
            return  # it is gone already

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise Ended
        return data
