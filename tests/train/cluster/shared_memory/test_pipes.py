"""Short messages between tasks, in pipes."""

import os
import threading

import pytest

from tfdist_cli.train.cluster.shared_memory.pipes import NUMBERS, Pipe, PipeTo


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
    pipe.close()
    assert not other.send(1)
    other.close()


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


def test_a_process_that_has_exited_has_no_pipe(pipe):
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    with pytest.raises(FileNotFoundError):
        PipeTo(ended, pipe.place)
