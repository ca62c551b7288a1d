"""Frames, from bytes to bytes."""

import io
import os
import threading

import pytest

from tfdist_cli.launch.ssh.frames import GREETING, Channel, ConnectionEnded, Frame


def read_all(data):
    channel = Channel(io.BytesIO(data), io.BytesIO())
    frames = []
    while True:
        try:
            frames.append(channel.read())
        except ConnectionEnded:
            return frames


def test_a_frame_is_read_as_it_was_written():
    frames = [
        Frame("plan", {"a'; echo foo": ["ü", "\n", "x" * 250, None, 1.5]}),
        Frame("output", {}, b"\0\xff\noutput 2 0\n"),
        Frame("ping"),
    ]
    assert read_all(b"".join(frame.encode() for frame in frames)) == frames


@pytest.mark.parametrize("cut", [b"", b"ping 2 0\n", b"ping 2", b"output 2 5\n{}abc", b"x" * 1000, b"ping a b\n{}"])
def test_an_incomplete_frame_ends_the_connection(cut):
    assert read_all(Frame("ping").encode() + cut) == [Frame("ping")]


@pytest.mark.parametrize("printed", [b"", b"Welcome!\nYou have mail.\n", b"Welcome!\n\033]0;title\007", b"\xff\0"])
def test_output_of_the_shell_before_the_greeting_is_skipped(printed):
    data = printed + GREETING + Frame("hello").encode()
    channel = Channel(io.BytesIO(data), io.BytesIO())
    channel.await_greeting()
    assert channel.read() == Frame("hello")
    with pytest.raises(ConnectionEnded):
        Channel(io.BytesIO(b"Welcome!\n"), io.BytesIO()).await_greeting()


def test_a_large_frame_passes_a_small_pipe_and_a_closed_pipe_ends_the_connection():
    reading, writing = os.pipe()
    large = Frame("piece", {}, b"x" * 3_000_000)
    with os.fdopen(writing, "wb", buffering=0) as sink, os.fdopen(reading, "rb") as source:
        sender = threading.Thread(target=Channel(io.BytesIO(), sink).write, args=(large,))
        sender.start()
        assert Channel(source, sink).read() == large
        sender.join()
        source.close()
        with pytest.raises(ConnectionEnded):
            Channel(source, sink).write(large)
