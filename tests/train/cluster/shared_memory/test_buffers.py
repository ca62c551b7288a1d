"""A buffer is used again when its reader has let go of it, and not before."""

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.buffers import MESSAGE_BYTES, BufferReader, Buffers
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, Region

READER = """
import sys, numpy as np
from tfdist_cli.train.cluster.shared_memory.buffers import BufferReader
reader = BufferReader()
print(reader.meet(bytes.fromhex(sys.argv[1])))
kept = [reader.read(bytes.fromhex(line)) for line in sys.stdin.readline().split()]
print(*(int(each.sum()) for each in kept), flush=True)
sys.stdin.read()
"""


def data(value, size=200_000):
    return np.full(size, value, np.uint8)


@pytest.fixture
def buffers():
    return Buffers()


@pytest.fixture
def reader(buffers):
    reader = BufferReader()
    assert reader.meet(buffers.identity)
    return reader


def test_another_process_reads_what_was_written_and_its_buffers_are_free_when_it_was_killed(buffers):
    command = [sys.executable, "-c", READER, buffers.identity.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        first, second = buffers.write(data(1)), buffers.write(data(2))
        process.stdin.write(f"{first.hex()} {second.hex()}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline() == "200000 400000\n"
        assert buffers.write(data(3)) not in {first, second}
        process.kill()
        process.wait()
    assert {buffers.write(data(4)), buffers.write(data(5))} == {first, second}


def test_what_is_kept_stays_and_what_is_not_is_written_over(buffers, reader):
    messages = [buffers.write(data(number)) for number in range(3)]
    first, view, third = (reader.read(message) for message in messages)
    view = view[100:].view(np.uint16)[::2]
    del third
    reader.let_go()
    for number in range(3, 10):
        message = buffers.write(data(number))
        assert message == messages[2]
        assert set(reader.read(message).tolist()) == {number}
        reader.let_go()
    assert set(first.tolist()) == {0}
    assert set(view.tolist()) == {0x0101}
    del view, first
    reader.let_go()
    assert {buffers.write(data(1)) for _ in range(3)} == set(messages)


def test_buffers_of_several_sizes(buffers, reader):
    sizes = [64, 100, 1 << 20, 5 << 20, 3_000_001, 100]
    messages = [buffers.write(data(number, size)) for number, size in enumerate(sizes)]
    assert len(set(messages)) == len(messages)
    assert {len(message) for message in messages} == {MESSAGE_BYTES}
    for number, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        read = reader.read(message)
        assert read.ctypes.data % ALIGNED == 0
        assert (len(read), set(read.tolist())) == (size, {number})


def test_many_buffers_take_few_descriptors(buffers):
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(200):
        buffers.write(data(number % 7, 3 << 10))
    assert len(list(descriptors.iterdir())) - before < 10


def test_without_memory_nothing_is_written_and_the_next_one_may_be(buffers, monkeypatch):
    def no_memory(_):
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Region, "new", no_memory)
        with pytest.raises(OSError, match="no memory"):
            buffers.write(data(1))
    assert len(buffers.write(data(2))) == MESSAGE_BYTES


def test_a_task_that_was_not_met_is_not_read(buffers):
    message = buffers.write(data(1))
    with pytest.raises(KeyError):
        BufferReader().read(message)
    assert not BufferReader().meet(bytes(len(buffers.identity)))


WRITER = """
import sys, numpy as np
from tfdist_cli.train.cluster.shared_memory.buffers import Buffers
buffers = Buffers()
print(buffers.identity.hex(), buffers.write(np.full(200_000, 7, np.uint8)).hex(), flush=True)
sys.stdin.read()
"""


def test_the_memory_of_processes_that_have_exited_is_closed():
    reader, counts = BufferReader(), []
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            identity, message = (bytes.fromhex(word.decode()) for word in process.stdout.readline().split())
            assert reader.meet(identity)
            read = reader.read(message)
            process.kill()
        assert set(read.tolist()) == {7}
        counts.append(opened())
    assert not counts[-1] - counts[1]  # after the first, one of before is still used while the next one is opened


def test_a_process_with_the_number_of_one_before(buffers, reader):
    reader.read(buffers.write(data(1)))
    other = Buffers()
    assert reader.meet(other.identity)
    assert set(reader.read(other.write(data(2))).tolist()) == {2}
