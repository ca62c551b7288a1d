"""Writing to whoever may have stopped reading."""

import os
import sys
import threading

import pytest

from tfdist_cli.cli.console import nonblocking_stream
from tfdist_cli.cli.console.nonblocking_stream import nonblocking

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere writes wait, as they always have"
)


@pytest.fixture
def pipe():
    """The two ends of a pipe, as text."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "w", encoding="utf-8") as write:
        yield read, write


def test_what_is_read_is_written(pipe):
    read, write = pipe
    with nonblocking(write) as stream:
        assert stream.write("é one\n") == 6
        stream.write("two\n")
        assert (stream.encoding, stream.isatty()) == ("utf-8", False)
    assert os.read(read.fileno(), 100).decode() == "é one\ntwo\n"
    assert os.get_blocking(write.fileno()), "others share the descriptor"


def test_who_has_stopped_reading_is_not_waited_for_and_hears_of_it(pipe, monkeypatch):
    monkeypatch.setattr(nonblocking_stream, "_PATIENCE", 0.05)
    read, write = pipe
    with nonblocking(write) as stream:
        for _ in range(100):
            stream.write("x" * 9_999 + "\n")
        seen = os.read(read.fileno(), 2**20)
        assert set(seen) == {ord("x"), ord("\n")}
        stream.write("again\n")
        first, notice, last = os.read(read.fileno(), 2**20).decode().splitlines()
    assert (first, last) == ("", "again")
    whole = len(seen) // 10_000
    assert f" {100 - whole} lines " in notice


def test_a_slow_reader_gets_everything(pipe):
    read, write = pipe
    heard = []
    reader = threading.Thread(target=lambda: heard.append(read.read(1_000_000)))
    with nonblocking(write) as stream:
        reader.start()
        for _ in range(100):
            stream.write("x" * 10_000)
    reader.join(10)
    assert heard == [b"x" * 1_000_000]


def test_a_reader_that_is_gone_is_an_error(pipe):
    read, write = pipe
    with nonblocking(write) as stream:
        read.close()
        with pytest.raises(BrokenPipeError):
            stream.write("x")


def test_a_file_is_written_as_ever(tmp_path):
    with (tmp_path / "f").open("w") as file, nonblocking(file) as stream:
        assert stream is file
