"""A process that waits for a number in shared memory is woken by the one that stores it."""

import errno
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfdist_cli.train.cluster.shared_memory.lockstep import words
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, Region

pytestmark = pytest.mark.skipif(not words.supported(), reason="this system has no futex")
LONG = 60
"""Seconds that no wait takes that is woken."""
WAITS = """
import sys
import numpy as np
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, OthersMemory

memory = OthersMemory.of(bytes.fromhex(sys.argv[1])).first(2 * ALIGNED)
words = Words(memory[ALIGNED:].view(np.int64))
print("ready", flush=True)
words.sleep(3, 7, 60)  # woken, though the number stays
print(words[3], flush=True)
while (seen := words[3]) < int(sys.argv[2]):
    words.sleep(3, seen, 60)
print(words[3], flush=True)
"""


@pytest.fixture
def own():
    return Words(np.zeros(8, np.int64))


def waited(owner, *arguments):
    """Waits; returns how many seconds."""
    begin = time.monotonic()
    owner.sleep(*arguments)
    return time.monotonic() - begin


def woken(waiting, wake):
    """Wakes what waits until it has noticed: it may begin to wait after a call. Returns whether it has."""
    until = time.monotonic() + LONG / 2
    while not waiting.done() and time.monotonic() < until:
        wake()
    return waiting.done()


def test_a_process_that_waits_is_woken(own):
    region, identity = Region.identifying(2 * ALIGNED)
    own, least = Words(region.memory[ALIGNED : 2 * ALIGNED].view(np.int64)), 1 << 40
    own.store(3, 7)
    command = [sys.executable, "-c", WAITS, identity.hex(), str(least)]
    with ThreadPoolExecutor(1) as pool, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        answer = pool.submit(process.stdout.readline)
        assert woken(answer, lambda: own.store(3, 7))
        assert answer.result() == "7\n"
        own.store(3, 8)
        own.store(3, least + 5)
        assert process.stdout.readline() == f"{least + 5}\n"
    os.close(region.descriptor)


@pytest.mark.parametrize("wake", [lambda own: own.store(1, 0), lambda own: own.wake(1)], ids=["store", "wake"])
def test_a_thread_that_waits_is_woken(own, wake):
    """Also if the number stays as it is."""
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(own.sleep, 1, 0, LONG) for _ in range(2)]
        assert all(woken(each, lambda: wake(own)) for each in both)


def test_others_that_wait_are_not_woken(own):
    began, ended = threading.Event(), threading.Event()

    def wait():
        began.set()
        own.sleep(1, 0, LONG)
        ended.set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert began.wait(LONG)
        for index in (0, 2):
            for value in range(100):
                own.store(index, value)
        assert not ended.is_set()
        assert woken(waiting, lambda: own.wake(1))


@pytest.mark.parametrize("value", [1, -1, 1 << 31, (1 << 40) + 1, -(1 << 62) - 1])
def test_a_wait_for_another_number_than_that_which_is_there_returns_at_once(own, value):
    own.store(2, value)
    assert own[2] == value
    assert waited(own, 2, value + 1, LONG) < LONG / 2
    assert waited(own, 2, 0, LONG) < LONG / 2


@pytest.mark.parametrize("value", [0, -1, 1 << 31, (1 << 40) + 1, 1 << 62, -(1 << 62)])
def test_a_wait_for_the_number_that_is_there_ends_after_its_time(own, value):
    own.store(2, value)
    assert 0.02 <= waited(own, 2, value, 0.02) < LONG / 2


def test_numbers_are_stored_where_others_look(own):
    numbers = np.zeros(8, np.int64)
    own = Words(numbers)
    own.store(7, 1 << 40)
    own.store(0, -5)
    assert numbers.tolist() == [-5, 0, 0, 0, 0, 0, 0, 1 << 40]
    numbers[4] = 9
    assert own[4] == 9


def test_two_threads_take_turns(own):
    """Each waits for the number of the other one; no wait is missed."""

    def count(begin, end):
        for value in range(begin, end, 2):
            while (seen := own[0]) != value:
                own.sleep(0, seen, LONG)
            own.store(0, value + 1)

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(count, first, 1000) for first in (0, 1)]:
            each.result()
    assert own[0] == 1000
    assert time.monotonic() - began < LONG


def test_a_place_that_is_no_memory_is_an_error(own):
    own._addresses[0] = 8
    with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
        own.sleep(0, 0, 0.01)
    assert raised.value.errno == errno.EFAULT


@pytest.mark.parametrize(
    ("machine", "system", "order", "found"),
    [
        ("x86_64", "linux", "little", True),
        ("aarch64", "linux", "little", True),
        ("riscv64", "linux", "little", False),
        ("x86_64", "darwin", "little", False),
        ("aarch64", "linux", "big", False),
    ],
)
def test_which_systems_have_words(monkeypatch, machine, system, order, found):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(sys, "byteorder", order)
    assert words.supported() == found


def test_a_fence_is_passed_by_many_threads_at_once():
    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(words.fence) for _ in range(100)]:
            each.result()
    assert not words._fence.locked()
