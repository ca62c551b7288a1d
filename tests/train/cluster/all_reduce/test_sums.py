"""Tasks that sum up over connections of their own come to the same sums, or say what keeps them from it."""

import errno
import gc
import os
import re
import socket
import struct
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TaskLost, TrainingError
from tfdist_cli.train.cluster.all_reduce import sums as module
from tfdist_cli.train.cluster.all_reduce.memory import Reused
from tfdist_cli.train.cluster.all_reduce.sums import AllReduce
from tfdist_cli.train.cluster.shared_memory.memory import OthersMemory, OwnMemory

LONG = 60.0


@pytest.fixture(params=["messages", "shared memory"])
def connected(request, monkeypatch):
    """Makes the connected of so many tasks, connected with one another; messages of any size are in shared memory."""
    made = []
    monkeypatch.setattr(module, "_SHARED_BYTES", 0)

    def make(count, answers=lambda place: True):
        links = [{} for _ in range(count)]
        for first in range(count):
            for second in range(first):
                links[first][second], links[second][first] = socket.socketpair()
        names = [f"worker:{index}" for index in range(count)]
        made.extend(AllReduce(index, names, own, answers) for index, own in enumerate(links))
        if request.param == "shared memory":
            together([task.share_memory for task in made])
            assert all(set(task._shared) == set(task._links) for task in made)
        return made

    yield make
    for task in made:
        task.close()


def together(calls):
    """What calls come to that wait for one another."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        return [one.result(LONG) for one in running]


def sums(made, values):
    """Each task's sum, and all of them the same to the bit."""
    found = together([lambda task=task, value=value: task.sum(value) for task, value in zip(made, values, strict=True)])
    arrays = [value.numpy() for value in found]
    assert len({array.tobytes() for array in arrays}) == 1
    return arrays[0]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 7), (1000, 33), (0,)])
def test_each_task_has_the_sum_of_all(count, shape, connected):
    own = [np.arange(np.prod(shape, dtype=int)).reshape(shape) * 10.0**place for place in range(count)]
    total = sums(connected(count), [tf.constant(value, tf.float64) for value in own])
    assert total.shape == shape
    np.testing.assert_array_equal(total, np.sum(own, axis=0))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int64, tf.int32])
def test_of_every_type(dtype, connected):
    own = [tf.cast(tf.range(40) * place, dtype) for place in (1, 2, 3)]
    total = sums(connected(3), own)
    assert total.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(total.astype(np.float64), np.arange(40.0) * 6)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_a_narrow_type_is_rounded_once_however_many_tasks_there_are(dtype, connected):
    random = np.random.default_rng(0)
    own = [tf.cast(random.normal(size=500), dtype) for _ in range(5)]
    exact = np.sum([value.numpy().astype(np.float32) for value in own], axis=0)
    np.testing.assert_array_equal(sums(connected(5), own), exact.astype(dtype.as_numpy_dtype))


@pytest.mark.parametrize(
    ("count", "within"),
    [(2, False), (2, True), (3, False)],  # functions of three tasks wait in three of TensorFlow's threads: it has two
    ids=["eagerly", "in a function", "of three"],
)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.int64])
def test_several_tensors_cross_together(count, dtype, within, connected):
    made = connected(count)
    shapes = [(5, 7), (), (0, 3), (11,)]
    own = [
        [tf.cast(tf.random.stateless_uniform(shape, [rank, n]) * 100, dtype) for n, shape in enumerate(shapes)]
        for rank in range(count)
    ]
    calls = [tf.function(task.sums, autograph=False) if within else task.sums for task in made]
    found = together([partial(call, values) for call, values in zip(calls, own, strict=True)])
    exchanges = {task._exchanges for task in made}
    assert len(exchanges) == 1
    for totals in found:
        for n, total in enumerate(totals):
            assert total.dtype == dtype
            assert total.shape == shapes[n]
            exact = np.sum([values[n].numpy().astype(np.float32) for values in own], axis=0, dtype=np.float32)
            np.testing.assert_array_equal(total, exact.astype(dtype.as_numpy_dtype))


