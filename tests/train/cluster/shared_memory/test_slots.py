"""A slot is used again when its reader has let go of it, and not before."""

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, Region
from tfdist_cli.train.cluster.shared_memory.slots import MESSAGE_BYTES, SlotReader, Slots

READER = """
import sys, numpy as np
from tfdist_cli.train.cluster.shared_memory.slots import SlotReader
reader = SlotReader()
print(reader.meet(bytes.fromhex(sys.argv[1])))
kept = [reader.read(bytes.fromhex(line)) for line in sys.stdin.readline().split()]
print(*(int(each.sum()) for each in kept), flush=True)
sys.stdin.read()
"""


def data(value, size=200_000):
    return np.full(size, value, np.uint8)


@pytest.fixture
def slots():
    return Slots()


@pytest.fixture
def reader(slots):
    reader = SlotReader()
    assert reader.meet(slots.identity)
    return reader


def test_another_process_reads_what_was_written_and_its_slots_are_free_when_it_was_killed(slots):
    command = [sys.executable, "-c", READER, slots.identity.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        first, second = slots.write(data(1)), slots.write(data(2))
        process.stdin.write(f"{first.hex()} {second.hex()}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline() == "200000 400000\n"
        assert slots.write(data(3)) not in {first, second}
        process.kill()
        process.wait()
    assert {slots.write(data(4)), slots.write(data(5))} == {first, second}


def test_what_is_kept_stays_and_what_is_not_is_written_over(slots, reader):
    messages = [slots.write(data(number)) for number in range(3)]
    first, view, third = (reader.read(message) for message in messages)
    view = view[100:].view(np.uint16)[::2]
    del third
    reader.let_go()
    for number in range(3, 10):
        message = slots.write(data(number))
        assert message == messages[2]
        assert set(reader.read(message).tolist()) == {number}
        reader.let_go()
    assert set(first.tolist()) == {0}
    assert set(view.tolist()) == {0x0101}
    del view, first
    reader.let_go()
    assert {slots.write(data(1)) for _ in range(3)} == set(messages)


def test_slots_of_several_sizes(slots, reader):
    sizes = [64, 100, 1 << 20, 5 << 20, 3_000_001, 100]
    messages = [slots.write(data(number, size)) for number, size in enumerate(sizes)]
    assert len(set(messages)) == len(messages)
    assert {len(message) for message in messages} == {MESSAGE_BYTES}
    for number, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        read = reader.read(message)
        assert read.ctypes.data % ALIGNED == 0
        assert (len(read), set(read.tolist())) == (size, {number})


def test_many_slots_take_few_descriptors(slots):
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(200):
        slots.write(data(number % 7, 3 << 10))
    assert len(list(descriptors.iterdir())) - before < 10


def test_without_memory_nothing_is_written_and_the_next_one_may_be(slots, monkeypatch):
    def no_memory(_):
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Region, "new", no_memory)
        with pytest.raises(OSError, match="no memory"):
            slots.write(data(1))
    assert len(slots.write(data(2))) == MESSAGE_BYTES


def test_a_task_that_was_not_met_is_not_read(slots):
    message = slots.write(data(1))
    with pytest.raises(KeyError):
        SlotReader().read(message)
    assert not SlotReader().meet(bytes(len(slots.identity)))


WRITER = """
import sys, numpy as np
from tfdist_cli.train.cluster.shared_memory.slots import Slots
slots = Slots()
print(slots.identity.hex(), slots.write(np.full(200_000, 7, np.uint8)).hex(), flush=True)
sys.stdin.read()
"""


def test_the_memory_of_processes_that_have_exited_is_closed():
    reader, counts = SlotReader(), []
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            identity, message = (bytes.fromhex(word.decode()) for word in process.stdout.readline().split())
            assert reader.meet(identity)
            read = reader.read(message)
            process.kill()
        assert set(read.tolist()) == {7}
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[1] == counts[-1]  # after the first, one of before is still used while the next one is opened


def test_a_process_with_the_number_of_one_before(slots, reader):
    reader.read(slots.write(data(1)))
    other = Slots()
    assert reader.meet(other.identity)
    assert set(reader.read(other.write(data(2))).tolist()) == {2}
