"""Workers and ps exchange gradients and values, also if workers are lost."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory import exchanges, memory
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.exchanges import NotAnswered, PsExchanges, Wanted, WorkerExchange
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES

FLOATS = np.dtype(np.float32)
LAYOUT = Layout(
    values=[[Array(FLOATS, 4)], [Array(FLOATS, 2), Array(FLOATS, 1)]],
    gradients=[[Array(FLOATS, 4)], [Array(FLOATS, 2), Array(FLOATS, 1)]],
    report=Array(np.dtype(np.float64), 1),
)
NUMBERS = [7, 8, 0]
ANOTHER_PS = """
import sys
import numpy as np
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.exchanges import PsExchanges
from tfdist_cli.train.cluster.shared_memory.layout import Layout

arrays = [[Array(np.dtype(np.float32), 4)]]
ps = PsExchanges(0, Layout(arrays, arrays, Array(np.dtype(np.float64), 1)))
sys.stdout.buffer.write(ps.identity)
sys.stdout.flush()
sys.stdin.read()
"""
ANOTHER_WORKER = """
import sys
import numpy as np
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.exchanges import Wanted, WorkerExchange
from tfdist_cli.train.cluster.shared_memory.layout import Layout

arrays = [[Array(np.dtype(np.float32), 4)], [Array(np.dtype(np.float32), 2), Array(np.dtype(np.float32), 1)]]
identities = [bytes.fromhex(each) for each in sys.argv[1:]]
worker = WorkerExchange(Layout(arrays, arrays, Array(np.dtype(np.float64), 1)), identities)
worker.request(Wanted.VALUES, np.zeros(1), [])
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ps():
    both = [PsExchanges(number, LAYOUT) for number in range(2)]
    yield both
    for each in both:
        each.close()


@pytest.fixture
def worker(ps):
    exchange = new_worker(ps)
    yield exchange
    for each in ps:
        each.close()
    assert exchange.close_if_ended()


def new_worker(ps):
    return WorkerExchange(LAYOUT, [each.identity for each in ps])


def gradients(number):
    return [np.full(array.size, number, array.dtype) for own in LAYOUT.gradients for array in own]


def answer(ps, number, numbers=NUMBERS):
    """Each ps takes a request and answers it with values that are filled with a number; returns the requests."""
    requests = [each.take() for each in ps]
    for each, arrays in zip(ps, LAYOUT.values, strict=True):
        each.answer(numbers, [np.full(array.size, number, array.dtype) for array in arrays])
    return requests


def test_gradients_and_values_cross(ps, worker):
    worker.request(Wanted.UPDATE | Wanted.VALUES, np.array([0.5]), gradients(3))
    for number, request in enumerate(answer(ps, 9)):
        assert request.wanted == Wanted.UPDATE | Wanted.VALUES
        assert request.report.tolist() == [0.5]
        assert [array.tolist() for array in request.gradients] == [
            [3.0] * array.size for array in LAYOUT.gradients[number]
        ]
    numbers, values = worker.answer()
    assert list(numbers) == NUMBERS
    assert [array.tolist() for array in values] == [[9.0] * array.size for own in LAYOUT.values for array in own]


def test_values_stay_until_the_answer_after_the_next_one(ps, worker):
    found = []
    for number in range(2):
        worker.request(Wanted.VALUES, np.zeros(1), [])
        answer(ps, number)
        found.append(worker.answer()[1])
    assert [values[0][0] for values in found] == [0, 1]


def test_values_that_are_not_wanted_are_not_written(ps, worker):
    for number, wanted in enumerate([Wanted.VALUES, Wanted.VALUES, Wanted.UPDATE], start=1):
        worker.request(wanted, np.zeros(1), gradients(0) if wanted == Wanted.UPDATE else [])
        answer(ps, number)
        values = worker.answer()[1]
    assert values[0][0] == 1  # those of two answers before


def test_the_numbers_are_those_of_the_leader(ps, worker):
    worker.request(Wanted.VALUES, np.zeros(1), [])
    for each, numbers in zip(reversed(ps), ([1, 2, 3], [4, 5, 6]), strict=True):
        each.take()
        each.answer(numbers, [])
    assert list(worker.answer()[0]) == [4, 5, 6]


