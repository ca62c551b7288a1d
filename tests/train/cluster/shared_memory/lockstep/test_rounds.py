"""Workers and ps meet in rounds, also if workers are started again."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory import memory
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.rounds import END, Aborted, PsRounds, WorkerRounds
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES

FLOATS = np.dtype(np.float32)
LAYOUT = Layout(
    values=[[Array(FLOATS, 4)], [Array(FLOATS, 2), Array(FLOATS, 1)]],
    others=[[Array(FLOATS, 4)], [Array(FLOATS, 2), Array(FLOATS, 1)]],
    report=Array(np.dtype(np.float64), 2),
)
FIRST, IN_CHUNK = 40, 0
HOLDS_A_BOARD = """
import sys
import numpy as np
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.rounds import PsRounds

arrays = [[Array(np.dtype(np.float32), 4)]]
ps = PsRounds(0, 1, Layout(arrays, arrays, Array(np.dtype(np.float64), 2)))
ps.publish(40, 0, [np.zeros(4, np.float32)])
sys.stdout.buffer.write(ps.identity)
sys.stdout.flush()
sys.stdin.read()
"""


class Cluster:
    """Two ps, and workers of this process; each value and gradient is filled with one number."""

    def __init__(self, workers=2):
        self.ps = [PsRounds(number, workers, LAYOUT) for number in range(2)]
        self.identities = [each.identity for each in self.ps]
        for each in self.ps:
            each.begin(self.identities)
        self.workers = []

    def worker(self, number):
        self.workers.append(WorkerRounds(number, LAYOUT, self.identities))
        return self.workers[-1]

    def publish(self, sequence, kind=IN_CHUNK):
        for each, arrays in zip(self.ps, LAYOUT.values, strict=True):
            each.publish(sequence, kind, filled(arrays, sequence))

    def collect(self, sequence):
        """The reports, and the gradients of each worker on each ps."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.ps[1].collect, sequence)
            (reports, first), (_, second) = self.ps[0].collect(sequence), other.result()
        return reports[:, 0].tolist(), [
            [float(array[0]) for array in (*one, *other)] for one, other in zip(first, second, strict=True)
        ]

    def close(self):
        for each in self.ps:
            each.close()
        for each in self.workers:
            each.close_if_over()


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.close()


def filled(arrays, number):
    return [np.full(array.size, number, array.dtype) for array in arrays]


def commit(worker, sequence, number):
    gradients = [array for own in LAYOUT.others for array in filled(own, number)]
    worker.commit(sequence, np.array([number, 0.0]), gradients)


def begin(worker, sequence=FIRST):
    found, kind, arrays = worker.await_round(sequence)
    if kind != END:
        assert {float(each[0]) for each in arrays} == {found}
    return found, kind


def test_all_ps_take_the_gradients_of_all_workers(cluster):
    with ThreadPoolExecutor(2) as pool:

        def work(number):
            worker, sequence = cluster.worker(number), FIRST
            while begin(worker, sequence)[1] != END:
                commit(worker, sequence, 1000 * number + sequence)
                sequence += 1
            return sequence

        ended = [pool.submit(work, number) for number in range(2)]
        for sequence in range(FIRST, FIRST + 30):
            cluster.publish(sequence)
            reports, gradients = cluster.collect(sequence)
            assert reports == [sequence, 1000 + sequence]
            assert gradients == [[sequence] * 3, [1000 + sequence] * 3]
        cluster.publish(FIRST + 30, END)
        assert [each.result() for each in ended] == [FIRST + 30] * 2


def test_a_round_begins_when_it_may_on_each_ps(cluster):
    worker = cluster.worker(0)
    for each in cluster.ps:
        each._receive()
    cluster.ps[1].publish(FIRST, IN_CHUNK, filled(LAYOUT.values[1], FIRST))
    worker._receive()
    assert not worker._may_begin(FIRST)
    cluster.ps[0].publish(FIRST, IN_CHUNK, filled(LAYOUT.values[0], FIRST))
    assert begin(worker) == (FIRST, IN_CHUNK)


def test_arrays_that_are_published_once_stay(cluster):
    worker = cluster.worker(0)
    for each in cluster.ps:
        each._receive()
    cluster.publish(FIRST)
    assert begin(worker) == (FIRST, IN_CHUNK)
    for sequence in range(FIRST + 1, FIRST + 4):
        cluster.ps[0].publish(sequence, IN_CHUNK, filled(LAYOUT.values[0], sequence))
        cluster.ps[1].publish(sequence, IN_CHUNK, filled(LAYOUT.values[1][:1], sequence))
        _, _, arrays = worker.await_round(sequence)
        assert [float(each[0]) for each in arrays] == [sequence, sequence, FIRST]


def started(cluster):
    """Both workers, in their first round."""
    cluster.publish(FIRST)
    first, second = cluster.worker(0), cluster.worker(1)
    for each in cluster.ps:
        each._receive()
        each._receive()
    for each in (first, second):
        assert begin(each) == (FIRST, IN_CHUNK)
    return first, second


