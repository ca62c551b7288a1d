"""Memory of another process is read where it is, and nothing else of it is opened."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory import memory
from tfdist_cli.train.cluster.shared_memory.memory import (
    ALIGNED,
    OthersMemory,
    OwnMemory,
    Place,
    Region,
    has_ended,
    is_stopped,
)

PROCESS = """
import sys, numpy as np
from tfdist_cli.train.cluster.shared_memory.memory import OwnMemory
memory = OwnMemory()
place, = memory.write(1, [[np.arange(5, dtype=np.uint8), np.full(70, 7, np.uint8)]])
print(memory.identity.hex(), place.descriptor, place.offset, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own():
    memory = OwnMemory()
    yield memory
    memory.close()


def test_what_another_process_writes_is_read_and_ends_with_it():
    with subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        identity, descriptor, offset = process.stdout.readline().split()
        memory = OthersMemory.opened(bytes.fromhex(identity.decode()))
        place = Place(int(descriptor), int(offset))
        read = memory.read(place, 75)
        assert read.tolist() == [0, 1, 2, 3, 4] + [7] * 70
        assert read.ctypes.data % ALIGNED == 0
        process.stdin.close()
        process.wait()
        assert read.tolist() == [0, 1, 2, 3, 4] + [7] * 70
        assert OthersMemory.opened(bytes.fromhex(identity.decode())) is None


def test_a_task_may_be_told_to_share_no_memory(monkeypatch):
    monkeypatch.setenv("TFDIST_SHARE_MEMORY", "1")
    assert OwnMemory.if_supported() is not None
    monkeypatch.setenv("TFDIST_SHARE_MEMORY", "0")
    assert OwnMemory.if_supported() is None


def test_a_message_stays_until_the_next_but_one(own):
    memory = OthersMemory.opened(own.identity)
    sizes = [10, 3 << 20, 100, 9 << 20, 5, 5]
    reads = []
    for turn, size in enumerate(sizes):
        (place,) = own.write(turn, [[np.full(size, turn, np.uint8)]])
        reads.append(memory.read(place, size))
        for before in range(max(0, turn - 1), turn + 1):
            assert set(reads[before].tolist()) == {before}


def test_messages_of_one_exchange_are_apart_and_aligned(own):
    memory = OthersMemory.opened(own.identity)
    sizes = [1, 64, 65, 200_000]
    places = own.write(3, [[np.full(size, number, np.uint8)] for number, size in enumerate(sizes)])
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        assert place.offset % ALIGNED == 0
        assert memory.read(place, size).tolist() == [number] * size


def test_a_wrong_identity_is_not_opened(own):
    other = own.identity[:-1] + bytes([own.identity[-1] ^ 1])
    assert OthersMemory.opened(other) is None
    assert OthersMemory.opened(bytes(len(other))) is None


def test_memory_of_another_host_is_told_from_memory_that_is_gone(own):
    identity = bytes([own.identity[0] ^ 1]) + own.identity[1:]
    assert OthersMemory.opened(identity) is None
    with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
        OthersMemory.of(identity)
    assert raised.value.errno == errno.EREMOTE
    gone = OwnMemory()
    gone.close()
    with pytest.raises(FileNotFoundError):
        OthersMemory.of(gone.identity)


def test_memory_of_a_process_that_ends_is_gone_though_its_parent_does_not_know_it(monkeypatch):
    def refuse(process, descriptor):
        """As of a user's own process that has ended."""
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with subprocess.Popen([sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        identity = bytes.fromhex(process.stdout.readline().split()[0].decode())
        monkeypatch.setattr(memory, "_opened", refuse)
        with pytest.raises(PermissionError):
            OthersMemory.of(identity)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(FileNotFoundError):
            OthersMemory.of(identity)


def test_a_process_that_is_stopped_is_told_from_one_that_runs_or_has_ended():
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        found = []

        def look():
            found.append((is_stopped(process.pid), has_ended(process.pid)))

        look()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        look()
        os.kill(process.pid, signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        look()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        look()  # its parent does not know it
        process.wait()
        look()
    assert found == [(False, False), (True, False), (False, False), (False, True), (False, True)]


def test_the_name_of_a_process_may_look_like_a_state(tmp_path):
    program = tmp_path / "x) T 1 ("
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        assert not has_ended(process.pid)


def test_other_files_of_a_process_are_left_alone(tmp_path, own):
    secret = tmp_path / "secret"
    secret.write_bytes(b"0" * 64)
    with secret.open("r+b") as file, pytest.raises(ValueError, match="no memory"):
        OthersMemory(os.getpid()).read(Place(file.fileno(), 0), 16)
    assert secret.read_bytes() == b"0" * 64


@pytest.mark.parametrize("place", [(-1, 4), (0, 1 << 40), (1 << 40, 1)])
def test_bytes_outside_of_the_memory_are_refused(own, place):
    (written,) = own.write(0, [[np.zeros(8, np.uint8)]])
    offset, size = place
    with pytest.raises(ValueError, match="bytes"):
        OthersMemory.opened(own.identity).read(Place(written.descriptor, offset), size)


def test_no_descriptor_of_memory_that_there_is_no_room_for_is_left(own):
    before = opened()
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        Region.new(1 << 62)
    assert not opened() - before


def test_no_descriptor_is_left(own):
    before = opened()
    memory = OwnMemory()
    memory.write(0, [[np.zeros(3 << 20, np.uint8)]])
    reader = OthersMemory.opened(memory.identity)
    memory.close()
    del reader
    assert not opened() - before
