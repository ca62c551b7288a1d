"""Workers update the parameters in the memory of the ps, also if others are lost or end."""

import errno
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tests.support.descriptors import opened
from tests.support.lock_holder import LockHolder
from tfdist_cli.train.cluster.shared_memory import locks, memory, parameters
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, IDENTITY_BYTES
from tfdist_cli.train.cluster.shared_memory.parameters import PsParameters, UpdatesEnded, WorkerParameters

FLOATS, DOUBLES, HALVES = (np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float32", "float64", "bfloat16"))
LAYOUT = Layout(
    values=[[Array(FLOATS, 17), Array(DOUBLES, 1), Array(FLOATS, 0), Array(HALVES, 3)], [Array(FLOATS, 2)]],
    others=[[Array(FLOATS, 17), Array(DOUBLES, 5)], []],
)
ANOTHER_PS = """
import sys
import numpy as np
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.parameters import PsParameters

ps = PsParameters(0, Layout([[Array(np.dtype(np.float32), 4)]], [[]]))
ps.begin(5)
values = [np.arange(4, dtype=np.float32)]
ps.publish(values)
sys.stdout.buffer.write(ps.identity)
sys.stdout.flush()
sys.stdin.readline()
count, (copy,) = ps.read(values)
print(copy.tolist(), count, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ps():
    both = [PsParameters(number, LAYOUT) for number in range(2)]
    yield both
    for each in both:
        each.close()


@pytest.fixture
def worker(ps):
    return new_worker(ps)


@pytest.fixture
def impatient(monkeypatch):
    """Lets tasks that wait look at the others at once."""
    monkeypatch.setattr(parameters, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(locks, "_IDLE_SECONDS", 0.2)


def new_worker(ps):
    return WorkerParameters(LAYOUT, [each.identity for each in ps])


def arrays(number):
    return [*LAYOUT.values[number], *LAYOUT.others[number]]


def filled(number, value):
    return [np.full(array.size, value, array.dtype) for array in arrays(number)]


def stored(ps):
    """What is in the memory of a ps."""
    return [each.tolist() for each in ps._content.stored]


def all_of(number, value):
    """What is in the memory of a ps that has one value everywhere."""
    return [[value] * array.size for array in arrays(number)]


def count_of(ps):
    return int(ps._content.numbers[parameters._COUNT])


def own_places(worker, number):
    """The arrays of a ps, with what is behind them."""
    begin = len(arrays(0)) if number else 0
    return worker.padded[begin : begin + len(arrays(number))]


def update(worker, number, change=1):
    """Adds something to all variables of a ps; returns how many updates there were, and what the worker finds then."""
    before = worker.acquire(number, counts=True)
    for place, array in zip(own_places(worker, number), arrays(number), strict=True):
        place[: array.size] += np.asarray(change, array.dtype)
    return before, *worker.release(number)


def holder_of(ps):
    """Another process that can take the lock of a ps."""
    return LockHolder(ps.identity, parameters._LOCK.start)


def begun(monkeypatch, owner, name):
    """An event: a method is called."""
    called, original = threading.Event(), getattr(owner, name)

    def call(*arguments):
        called.set()
        return original(*arguments)

    monkeypatch.setattr(owner, name, call)
    return called


def refuse(process, descriptor):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_updates_are_counted_and_made_where_the_ps_reads_them(ps, worker):
    other = new_worker(ps)
    values = [filled(number, 5) for number in range(2)]
    for each, own in zip(ps, values, strict=True):
        each.publish(own)
        each.begin(7)
    assert [update(one, number)[0] for one in (worker, other) for number in range(2)] == [7, 7, 8, 8]
    for number, each in enumerate(ps):
        count, copies = each.read(values[number])
        assert count == 9
        assert [copy.tolist() for copy in copies] == all_of(number, 7)
        assert [copy.dtype for copy in copies] == [array.dtype for array in arrays(number)]


def test_arrays_are_aligned_and_have_values_behind_them_that_belong_to_nothing(ps, worker):
    """Of sizes that fill no 64 bytes, or none at all."""
    for number, each in enumerate(ps):
        each.publish(filled(number, 1))
    for padded, array in zip(worker.padded, [*arrays(0), *arrays(1)], strict=True):
        assert padded.dtype == array.dtype
        assert padded.ctypes.data % ALIGNED == 0
        assert padded.nbytes == array.bytes + ALIGNED
        padded[array.size :] = 9
    assert [stored(each) for each in ps] == [all_of(number, 1) for number in range(2)]


def test_a_worker_reads_the_values_of_the_parameters_alone(ps, worker):
    ps[0].publish(filled(0, 3))
    worker.acquire(0, counts=False)
    numbers, values = worker.release(0)
    assert numbers == [0, 0]
    assert [(each.dtype, each.tolist()) for each in values] == [
        (array.dtype, [3] * array.size) for array in LAYOUT.values[0]
    ]
    assert all(each.ctypes.data % ALIGNED == 0 for each in values)


def test_values_stay_until_the_call_after_the_next_one(ps, worker):
    ps[0].publish(filled(0, 0))
    found = [update(worker, 0)[2] for _ in range(3)]
    assert [values[0][0] for values in found] == [3, 2, 3]
    update(worker, 1)
    assert found[2][0][0] == 3  # another ps's are elsewhere
    assert found[1][0][0] == 2


def test_an_update_that_is_not_counted_is_a_look(ps, worker):
    ps[0].begin(3)
    assert worker.acquire(0, counts=False) == 3
    assert worker.release(0)[0] == [3, 0]
    assert count_of(ps[0]) == 3


def test_counts_need_more_than_32_bits(ps, worker):
    ps[0].begin(1 << 40)
    assert update(worker, 0)[:2] == (1 << 40, [(1 << 40) + 1, 0])
    assert ps[0].read(filled(0, 1))[0] == (1 << 40) + 1


def test_workers_are_told_to_stop_until_the_next_run(ps, worker):
    ps[0].begin(0)
    ps[0].stop()
    assert update(worker, 0)[1] == [1, 1]
    ps[0].begin(1)
    assert update(worker, 0)[1] == [2, 0]


def test_values_are_published_once(ps, worker):
    values = filled(0, 1)
    ps[0].publish(values)
    worker.acquire(0, counts=True)  # a value that was published needs no lock
    ps[0].publish(values)
    own_places(worker, 0)[1][0] = 4
    worker.release(0)
    assigned = np.full(17, 8, np.float32)
    ps[0].publish([assigned, *values[1:]])
    assigned[:] = 9  # the memory has a copy
    assert [set(each) for each in stored(ps[0])] == [{8}, {4}, set(), {1}, {1}, {1}]


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5])
def test_each_variable_is_published_when_it_alone_was_assigned(ps, index):
    values = filled(0, 1)
    ps[0].publish(values)
    values[index] = filled(0, 2)[index]
    ps[0].publish(values)
    expected = all_of(0, 1)
    expected[index] = all_of(0, 2)[index]
    assert stored(ps[0]) == expected


def test_a_value_of_another_variable_is_published(ps):
    """Variables share a value when one is assigned to the other."""
    values = filled(0, 1)
    values[4][:] = 2
    ps[0].publish(values)
    values[0] = values[4]
    ps[0].publish(values)
    assert set(stored(ps[0])[0]) == {2}


def test_values_are_kept_until_others_take_their_place(ps):
    """One that was freed could have its place taken by one that is assigned then: that would not be published."""
    values = filled(0, 1)
    published = [weakref.ref(each) for each in values]
    ps[0].publish(values)
    del values
    assert all(each() is not None for each in published)
    _, copies = ps[0].read([each() for each in published])
    read = [weakref.ref(each) for each in copies]
    del copies
    assert all(each() is None for each in published)
    assert all(each() is not None for each in read)
    ps[0].publish(filled(0, 2))
    assert all(each() is None for each in read)


def test_what_was_read_does_not_change_with_updates_nor_changes_the_memory(ps, worker):
    values = filled(0, 1)
    ps[0].publish(values)
    _, first = ps[0].read(values)
    update(worker, 0)
    _, second = ps[0].read(first)
    update(worker, 0)
    assert [[each.tolist() for each in found] for found in (values, first, second)] == [
        all_of(0, 1),
        all_of(0, 1),
        all_of(0, 2),
    ]
    for each in second:
        each[:] = 9
    assert stored(ps[0]) == all_of(0, 3)


def test_copies_are_aligned_so_that_variables_take_them_as_they_are(ps):
    _, copies = ps[0].read(filled(0, 1))
    assert all(each.ctypes.data % ALIGNED == 0 for each in copies if each.size)


def test_a_value_that_was_assigned_in_a_run_is_read_and_the_others_have_the_updates(ps, worker):
    values = filled(0, 1)
    ps[0].publish(values)
    update(worker, 0)
    _, copies = ps[0].read([values[0], np.full(1, 7, np.float64), *values[2:]])
    assert [set(each.tolist()) for each in copies] == [{2}, {7}, set(), {2}, {2}, {2}]
    update(worker, 0)
    _, copies = ps[0].read(copies)
    assert [set(each.tolist()) for each in copies] == [{3}, {8}, set(), {3}, {3}, {3}]


def test_what_was_read_is_not_published_but_what_there_was_before_is(ps, worker):
    values = filled(0, 1)
    ps[0].publish(values)
    update(worker, 0)
    _, copies = ps[0].read(values)
    worker.acquire(0, counts=True)
    own_places(worker, 0)[0][:17] = 5
    ps[0].publish(copies)  # needs no lock
    worker.release(0)
    ps[0].publish([*copies[:-1], values[-1]])
    assert [set(each) for each in stored(ps[0])] == [{5}, {2}, set(), {2}, {2}, {1}]


def test_a_read_counts_the_updates_that_it_has(ps, worker, monkeypatch):
    values = filled(0, 0)
    ps[0].publish(values)
    ps[0].begin(0)
    update(worker, 0)
    original = ps[0]._own_side.release

    def release():
        original()
        update(worker, 0)  # another one comes at once

    monkeypatch.setattr(ps[0]._own_side, "release", release)
    count, copies = ps[0].read(values)
    assert (count, copies[0][0], count_of(ps[0])) == (1, 1, 2)


@pytest.mark.parametrize("call", ["publish", "read"])
def test_values_that_could_not_be_published_are_published_later(ps, worker, monkeypatch, call):
    values = filled(0, 3)
    with monkeypatch.context() as patched:
        patched.setattr(ps[0]._own_side, "acquire", lambda _: refuse(0, 0))
        with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
            getattr(ps[0], call)(values)
        assert raised.value.errno == errno.EMFILE
    getattr(ps[0], call)(values)
    assert stored(ps[0]) == all_of(0, 3)


def test_the_lock_is_released_after_values_that_do_not_fit(ps, worker):
    with pytest.raises(ValueError):  # noqa: PT011 it is NumPy's
        ps[0].publish([np.zeros(16, np.float32), *filled(0, 1)[1:]])
    assert worker._ps[0].lock.acquire(0)


def test_values_of_any_shape_are_published_and_read(ps):
    shaped = [np.reshape(each, [1, -1]) for each in filled(0, 6)]
    shaped[1] = shaped[1].reshape([])
    ps[0].publish(shaped)
    assert stored(ps[0]) == all_of(0, 6)
    assert [each.shape for each in ps[0].read(shaped)[1]] == [(array.size,) for array in arrays(0)]


def test_an_empty_value_is_nowhere_and_does_not_need_the_lock(ps, worker):
    values = filled(0, 1)
    ps[0].publish(values)
    worker.acquire(0, counts=True)
    values[2] = np.zeros(0, np.float32)
    ps[0].publish(values)
    worker.release(0)


def test_values_are_published_though_the_process_that_held_the_lock_was_killed(ps, impatient):
    with holder_of(ps[0]) as other:
        other.do("acquire")
        with ThreadPoolExecutor(1) as pool:
            published = pool.submit(ps[0].publish, filled(0, 2))
            other.kill()
            published.result()
    assert stored(ps[0]) == all_of(0, 2)


def test_a_worker_goes_on_when_the_ps_has_found_that_the_holder_was_killed_or_stopped(ps, worker, impatient):
    with holder_of(ps[0]) as killed, holder_of(ps[0]) as stopped, ThreadPoolExecutor(2) as pool:
        waits = pool.submit(ps[0].wait)
        for other, loses in ((killed, killed.kill), (stopped, stopped.stop)):
            other.do("acquire")
            acquired = pool.submit(worker.acquire, 0, counts=True)
            loses()
            assert acquired.result() in (0, 1)
            worker.release(0)
        stopped.go_on()
        stopped.do("release")
        assert worker.acquire(0, counts=True) == 2
        assert not new_worker(ps)._ps[0].lock.acquire(0)
        worker.release(0)
        ps[0].end()
        waits.result()


def test_no_update_of_many_threads_is_lost(ps):
    def work():
        own = new_worker(ps)
        return [update(own, number)[0] for _ in range(100) for number in range(2)]

    ps[0].publish(filled(0, 0))
    with ThreadPoolExecutor(4) as pool:
        found = [each.result() for each in [pool.submit(work) for _ in range(4)]]
    assert [count_of(each) for each in ps] == [400, 400]
    assert [set(each) for each in stored(ps[0])[:2]] == [{400}] * 2  # those of few bits do not have this number
    assert sorted(before for each in found for before in each[::2]) == list(range(400))


def test_a_ps_waits_until_the_end_of_each_run(ps):
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ps[0].wait)
        ps[0].end()
        waits.result()
        ps[0].end()  # before it waits
        pool.submit(ps[0].wait).result()
        waits = pool.submit(ps[0].wait)
        assert not ps[0].is_closed
        ps[0].end()
        waits.result()


@pytest.mark.parametrize("waits", [False, True])
def test_a_ps_that_is_closed_waits_no_more_and_leaves_nothing_open(monkeypatch, waits):
    before = opened()
    ps = PsParameters(0, LAYOUT)
    receives = begun(monkeypatch, ps._pipe, "receive")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(ps.wait) if waits else None
        assert not waits or receives.wait(60)
        for each in [pool.submit(ps.close) for _ in range(2)]:
            each.result()
        if waiting:
            waiting.result()
    assert ps.is_closed
    ps.wait()
    ps.end()
    ps.close()
    monkeypatch.undo()
    del ps
    assert not opened() - before


def test_what_a_thread_waits_in_is_not_another_file_after_a_close_by_another_one(ps, monkeypatch):
    """The descriptors of a closed pipe are used again: then it would take what is in another file."""
    received = []

    def receive(seconds):
        ps[0].close()
        received.append(os.fstat(ps[0]._pipe._descriptor).st_ino == int(ps[0]._content.numbers[1]))
        return original(seconds)

    original = ps[0]._pipe.receive
    monkeypatch.setattr(ps[0]._pipe, "receive", receive)
    ps[0].wait()
    assert received == [True]
    with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
        os.fstat(ps[0]._pipe._descriptor)
    assert raised.value.errno == errno.EBADF


@pytest.mark.parametrize("waits", [False, True])
def test_a_closed_ps_is_read_and_needs_no_lock(ps, worker, monkeypatch, waits):
    """Also while it still waits, which keeps its descriptors open."""
    values = filled(0, 1)
    ps[0].publish(values)
    update(worker, 0)
    worker.acquire(0, counts=True)  # and does not release it
    found = []

    def close_and_read():
        ps[0].close()
        found.append(ps[0].read([np.full(17, 7, np.float32), *values[1:]]))

    def receive(seconds):
        close_and_read()
        return original(seconds)

    original = ps[0]._pipe.receive
    monkeypatch.setattr(ps[0]._pipe, "receive", receive)
    if waits:
        ps[0].wait()
    else:
        close_and_read()
    ((count, copies),) = found
    assert count == 2
    assert [set(each.tolist()) for each in copies] == [{7}, {2}, set(), {2}, {2}, {2}]
    ps[0].publish(filled(0, 4))
    assert ps[0].read(filled(0, 4))[1][1] == 4


def test_a_ps_that_is_closed_finishes_what_it_publishes(ps, impatient, monkeypatch):
    acquires = begun(monkeypatch, ps[0]._own_side, "acquire")
    with holder_of(ps[0]) as other, ThreadPoolExecutor(2) as pool:
        other.do("acquire")
        published = pool.submit(ps[0].publish, filled(0, 2))
        assert acquires.wait(60)
        closed = pool.submit(ps[0].close)
        other.do("release")
        published.result()
        closed.result()
    assert stored(ps[0]) == all_of(0, 2)
    assert ps[0].is_closed


@pytest.mark.parametrize("call", ["publish", "read"])
def test_a_ps_that_waits_for_a_lock_that_nobody_releases_can_be_closed(ps, worker, impatient, monkeypatch, call):
    """A function of a worker that fails within its update leaves the lock, and its process goes on."""
    worker.acquire(0, counts=True)
    looks = begun(monkeypatch, ps[0]._lock, "look")
    with ThreadPoolExecutor(2) as pool:
        calls = pool.submit(getattr(ps[0], call), filled(0, 2))
        try:
            assert looks.wait(30)
            pool.submit(ps[0].close).result(30)
            calls.result(30)
        finally:
            worker.release(0)
    assert ps[0].is_closed
    assert stored(ps[0]) == all_of(0, 2)


@pytest.mark.parametrize("ended", [0, 1])
def test_workers_that_wait_find_that_a_ps_is_closed(ps, impatient, ended):
    holds, *others = [new_worker(ps) for _ in range(4)]
    holds.acquire(0, counts=True)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(each.acquire, 0, counts=True) for each in others]
        ps[ended].close()
        for each in waiting:
            with pytest.raises(UpdatesEnded):
                each.result()
    holds.release(0)
    assert all(each.is_over for each in others)
    assert count_of(ps[0]) == 1


def test_a_worker_that_finds_the_end_when_it_has_the_lock_releases_it(ps, worker):
    """Otherwise all others would wait until they look, one after another."""
    others = [new_worker(ps) for _ in range(3)]
    ps[0].close()
    for each in (worker, *others):
        with pytest.raises(UpdatesEnded):
            each.acquire(0, counts=True)
    assert worker._ps[0].lock.acquire(0)


def test_a_worker_that_others_find_ended_while_it_waits_releases_the_lock(ps, worker):
    lock = worker._ps[0].lock

    def acquire(seconds):
        assert original(seconds)
        ps[1].close()
        return worker.has_ended()

    original, lock.acquire = lock.acquire, acquire
    with pytest.raises(UpdatesEnded):
        worker.acquire(0, counts=True)
    assert original(0)
    assert count_of(ps[0]) == 0


def test_a_worker_that_holds_the_lock_may_finish_its_update_after_the_end(ps, worker):
    worker.acquire(0, counts=True)
    for each in ps:
        each.close()
    assert worker.has_ended()
    assert worker.release(0)[0] == [1, 0]
    with pytest.raises(UpdatesEnded):
        worker.acquire(0, counts=True)


def test_a_worker_that_comes_after_the_end_makes_no_update(ps):
    ps[1].close()
    late = new_worker(ps)
    assert late.is_over
    with pytest.raises(UpdatesEnded):
        late.acquire(0, counts=True)
    with pytest.raises(UpdatesEnded):
        late.padded  # noqa: B018 it raises
    assert late.has_ended()
    assert count_of(ps[0]) == 0


def test_a_ps_that_goes_on_has_not_ended(ps, worker):
    assert not worker.has_ended()
    assert not worker.is_over


def test_a_worker_that_waits_when_all_forget_it_keeps_its_descriptors(ps, impatient):
    holds = new_worker(ps)
    holds.acquire(0, counts=True)
    before = opened()
    with ThreadPoolExecutor(1) as pool:
        worker = new_worker(ps)
        waiting = pool.submit(worker.acquire, 0, counts=True)
        del worker
        holds.release(0)
        assert waiting.result() == 1
    del waiting
    assert not opened() - before


def test_values_that_are_not_in_the_memory_are_an_error(ps, worker):
    places = [padded[: array.size] for padded, array in zip(worker.padded, [*arrays(0), *arrays(1)], strict=True)]
    worker.check_places(places)
    places[2] = np.zeros(0, np.float32)  # as TensorFlow returns one without values
    worker.check_places(places)
    for number in (0, len(places) - 1):
        moved = [*places]
        moved[number] = places[number].copy()
        with pytest.raises(RuntimeError):
            worker.check_places(moved)
    with pytest.raises(RuntimeError):
        worker.check_places([places[1], places[0], *places[2:]])


def test_memory_that_is_not_gone_but_cannot_be_opened_is_an_error(ps, monkeypatch):
    before = opened()
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_opened", refuse)
        with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
            new_worker(ps)
        assert raised.value.errno == errno.EMFILE
        del raised
    assert not opened() - before


def test_a_pipe_that_cannot_be_opened_leaves_nothing_open(ps, monkeypatch):
    before = opened()
    with monkeypatch.context() as patched:
        patched.setattr(parameters, "PipeTo", refuse)
        with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
            new_worker(ps)
        assert raised.value.errno == errno.EMFILE
        del raised
    assert not opened() - before


def test_nothing_is_left_open():
    before = opened()
    for _ in range(3):
        ps = [PsParameters(number, LAYOUT) for number in range(2)]
        worker = new_worker(ps)
        update(worker, 0)
        ps[0].publish(filled(0, 1))
        for each in ps:
            each.close()
        assert worker.has_ended()
        late = new_worker(ps)
        del each, ps, worker, late
    assert not opened() - before


def test_a_ps_may_have_no_variables():
    layout = Layout([[Array(FLOATS, 1)], []], [[], []])
    ps = [PsParameters(number, layout) for number in range(2)]
    worker = WorkerParameters(layout, [each.identity for each in ps])
    ps[1].publish([])
    assert worker.acquire(1, counts=True) == 0
    assert worker.release(1) == ([1, 0], [])
    assert ps[1].read([]) == (1, [])
    for each in ps:
        each.close()


@pytest.mark.slow
def test_a_worker_updates_the_memory_of_another_process_until_that_is_killed(impatient):
    layout = Layout([[Array(FLOATS, 4)]], [[]])
    with subprocess.Popen([sys.executable, "-c", ANOTHER_PS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        identity = other.stdout.read(IDENTITY_BYTES)
        before = opened()
        worker, waits = (WorkerParameters(layout, [identity]) for _ in range(2))
        assert worker.acquire(0, counts=True) == 5
        worker.padded[0][:4] *= 2
        numbers, values = worker.release(0)
        assert (numbers, values[0].tolist()) == ([6, 0], [0, 2, 4, 6])
        other.stdin.write(b"\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"[0.0, 2.0, 4.0, 6.0] 6\n"
        assert not worker.has_ended()
        worker.acquire(0, counts=True)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(waits.acquire, 0, counts=True)
            other.kill()
            with pytest.raises(UpdatesEnded):
                waiting.result()
        worker.release(0)
        other.wait()
        with pytest.raises(UpdatesEnded):  # at once, though the lock is free
            worker.acquire(0, counts=True)
        assert WorkerParameters(layout, [identity]).is_over
        del worker, waits, waiting
    assert not opened() - before