@pytest.mark.parametrize("committed", [False, True])
def test_a_worker_that_is_started_again_takes_the_round_that_is_on(cluster, committed):
    first, second = started(cluster)
    if committed:
        commit(second, FIRST, 5)
        cluster.ps[0]._receive()
    with ThreadPoolExecutor() as pool:
        collected = pool.submit(cluster.collect, FIRST)
        again = cluster.worker(1)
        assert begin(again, FIRST - 10) == (FIRST, IN_CHUNK)
        commit(first, FIRST, 6)
        commit(again, FIRST, 7)
        assert collected.result() == ([6, 7], [[6] * 3, [7] * 3])


def test_all_ps_take_what_the_leader_took_before_a_worker_was_started_again(cluster):
    first, second = started(cluster)
    commit(first, FIRST, 6)
    commit(second, FIRST, 5)
    reports, _ = cluster.ps[0].collect(FIRST)
    again = cluster.worker(1)
    _, gradients = cluster.ps[1].collect(FIRST)
    assert reports[:, 0].tolist() == [6, 5]
    assert [[float(array[0]) for array in each] for each in gradients] == [[6, 6], [5, 5]]
    cluster.publish(FIRST + 1)
    assert begin(first, FIRST + 1) == (FIRST + 1, IN_CHUNK)
    with ThreadPoolExecutor() as pool:
        collected = pool.submit(cluster.collect, FIRST + 1)
        assert begin(again) == (FIRST + 1, IN_CHUNK)
        commit(first, FIRST + 1, 8)
        commit(again, FIRST + 1, 9)
        assert collected.result() == ([8, 9], [[8] * 3, [9] * 3])


def test_the_keys_of_many_workers_need_several_messages():
    cluster = Cluster(workers=12)
    cluster.publish(FIRST)
    with ThreadPoolExecutor(12) as pool:

        def work(number):
            worker = cluster.worker(number)
            begin(worker)
            commit(worker, FIRST, number)

        done = [pool.submit(work, number) for number in range(12)]
        assert cluster.collect(FIRST) == (list(range(12)), [[number] * 3 for number in range(12)])
        for each in done:
            each.result()
    cluster.close()


def test_a_run_that_is_aborted_ends_on_all_tasks(cluster):
    worker, _ = started(cluster)
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(worker.await_round, FIRST + 1)]
        collects = [pool.submit(each.collect, FIRST) for each in cluster.ps]
        for each in cluster.ps:
            each.abort()
        assert waits[0].result()[:2] == (FIRST + 1, END)
        for each in collects:
            with pytest.raises(Aborted):
                each.result()
    assert [each.close_if_aborted() for each in cluster.ps] == [True, True]
    cluster.ps.clear()


def test_a_worker_that_no_ps_has_met_before_the_end_does_not_wait(cluster):
    late = cluster.worker(0)
    for each in cluster.ps:
        each.abort()
    assert late.await_round(FIRST)[:2] == (FIRST, END)


def test_a_worker_finds_no_run_that_is_over():
    cluster = Cluster()
    for each in cluster.ps:
        each.close()
    late = WorkerRounds(0, LAYOUT, cluster.identities)
    found, kind, arrays = late.await_round(FIRST)
    assert (found, kind) == (FIRST, END)
    assert [each.size for each in arrays] == [4, 2, 1]


@pytest.fixture
def no_descriptors(monkeypatch):
    """Lets no task open the memory of another one from now on."""

    def deny():
        def refuse(process, descriptor):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(memory, "_opened", refuse)

    return deny


def test_a_worker_that_cannot_open_the_boards_of_a_run_fails(cluster, no_descriptors):
    before = opened()
    no_descriptors()
    with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
        cluster.worker(0)
    assert raised.value.errno == errno.EMFILE
    del raised  # it refers to the board
    assert not opened() - before


def test_a_ps_that_cannot_open_the_board_of_a_worker_fails(cluster, no_descriptors):
    cluster.worker(0)
    no_descriptors()
    with pytest.raises(OSError) as raised:  # noqa: PT011 of this number
        cluster.ps[0].collect(FIRST)
    assert raised.value.errno == errno.EMFILE


@pytest.mark.slow
def test_a_worker_does_not_wait_for_a_ps_that_was_killed():
    arrays = [[Array(FLOATS, 4)]]
    layout = Layout(arrays, arrays, LAYOUT.report)
    command = [sys.executable, "-c", HOLDS_A_BOARD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        identity = holder.stdout.read(IDENTITY_BYTES)
        worker = WorkerRounds(0, layout, [identity])
        holder.kill()
        holder.wait()
        assert worker.await_round(41)[:2] == (41, END)


def test_a_ps_goes_on_when_a_worker_was_killed(cluster):
    first, second = started(cluster)
    second._close()
    commit(first, FIRST, 6)
    with ThreadPoolExecutor() as pool:
        collected = pool.submit(cluster.collect, FIRST)
        again = cluster.worker(1)
        begin(again)
        commit(again, FIRST, 7)
        assert collected.result()[0] == [6, 7]
    cluster.publish(FIRST + 1)
    assert begin(first, FIRST + 1) == begin(again, FIRST + 1) == (FIRST + 1, IN_CHUNK)


def test_nothing_is_left_open():
    def run():
        cluster = Cluster()
        started(cluster)
        cluster.worker(1)
        for each in cluster.ps:
            each._receive()
        cluster.publish(FIRST + 1, END)
        cluster.close()

    before = opened()
    for _ in range(3):
        run()
    assert not opened() - before