def test_each_worker_receives_the_answer_to_its_own_request(ps, worker):
    other = new_worker(ps)
    for number, each in enumerate((worker, other), start=1):
        each.request(Wanted.UPDATE | Wanted.VALUES, np.zeros(1), gradients(number))
    for _ in range(2):
        for one, arrays in zip(ps, LAYOUT.values, strict=True):
            found = one.take().gradients[0][0]
            one.answer(NUMBERS, [np.full(array.size, 10 * found, array.dtype) for array in arrays])
    assert [each.answer()[1][0][0] for each in (other, worker)] == [20, 10]
    for each in ps:
        each.close()
    other.close_if_ended()


def test_a_ps_that_is_told_to_end_wants_nothing_and_goes_on_later(ps, worker):
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(ps[0].take)
        ps[0].end(closes=False)
        assert taken.result().wanted == Wanted.NOTHING
    ps[0].answer(NUMBERS, [])  # nobody asked
    worker.request(Wanted.VALUES, np.zeros(1), [])
    answer(ps, 5)
    assert worker.answer()[1][0][0] == 5


def test_a_ps_that_closes_answers_none_of_those_who_wait(ps, worker):
    answered = ps[1]
    worker.request(Wanted.VALUES, np.zeros(1), [])
    answered.take()
    answered.answer(NUMBERS, [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.answer)
        ps[0].end(closes=True)
        while ps[0].take().wanted != Wanted.NOTHING:
            pass
        with pytest.raises(NotAnswered):
            waiting.result()
    assert ps[0].is_closed
    ps[0].end(closes=True)  # again


def test_a_worker_that_comes_after_the_end_is_not_answered(ps):
    ps[1].close()
    late = new_worker(ps)
    assert late.is_over
    late.request(Wanted.VALUES, np.zeros(1), [])
    with pytest.raises(NotAnswered):
        late.answer()
    assert late.close_if_ended()


def test_a_ps_that_is_kept_busy_forgets_lost_workers_after_their_last_requests(ps, worker, monkeypatch):
    monkeypatch.setattr(exchanges, "_CHECK_SECONDS", 0.0)
    lost = new_worker(ps)
    for number, each in enumerate((worker, lost), start=1):
        each.request(Wanted.UPDATE, np.zeros(1), gradients(number))
    lost._board.end()  # as if its process had ended
    taken = [request.gradients[0][0] for _ in range(2) for request in answer(ps, 0)]
    worker.request(Wanted.UPDATE, np.zeros(1), gradients(3))
    taken += [request.gradients[0][0] for request in answer(ps, 0)]
    assert taken == [1, 1, 2, 2, 3, 3]
    assert [len(each._workers) for each in ps] == [1, 1]
    for each in ps:
        each.close()
    assert lost.close_if_ended()


def test_a_board_that_is_not_gone_but_cannot_be_opened_is_an_error(ps, monkeypatch):
    def refuse(process, descriptor):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = opened()
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_opened", refuse)
        with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
            new_worker(ps)
        assert raised.value.errno == errno.EMFILE
        del raised  # it refers to the board
    assert not opened() - before
    worker = new_worker(ps)
    worker.request(Wanted.VALUES, np.zeros(1), [])
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_opened", refuse)
        with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
            ps[0].take()
        assert raised.value.errno == errno.EMFILE
    for each in ps:
        each.close()
    assert worker.close_if_ended()


@pytest.mark.slow
def test_a_worker_whose_ps_is_killed_is_not_answered():
    arrays = [[Array(FLOATS, 4)]]
    other = subprocess.Popen([sys.executable, "-c", ANOTHER_PS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    identity = other.stdout.read(IDENTITY_BYTES)
    worker = WorkerExchange(Layout(arrays, arrays, LAYOUT.report), [identity])
    worker.request(Wanted.VALUES, np.zeros(1), [])
    assert not worker.close_if_ended()
    other.kill()
    other.communicate()
    with pytest.raises(NotAnswered):
        worker.answer()
    assert worker.close_if_ended()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_forgotten(ps, worker):
    identities = [each.identity.hex() for each in ps]
    command = [sys.executable, "-c", ANOTHER_WORKER, *identities]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"sent\n"
        requests = [each.take() for each in ps]
        other.kill()
        other.wait()
    for each, request in zip(ps, requests, strict=True):
        assert request.wanted == Wanted.VALUES
        each.answer(NUMBERS, [])
    worker.request(Wanted.VALUES, np.zeros(1), [])
    answer(ps, 5)
    assert worker.answer()[1][0][0] == 5
    assert [len(each._workers) for each in ps] == [1, 1]
