"""Operations let workers and ps make exchanges; this process is both."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory import exchange_operations
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.exchange_operations import Exchanges
from tfdist_cli.train.cluster.shared_memory.exchanges import Wanted
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import is_not_answered

TYPES = [np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float32", "bfloat16")]
LAYOUT = Layout(
    values=[[Array(dtype, 3) for dtype in TYPES], [Array(TYPES[0], 2)]],
    gradients=[[Array(TYPES[0], 4)], [Array(TYPES[1], 1)]],
    report=Array(np.dtype(np.float64), 1),
)
RATE = tf.constant([0.25], tf.float64)


@pytest.fixture
def exchanges():
    exchange_operations.register()
    found = Exchanges(["CPU:0", "CPU:0"], LAYOUT)
    yield found
    found.close()
    exchange_operations._process._drop_ended()


def serve(exchanges, number):
    """A ps adds the numbers of gradients up, shows the sum, and counts the updates, until the end; returns the sum."""
    total, count = 0.0, 0
    while True:
        wanted, report, gradients = exchanges.take(number)
        if int(wanted) == Wanted.NOTHING:
            return total
        update = bool(int(wanted) & Wanted.UPDATE)
        total += update * float(gradients[0][0]) * float(report[0])
        shown = [tf.fill([array.size], tf.cast(total, array.dtype)) for array in LAYOUT.values[number]]
        exchanges.answer(number, tf.constant([count, count + update, 0], tf.int64), shown)
        count += update


def sent(number):
    return [tf.fill([array.size], tf.cast(number, array.dtype)) for own in LAYOUT.gradients for array in own]


def test_workers_and_ps_exchange_what_they_have(exchanges):
    @tf.function(autograph=False)
    def work():
        number = exchanges.borrow()
        first, values = exchanges.await_answer(exchanges.request(number, Wanted.VALUES, RATE, []))
        with tf.control_dependencies([first, *values]):
            both = exchanges.request(number, Wanted.UPDATE | Wanted.VALUES, RATE, sent(8))
        second, after = exchanges.await_answer(both)
        with tf.control_dependencies([second]):
            exchanges.give_back(number)
        return first, second, [tf.identity(each) for each in values], [tf.identity(each) for each in after]

    with ThreadPoolExecutor(2) as pool:
        serving = [pool.submit(serve, exchanges, number) for number in range(2)]
        first, second, values, after = work()
        exchanges.end()
        totals = [each.result() for each in serving]
    assert [first.numpy().tolist(), second.numpy().tolist()] == [[0, 0, 0], [0, 1, 0]]
    assert [each.numpy().tolist() for each in values] == [[0] * 3, [0] * 3, [0] * 2]
    assert [each.numpy().tolist() for each in after] == [[2] * 3, [2] * 3, [2] * 2]
    assert totals == [2, 2]


def test_an_exchange_that_was_given_back_is_used_again(exchanges):
    borrowed = [int(exchanges.borrow()) for _ in range(2)]
    found = [exchange_operations._process._of_worker[number][1] for number in borrowed]
    assert found[0] is not found[1]
    exchanges.give_back(tf.constant(borrowed[1], tf.int64))
    again = int(exchanges.borrow())
    assert exchange_operations._process._of_worker[again][1] is found[1]
    for number in (borrowed[0], again):
        exchanges.give_back(tf.constant(number, tf.int64))


def test_those_of_another_training_are_others(exchanges):
    first = exchanges.borrow()
    exchanges.give_back(first)
    other = Exchanges(["CPU:0", "CPU:0"], LAYOUT)
    number = int(other.borrow())
    _, exchange = exchange_operations._process._of_worker[number]
    (free,) = [each for each in exchange_operations._process._free.values() if each]
    assert len(free) == 1
    assert exchange not in free
    other.give_back(tf.constant(number, tf.int64))
    other.close()


def test_a_worker_that_waits_fails_when_all_are_aborted(exchanges):
    number = exchanges.borrow()
    exchanges.request(number, Wanted.VALUES, RATE, [])
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(exchanges.await_answer, number)
        exchanges.abort()
        for ps in range(2):
            while int(exchanges.take(ps)[0]):
                pass
        with pytest.raises(tf.errors.UnknownError) as raised:
            waiting.result()
    assert is_not_answered(raised.value)
    exchanges.abort()  # again


def test_what_a_failed_function_had_borrowed_is_dropped_after_the_end(exchanges):
    number = exchanges.borrow()
    exchanges.request(number, Wanted.VALUES, RATE, [])
    exchanges.close()
    exchange_operations._process._drop_ended()
    assert not exchange_operations._process._of_worker
    with pytest.raises(tf.errors.UnknownError) as raised:  # a function of before that goes on
        exchanges.await_answer(number)
    assert is_not_answered(raised.value)
    exchanges.give_back(number)


def test_what_has_ended_is_dropped(exchanges):
    exchanges.give_back(exchanges.borrow())
    exchanges.close()
    process = exchange_operations._process
    process._drop_ended()
    assert not process._free
    Exchanges(["CPU:0"], Layout(LAYOUT.values[:1], LAYOUT.gradients[:1], LAYOUT.report))
    assert [each.is_closed for each in process._of_ps.values()] == [False]


def test_exchanges_that_nobody_uses_are_closed_when_others_are_opened(exchanges):
    unused = Exchanges(["CPU:0"], Layout(LAYOUT.values[:1], LAYOUT.gradients[:1], LAYOUT.report))
    of_ps = exchange_operations._process._of_ps[unused._ps[0].tobytes()]
    del unused
    gc.collect()
    before = of_ps.is_closed
    exchange_operations.close_unused()
    assert (before, of_ps.is_closed) == (False, True)
    assert not any(each.is_closed for each in exchange_operations._process._of_ps.values() if each is not of_ps)
