"""Short messages between tasks, in pipes."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.pipes import NUMBERS, Pipe, PipeTo

PROCESS = """
import sys
from tfdist_cli.train.cluster.shared_memory.pipes import Pipe
pipe = Pipe()
print(*pipe.place, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    pipe.close()


def padded(*numbers):
    return (*numbers, *[0] * (NUMBERS - len(numbers)))


def test_messages_arrive_in_order(pipe):
    other = PipeTo(os.getpid(), pipe.place)
    assert all(other.send(number, -number) for number in range(5))
    assert [pipe.receive(0) for _ in range(5)] == [padded(number, -number) for number in range(5)]
    other.close()


def test_a_task_sends_itself_a_message_that_ends_a_wait(pipe):
    received = []
    thread = threading.Thread(target=lambda: received.append(pipe.receive(60)))
    thread.start()
    pipe.send(7)
    thread.join(60)
    assert received == [padded(7)]


def test_no_message_arrives_in_time(pipe):
    assert pipe.receive(0.01) is None


def test_messages_of_several_threads_are_not_mixed(pipe):
    others = [PipeTo(os.getpid(), pipe.place) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda each=each, n=n: [each.send(*[n] * NUMBERS) for _ in range(200)])
        for n, each in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    received = [pipe.receive(60) for _ in range(800)]
    for thread in threads:
        thread.join()
    assert {len(set(message)) for message in received} == {1}
    for each in others:
        each.close()


def test_a_closed_pipe_takes_no_message():
    pipe = Pipe()
    other = PipeTo(os.getpid(), pipe.place)
    found = [other.is_broken]
    other.send(1)
    found.append(other.is_broken)  # a message that nobody has received is no error
    pipe.close()
    found.append(other.is_broken)
    assert found == [False, False, True]
    assert not other.send(1)
    other.close()
    with pytest.raises(FileNotFoundError):
        PipeTo(os.getpid(), pipe.place)


def test_a_full_pipe_is_not_broken(pipe):
    other = PipeTo(os.getpid(), pipe.place)
    size = fcntl.fcntl(pipe.place[0], fcntl.F_SETPIPE_SZ, 4096)
    for number in range(size // (8 * NUMBERS)):
        other.send(number)
    assert not other.is_broken
    other.close()


def test_the_pipe_of_a_process_that_was_killed_is_broken():
    with subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        descriptor, inode = map(int, process.stdout.readline().split())
        other = PipeTo(process.pid, (descriptor, inode))
        assert other.send(1)
        before = other.is_broken
        process.kill()
        process.wait()
        assert (before, other.is_broken) == (False, True)
        assert not other.send(1)
    other.close()


def test_a_pipe_is_closed_once_and_when_nothing_uses_it(pipe):
    before = opened()
    others = [PipeTo(os.getpid(), pipe.place) for _ in range(2)]
    for _ in range(2):
        others[0].close()
    del others
    assert not opened() - before


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(pipe, tmp_path):
    """Its number may be used again after the pipe has been closed."""
    path = tmp_path / "log.txt"
    path.write_text("mine")
    with path.open("r+") as log, pytest.raises(FileNotFoundError):
        PipeTo(os.getpid(), (log.fileno(), pipe.place[1]))
    other = Pipe()
    with pytest.raises(FileNotFoundError):
        PipeTo(os.getpid(), (other.place[0], pipe.place[1]))
    other.close()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["socket", "folder"])
def test_a_descriptor_of_a_file_that_cannot_be_opened_is_no_pipe(pipe, tmp_path, kind):
    found = socket.socket().detach() if kind == "socket" else os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(FileNotFoundError):
        PipeTo(os.getpid(), (found, pipe.place[1]))
    os.close(found)


def test_a_descriptor_that_becomes_another_file_while_it_is_opened_is_closed(pipe, monkeypatch):
    other = Pipe()
    before = opened()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "readlink", lambda _: f"pipe:[{pipe.place[1]}]")
        with pytest.raises(FileNotFoundError):
            PipeTo(os.getpid(), (other.place[0], pipe.place[1]))
    assert not opened() - before
    other.close()


def test_a_process_that_has_exited_has_no_pipe(pipe):
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    with pytest.raises(FileNotFoundError):
        PipeTo(ended, pipe.place)