def test_more_tensors_than_the_system_sends_in_one_call_cross_together(connected, monkeypatch):
    monkeypatch.setattr(module, "_SHARED_BYTES", 1 << 16)
    count = os.sysconf("SC_IOV_MAX") + 1
    own = [[np.full(2, float(n + place)) for n in range(count)] for place in (1, 2)]
    made = connected(2)
    for totals in together([partial(task._add, *arrays) for task, arrays in zip(made, own, strict=True)]):
        np.testing.assert_array_equal(totals, [[2.0 * n + 3] * 2 for n in range(count)])


def test_a_closed_task_is_kept_by_nothing(connected):
    made = connected(2)
    together([partial(task.sum, tf.ones([2])) for task in made])
    left = [weakref.ref(task) for task in made]
    while made:
        made.pop().close()
    gc.collect()
    assert not [task for task in left if task()]


@pytest.mark.slow
def test_more_than_connections_hold_crosses_both_ways_at_once(connected):
    own = [np.full(3_000_001, place, np.float32) for place in (1, 2, 4)]
    assert set(sums(connected(3), [tf.constant(value) for value in own])) == {7}


def test_one_sum_follows_the_other_though_a_task_is_ahead(connected):
    made = connected(3)

    def many(task):
        return [float(task.sum(tf.fill([5], float(number)))[0]) for number in range(50)]

    assert together([lambda task=task: many(task) for task in made]) == [[3.0 * number for number in range(50)]] * 3


def test_in_a_function_sums_are_taken_in_the_programs_order(connected):
    """What comes to be run first otherwise is up to TensorFlow, and not the same on all tasks."""
    made = connected(2)

    @tf.function(autograph=False)
    def ours(value):
        early, late = made[0].sum(value), made[0].sum(tf.ones([2]))
        return late, early

    def theirs():
        return [made[1].sum(tf.fill([3], 2.0)), made[1].sum(tf.ones([2]))]

    (late, early), others = together([lambda: ours(tf.ones([3])), theirs])
    assert list(early.numpy()) == list(others[0].numpy()) == [3] * 3
    assert list(late.numpy()) == list(others[1].numpy()) == [2] * 2


def test_memory_is_used_again_once_no_tensor_has_it(connected):
    """A sum that is kept stays what it is."""
    made = connected(2)
    functions = [tf.function(task.sum, autograph=False) for task in made]
    steps = [[tf.fill([1000], float(step)) for step in range(12)] for _ in made]

    def every_fifth(number):
        return [
            total for step, value in enumerate(steps[number]) for total in [functions[number](value)] if not step % 5
        ]

    kept = together([partial(every_fifth, number) for number in range(len(made))])
    for sums in kept:
        assert [set(each.numpy()) for each in sums] == [{0.0}, {10.0}, {20.0}]
    sizes = {4000, 63 * 64}  # what is received in a message, and the aligned sum
    for task in made:
        counts = {size: len(owners) for size, owners in task._memory._owners.items()}
        assert counts.keys() <= sizes
        assert max(counts.values()) <= 5


def test_memory_of_an_array_that_is_in_use_is_left_alone():
    memory = Reused()
    first = memory.empty(100, np.dtype(np.float32))
    second = memory.empty(100, np.dtype(np.float32))
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    assert not np.shares_memory(first, second)
    part, address = first[50:], first.ctypes.data
    del first
    assert memory.empty(100, np.dtype(np.float32)).ctypes.data != address
    del part
    assert memory.empty(100, np.dtype(np.int32)).ctypes.data == address


def test_a_task_that_is_gone_is_named_and_stays_gone(connected):
    first, second = connected(2)
    second.close()
    for _ in range(2):
        with raises(TaskLost, "task-lost") as raised:
            first.sum(tf.ones([4]))
        assert raised.value.message.startswith("worker:1 ")
        assert "worker:1" in str(raised.value.hint)


