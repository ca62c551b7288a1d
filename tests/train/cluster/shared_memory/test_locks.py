"""A lock is held by one process at a time, also if processes that hold it end, or are stopped."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.descriptors import opened
from tests.support.lock_holder import LockHolder
from tfdist_cli.train.cluster.shared_memory import locks
from tfdist_cli.train.cluster.shared_memory.locks import NUMBERS, Lock, OthersLock
from tfdist_cli.train.cluster.shared_memory.memory import NONCE_BYTES, Region, has_ended
from tfdist_cli.train.cluster.shared_memory.pipes import Pipe

VALID, HOLDER = 2, 3
"""The places of the number of the token, and of the process that holds the lock."""


class Shared:
    """A lock of this process, in memory that others can open."""

    def __init__(self):
        region, self.identity = Region.identifying(8 * (NUMBERS + 1))
        numbers = region.memory[NONCE_BYTES:].view(np.int64)
        self.numbers, self.number = numbers[:NUMBERS], numbers[NUMBERS:]
        self.lock, self._descriptor = Lock(self.numbers), region.descriptor

    def opened(self):
        return OthersLock(os.getpid(), self.numbers)

    def holder(self):
        """Another process."""
        return LockHolder(self.identity, NONCE_BYTES)

    def is_free_once(self):
        """Whether the lock can be acquired, and then not again before it is released."""
        first, second = self.opened(), self.opened()
        found = first.acquire(0), second.acquire(0)
        if found == (True, False):
            first.release()
        first.close()
        second.close()
        return found == (True, False)

    def close(self):
        self.lock.close()
        os.close(self._descriptor)


@pytest.fixture
def shared():
    found = Shared()
    yield found
    found.close()


@pytest.fixture
def clock(monkeypatch):
    """The time of looks, which passes when a test lets it."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def look_twice(shared, clock):
    """Looks at the begin and at the end of an idle time."""
    shared.lock.look()
    clock.now += locks._IDLE_SECONDS
    shared.lock.look()


def test_a_lock_is_held_once(shared):
    first, second = shared.opened(), shared.opened()
    assert first.acquire(0)
    assert not second.acquire(0.01)
    first.release()
    assert second.acquire(0)
    assert not first.acquire(0)
    second.release()
    assert shared.is_free_once()
    for each in (first, second):
        each.close()


def test_one_that_waits_gets_the_lock_when_it_is_released(shared):
    first, second = shared.opened(), shared.opened()
    first.acquire(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.acquire, 60)
        first.release()
        assert waiting.result()
    second.release()
    assert shared.is_free_once()


def test_no_increment_of_many_processes_is_lost(shared):
    times = 2000
    with ExitStack() as stack:
        others = [stack.enter_context(each) for each in [shared.holder() for _ in range(4)]]
        for each in others:
            each.order("add", times)
        for _ in range(20):
            shared.lock.look()
        for each in others:
            each.done()
    assert shared.number[0] == len(others) * times
    assert shared.is_free_once()


def test_the_lock_of_a_process_that_was_killed_is_taken_away(shared):
    with shared.holder() as other:
        other.do("acquire")
        shared.lock.look()
        assert not shared.is_free_once()
        other.kill()
    shared.lock.look()
    assert shared.numbers[HOLDER] == 0
    assert shared.is_free_once()


def test_a_lock_that_was_released_before_its_holder_ended_is_not_taken_from_the_next_one(shared, monkeypatch):
    """The task that looks finds the end of a process that has released the lock meanwhile."""
    own = shared.opened()
    with shared.holder() as other:
        other.do("acquire")

        def look(process):
            other.do("release")
            assert own.acquire(0)
            other.kill()
            return has_ended(process)

        monkeypatch.setattr(locks, "has_ended", look)
        shared.lock.look()
    assert not shared.opened().acquire(0)
    own.release()
    assert shared.is_free_once()


def test_a_process_that_is_killed_before_it_says_that_it_has_the_token_loses_it(shared, clock):
    with shared.holder() as other:
        other.do("take")
        other.kill()
    shared.lock.look()
    assert not shared.is_free_once()  # it may live, and be about to say so
    clock.now += locks._IDLE_SECONDS
    shared.lock.look()
    assert shared.is_free_once()


def test_a_process_that_is_killed_while_it_waits_has_no_token(shared):
    first = shared.opened()
    first.acquire(0)
    with shared.holder() as other:
        other.order("acquire")
        other.kill()
    first.release()
    assert shared.is_free_once()


@pytest.mark.parametrize("meanwhile", ["nobody", "one that holds it", "one that has released it"])
def test_a_process_that_was_stopped_and_goes_on_puts_in_no_second_token(shared, clock, meanwhile):
    own = shared.opened()
    with shared.holder() as other:
        other.do("acquire")
        other.stop()
        look_twice(shared, clock)
        if meanwhile != "nobody":
            assert own.acquire(0)
        if meanwhile == "one that has released it":
            own.release()
        other.go_on()
        other.do("release")
        if meanwhile == "one that holds it":
            assert shared.numbers[HOLDER] == os.getpid()
            assert not shared.opened().acquire(0)
            own.release()
        assert shared.is_free_once()
        other.do("acquire")
        assert not own.acquire(0)
        other.do("release")
    assert shared.is_free_once()


