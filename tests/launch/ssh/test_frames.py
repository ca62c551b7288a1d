"""Frames, from bytes to bytes."""

import io
import os
import threading

import pytest

from tfdist_cli.launch.ssh.frames import GREETING, Channel, Ended, Frame


def read_all(data):
    channel = Channel(io.BytesIO(data), io.BytesIO())
    frames = []
    while True:
        try:
            frames.append(channel.read())
        except Ended:
            return frames


def test_a_frame_comes_as_it_went():
    frames = [
        Frame("plan", {"a'; echo foo": ["ü", "\n", "x" * 250, None, 1.5]}),
        Frame("output", {}, b"\0\xff\noutput 2 0\n"),
        Frame("ping"),
    ]
    assert read_all(b"".join(frame.encode() for frame in frames)) == frames


@pytest.mark.parametrize("cut", [b"", b"ping 2 0\n", b"ping 2", b"output 2 5\n{}abc", b"x" * 1000, b"ping a b\n{}"])
def test_one_that_is_not_whole_is_the_end(cut):
    assert read_all(Frame("ping").encode() + cut) == [Frame("ping")]


@pytest.mark.parametrize("printed", [b"", b"Welcome!\nYou have mail.\n", b"Welcome!\n\033]0;title\007", b"\xff\0"])
def test_what_a_shell_prints_before_the_agent_is_passed_over(printed):
    data = printed + GREETING + Frame("hello").encode()
    channel = Channel(io.BytesIO(data), io.BytesIO())
    channel.await_greeting()
    assert channel.read() == Frame("hello")
    with pytest.raises(Ended):
        Channel(io.BytesIO(b"Welcome!\n"), io.BytesIO()).await_greeting()


def test_a_large_frame_goes_through_a_small_pipe_and_a_closed_one_is_the_end():
    reading, writing = os.pipe()
    large = Frame("piece", {}, b"x" * 3_000_000)
    with os.fdopen(writing, "wb", buffering=0) as sink, os.fdopen(reading, "rb") as source:
        sender = threading.Thread(target=Channel(io.BytesIO(), sink).write, args=(large,))
        sender.start()
        assert Channel(source, sink).read() == large
        sender.join()
        source.close()
        with pytest.raises(Ended):
            Channel(source, sink).write(large)