def test_a_task_that_goes_while_it_is_waited_for_is_named(connected):
    first, second, third = connected(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(task.sum, tf.ones([9])) for task in (first, second)]
        third.close()
        for one in waiting:
            with pytest.raises(TaskLost, match=r"(?m)^worker:2 "):
                one.result(LONG)


def test_a_functions_error_is_told_as_what_it_was(connected):
    first, second = connected(2)
    second.close()
    function = tf.function(first.sum, autograph=False)
    with pytest.raises(TaskLost, match="worker:1"), first.errors_translated():
        function(tf.ones([4]))


def test_other_errors_stay_what_they_are(connected):
    first, _ = connected(2)
    for error in (tf.errors.UnknownError(None, None, "unknown"), ValueError("wrong")):
        with pytest.raises(type(error)), first.errors_translated():
            raise error


def test_tasks_that_sum_up_different_things_are_told_so(connected):
    first, second = connected(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.sum, tf.ones([8]))
        with raises(TrainingError, "sums-differ") as raised:
            second.sum(tf.ones([4]))
        assert re.findall(r"worker:\d|\d+ bytes", raised.value.message) == ["worker:0", "32 bytes", "16 bytes"]
        with raises(TrainingError, "sums-differ") as raised:
            waiting.result(LONG)
        assert re.findall(r"worker:\d|\d+ bytes", raised.value.message) == ["worker:1", "16 bytes", "32 bytes"]


def gathered(made, rows):
    """What each task gathers, the same to the bit: the numbers, and the rows."""
    calls = [partial(task.gather, *map(tf.constant, own)) for task, own in zip(made, rows, strict=True)]
    found = [[tensor.numpy() for tensor in one] for one in together(calls)]
    assert len({(numbers.tobytes(), values.tobytes()) for numbers, values in found}) == 1
    return found[0]