@pytest.mark.parametrize("held", [False, True])
def test_a_process_that_goes_on_before_it_says_that_it_has_the_token_puts_in_no_second_one(shared, clock, held):
    """It was stopped between: it finds no number of before the token was replaced."""
    own, late = shared.opened(), shared.opened()
    (late._token,) = locks._TOKEN.unpack(os.read(late._descriptor, locks._TOKEN.size))
    look_twice(shared, clock)
    assert not held or own.acquire(0)
    shared.numbers[HOLDER] = os.getpid()  # now it says so
    late.release()
    if held:
        assert not late.acquire(0)
        own.release()
    assert shared.is_free_once()


def test_a_holder_that_died_is_found_though_a_process_that_went_on_had_said_that_it_holds_the_lock(shared, clock):
    with shared.holder() as late, shared.holder() as dead:
        late.do("take")
        look_twice(shared, clock)
        dead.do("acquire")
        late.do("say")
        dead.kill()
        late.do("release")
        look_twice(shared, clock)
    assert shared.is_free_once()


def test_a_token_that_is_put_back_after_it_was_replaced_is_not_taken(shared, clock):
    """The holder was stopped when it had found that the lock is still its own."""
    own = shared.opened()
    own.acquire(0)
    token = locks._TOKEN.pack(own._token)
    shared.numbers[HOLDER] = 0
    look_twice(shared, clock)
    os.write(own._descriptor, token)
    assert shared.is_free_once()
    os.write(own._descriptor, token)
    assert own.acquire(0)
    own.release()
    assert shared.is_free_once()


def test_a_process_that_runs_or_is_stopped_for_a_moment_keeps_the_lock(shared, clock):
    with shared.holder() as other:
        other.do("acquire")
        for _ in range(3):
            look_twice(shared, clock)
        other.stop()
        shared.lock.look()
        other.go_on()
        shared.lock.look()
        clock.now += locks._IDLE_SECONDS
        other.stop()
        shared.lock.look()
        assert not shared.is_free_once()
        clock.now += locks._IDLE_SECONDS
        shared.lock.look()
        assert shared.is_free_once()


def test_an_idle_lock_that_is_just_taken_is_not_given_to_another_one(shared, clock):
    """The process that has read the token says so in a moment; nothing else has happened between two looks."""
    own = shared.opened()
    shared.lock.look()
    clock.now += 10 * locks._IDLE_SECONDS
    os.read(own._descriptor, locks._TOKEN.size)
    shared.lock.look()
    shared.lock.look()  # of another thread
    assert not shared.opened().acquire(0)


def test_a_token_that_is_lost_twice_is_replaced_after_an_idle_time_each(shared, clock):
    own = shared.opened()
    os.read(own._descriptor, locks._TOKEN.size)
    look_twice(shared, clock)
    os.read(own._descriptor, locks._TOKEN.size)
    shared.lock.look()
    assert not own.acquire(0)
    clock.now += locks._IDLE_SECONDS
    shared.lock.look()
    assert shared.is_free_once()


def test_looks_of_many_threads_put_in_one_token(shared, clock):
    with shared.holder() as other:
        other.do("acquire")
        other.kill()
    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(shared.lock.look) for _ in range(100)]:
            each.result()
    assert shared.numbers[VALID] == 2
    assert shared.is_free_once()


def test_a_free_lock_stays_free(shared, clock):
    for _ in range(3):
        look_twice(shared, clock)
        assert shared.is_free_once()


def test_a_lock_of_a_process_that_has_ended_is_not_opened(shared):
    ended = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(ended, 0)
    with pytest.raises(FileNotFoundError):
        OthersLock(ended, shared.numbers)


def test_a_closed_lock_is_not_opened_nor_is_what_has_its_descriptor_now():
    numbers = np.zeros(NUMBERS, np.int64)
    lock = Lock(numbers)
    own = OthersLock(os.getpid(), numbers)
    lock.close()
    with pytest.raises(FileNotFoundError):
        OthersLock(os.getpid(), numbers)
    before = opened()
    other = Pipe()
    numbers[0] = other.place[0]
    with pytest.raises(FileNotFoundError):
        OthersLock(os.getpid(), numbers)
    other.close()
    assert not opened() - before
    assert own.acquire(0)  # those who have opened it are not in each other's way
    own.release()


def test_nothing_is_left_open(shared):
    before = opened()
    for closes in (True, False):
        numbers = np.zeros(NUMBERS, np.int64)
        lock, other = Lock(numbers), OthersLock(os.getpid(), numbers)
        assert other.acquire(0)
        if closes:
            other.close()
            other.close()  # again
        del other
        lock.close()
    assert not opened() - before


def test_a_thread_that_waits_keeps_the_lock_open_that_others_forget(shared):
    first = shared.opened()
    first.acquire(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shared.opened().acquire, 60)
        first.release()
        assert waiting.result()