@pytest.mark.parametrize("sizes", [(3, 5), (0, 4), (0, 0), (2, 0, 7), (9000, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_each_task_has_the_rows_of_all_by_rank(sizes, dtype, connected):
    random = np.random.default_rng(0)
    own = [
        (random.integers(0, 2**31, size).astype(np.int32), random.normal(size=(size, 5)).astype(dtype))
        for size in sizes
    ]
    numbers, values = gathered(connected(len(sizes)), own)
    np.testing.assert_array_equal(numbers, np.concatenate([each for each, _ in own]))
    np.testing.assert_array_equal(values, np.concatenate([rows for _, rows in own]))
    assert (numbers.dtype, values.dtype) == (np.int32, dtype)


def test_rows_of_bfloat16_numbered_by_int64(connected):
    rows = tf.cast([[1.5, 2.0]], tf.bfloat16).numpy()
    numbers, values = gathered(connected(2), [(np.array([2**40]), rows)] * 2)
    assert numbers.tolist() == [2**40] * 2
    assert values.astype(np.float32).tolist() == [[1.5, 2.0]] * 2


def test_in_a_function_sums_and_rows_take_turns(connected):
    made = connected(2)

    def both(task, rows):
        first = task.sum(tf.ones([3]))
        numbers, values = task.gather(tf.range(rows), tf.fill([rows, 2], 1.0))
        return first, numbers, values, task.sum(tf.ones([1]))

    (first, numbers, values, last), _ = together(
        [
            partial(tf.function(partial(both, made[0]), autograph=False), tf.constant(2)),
            partial(both, made[1], tf.constant(1)),
        ]
    )
    assert (first.numpy().tolist(), last.numpy().tolist()) == ([2, 2, 2], [2])
    assert numbers.numpy().tolist() == [0, 1, 0]
    assert values.shape == (3, 2)


@pytest.mark.parametrize(
    ("other", "described"),
    [
        (lambda task: task.sum(tf.ones([4])), "16 bytes"),
        (lambda task: task.gather(tf.range(1), tf.ones([1, 2])), "1 rows of 12 bytes"),
    ],
)
def test_a_task_that_gathers_other_rows_is_told_so(other, described, connected):
    first, second = connected(2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(other, first)
        with raises(TrainingError, "sums-differ") as raised:
            second.gather(tf.range(2), tf.ones([2, 1]))
        assert f"worker:0 sends {described} " in raised.value.message
        assert "rows of 8 bytes" in raised.value.message
        with raises(TrainingError, "sums-differ"):
            waiting.result(LONG)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, which nothing but the test lets pass: `clock.now`."""
    passing = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "_PROBE_AFTER", 0.01)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: passing.now))
    return passing


def test_a_task_that_does_not_answer_is_given_up(connected, clock):
    """Its connection stays, as that of a process that is stopped."""

    def answers(place):
        clock.now += 1
        return place != 2

    first, _, _ = connected(3, answers)
    with pytest.raises(TaskLost, match=r"(?m)^worker:2 .*: no answer for 10 s$"):
        first.sum(tf.ones([4]))


def test_a_task_that_answers_may_take_its_time(connected, clock):
    """One that compiles, or saves; and one that had not answered for a while."""
    asked = []

    def answers(place):
        asked.append(place)
        clock.now += 2
        return len(asked) % 5 == 0

    first, second = connected(2, answers)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.sum, tf.ones([4]))
        while len(asked) < 40:
            assert not waiting.done()
        second.sum(tf.ones([4]))
        assert waiting.result(LONG)[0] == 2


def test_a_silence_that_is_over_does_not_count(connected, clock):
    """A task was stopped for a moment, and much later once more."""
    heard = threading.Event()

    def answers(_):
        heard.set()
        return False

    first, second = connected(2, answers)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            heard.clear()
            waiting = pool.submit(first.sum, tf.ones([4]))
            assert heard.wait(LONG)
            second.sum(tf.ones([4]))
            waiting.result(LONG)
            clock.now += 1000


def test_bytes_come_in_pieces_of_any_size(connected):
    """A message's head in two pieces, the rest of it one byte at a time."""
    ours, theirs = socket.socketpair()
    task = AllReduce(0, ["worker:0", "worker:1"], {1: ours}, lambda place: True)
    with theirs, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(task.sum, tf.constant([1, 2, 3], tf.int32))
        body = np.array([10, 20, 30], np.int32).tobytes()
        for byte in struct.pack("<QQqqQ", 0, len(body), -1, -1, 0) + body:
            theirs.sendall(bytes([byte]))
        np.testing.assert_array_equal(waiting.result(LONG), [11, 22, 33])
    task.close()


@pytest.mark.parametrize("connected", ["shared memory"], indirect=True)
def test_small_messages_cross_the_connection(connected, monkeypatch):
    made = connected(3)
    monkeypatch.setattr(module, "_SHARED_BYTES", 4000)
    written = []

    def recorded(write, *given):
        written.append(given)
        return write(*given)

    for task in made:
        monkeypatch.setattr(task._own_memory, "write", partial(recorded, task._own_memory.write))
    assert set(sums(made, [tf.ones([2000])] * 3)) == {3}
    assert not written
    assert set(sums(made, [tf.ones([4000])] * 3)) == {3}
    assert len(written) == 6


@pytest.mark.parametrize("connected", ["messages"], indirect=True)
def test_a_system_without_such_memory_gets_messages(connected, monkeypatch):
    made, owned = connected(3), iter([None, OwnMemory(), OwnMemory()])
    monkeypatch.setattr(OwnMemory, "if_supported", lambda: next(owned))
    together([task.share_memory for task in made])
    assert sorted(len(task._shared) for task in made) == [0, 1, 1]
    assert set(sums(made, [tf.ones([70_000])] * 3)) == {3}


@pytest.mark.parametrize("connected", ["messages"], indirect=True)
def test_tasks_of_which_one_cannot_read_the_others_memory_get_messages(connected, monkeypatch):
    """Such as one of root and one of another user."""
    made, opened = connected(2), OthersMemory.opened
    refused = iter([True, False])
    monkeypatch.setattr(OthersMemory, "opened", lambda identity: None if next(refused) else opened(identity))
    together([task.share_memory for task in made])
    assert [task._shared for task in made] == [{}, {}]
    assert [task._own_memory for task in made] == [None, None]
    assert set(sums(made, [tf.ones([70_000])] * 2)) == {2}


@pytest.mark.parametrize("connected", ["shared memory"], indirect=True)
def test_messages_that_memory_has_no_room_for_follow_in_messages(connected, monkeypatch):
    made = connected(2)

    def no_memory(self, turn, messages):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(OwnMemory, "write", no_memory)
        assert sums(made, [tf.range(9000.0), tf.range(9000.0)])[-1] == 2 * 8999
    assert sums(made, [tf.range(9000.0), tf.range(9000.0)])[-1] == 2 * 8999


def test_a_place_in_memory_that_is_not_shared_is_refused():
    ours, theirs = socket.socketpair()
    task = AllReduce(0, ["worker:0", "worker:1"], {1: ours}, lambda place: True)
    with theirs:
        theirs.sendall(struct.pack("<QQqqQ", 0, 4, -1, 3, 0))
        with raises(TrainingError, "sums-differ"):
            task.sum(tf.constant([1, 2]))
    task.close()


@pytest.mark.parametrize("connected", ["shared memory"], indirect=True)
@pytest.mark.parametrize("lost", ["the memory", "all of it"])
def test_a_task_whose_memory_is_gone_is_lost(lost, connected):
    """It has ended after it had sent where its message is."""
    first, second = connected(2)
    second._own_memory.write(0, [[np.zeros(1 << 21, np.uint8)]])  # a region that the first task has not opened
    descriptor = second._own_memory._regions[-1].descriptor
    place = (descriptor, 0) if lost == "the memory" else (1 << 20, 0)
    second._own_memory.close()
    second._links[0].send(struct.pack("<QQqqQ", 2, 16, -1, *place))
    with raises(TaskLost, "task-lost"):
        first.sum(tf.ones([4]))


@pytest.mark.parametrize("connected", ["shared memory"], indirect=True)
def test_tasks_that_can_open_each_others_memory_share_it(connected):
    made = connected(3)
    assert [task.shares_memory for task in made] == [True] * 3
    del made[0]._shared[2]
    assert not made[0].shares_memory


@pytest.mark.parametrize("connected", ["messages"], indirect=True)
def test_others_share_none(connected):
    assert [task.shares_memory for task in connected(2)] == [False] * 2


def test_one_that_looks_at_the_others_sees_who_is_gone(connected):
    first, second, third = connected(3)
    for _ in range(3):
        first.look({}, lambda: True)
    third.close()
    for _ in range(2):
        with pytest.raises(TaskLost) as caught:
            first.look({}, lambda: True)
        assert "worker:2" in str(caught.value)
    with pytest.raises(TaskLost):  # it stays gone
        first.sum(tf.constant([1.0]))
    with pytest.raises(TaskLost):
        second.sum(tf.constant([1.0]))


def test_one_that_looks_at_the_others_sees_who_does_something_else(connected):
    first, second = connected(2)
    with ThreadPoolExecutor(1) as pool:
        summing = pool.submit(second.sum, tf.constant([1.0]))
        until, asked = time.monotonic() + LONG, []
        while not asked:  # it has begun a sum after what this one has waited for
            assert time.monotonic() < until
            first.look({}, lambda: bool(asked.append(True)))
        with raises(TrainingError, "sums-differ"):
            first.look({}, lambda: True)
        first.close()
        with pytest.raises(TaskLost):
            summing.result(LONG)


def test_one_that_looks_at_the_others_gives_up_who_does_not_answer(connected, clock):
    (first, _), unanswered = connected(2, lambda _: False), {}
    first.look(unanswered, lambda: True)
    clock.now += module.PATIENCE - 1
    first.look(unanswered, lambda: True)
    clock.now += 2
    with pytest.raises(TaskLost):
        first.look(unanswered, lambda: True)
