"""Operations let workers and ps meet in rounds; this process is both."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep import round_operations
from tfdist_cli.train.cluster.shared_memory.lockstep.round_operations import Rounds
from tfdist_cli.train.cluster.shared_memory.lockstep.rounds import END

TYPES = [np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float32", "bfloat16", "int64")]
LAYOUT = Layout(
    values=[[Array(dtype, 3) for dtype in TYPES], [Array(TYPES[0], 2)]],
    others=[[Array(TYPES[0], 4)], []],
    report=Array(np.dtype(np.float64), 2),
)
FIRST = tf.constant(40, tf.int64)
NEXT = tf.constant(0, tf.int64)


class Run:
    """A run of two ps and one worker, each of which is this process."""

    def __init__(self):
        self.rounds = Rounds(["CPU:0", "CPU:0"], LAYOUT)
        self.ps = self.rounds.opened(tf.constant(1))
        for number in range(2):
            self.rounds.begin(number, self.ps)

    def publish(self, sequence, kind=NEXT):
        for number, arrays in enumerate(LAYOUT.values):
            shown = [tf.fill([array.size], tf.cast(sequence, array.dtype)) for array in arrays]
            self.rounds.publish(number, self.ps, sequence, kind, shown)

    def collect(self, sequence):
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.rounds.collect, 1, self.ps, sequence, 1)
            return self.rounds.collect(0, self.ps, sequence, 1), other.result()


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(round_operations, "_process", round_operations._Process())
    round_operations.register()
    return Run()


def work(run, sequence, written):
    """One step of the worker, and the wait for the next one."""
    number = run.rounds.join(tf.constant(0), run.ps)
    token, arrays = run.rounds.await_round(number, sequence)
    gradients, report = [tf.range(4.0)], tf.constant([5.0, 6.0], tf.float64)
    if written:
        run.rounds.write(number, token[0], gradients)
    run.rounds.commit(number, token[0], report, [] if written else gradients, arrays)
    following, _ = run.rounds.await_round(number, token[0] + 1)
    return token.numpy().tolist(), arrays, following.numpy().tolist()


@pytest.mark.parametrize("written", [False, True])
def test_a_step(run, written):
    run.publish(FIRST)
    with ThreadPoolExecutor(1) as pool:
        worked = pool.submit(work, run, FIRST, written)
        (reports, [[gradient]]), (_, [nothing]) = run.collect(FIRST)
        assert reports.numpy().tolist() == [[5.0, 6.0]]
        assert gradient.numpy().tolist() == [0, 1, 2, 3]
        assert nothing == []
        run.publish(FIRST + 1, tf.constant(END, tf.int64))
        token, arrays, following = worked.result()
    assert token == [40, 0]
    assert [array.dtype for array in arrays] == [*TYPES, TYPES[0]]
    assert {float(number) for array in arrays for number in array} == {40.0}
    assert following == [41, END]
    process = round_operations._process
    assert not process._of_ps
    assert not process._of_worker


def test_a_run_is_aborted(run):
    run.publish(FIRST)
    with ThreadPoolExecutor(2) as pool:
        number = run.rounds.join(tf.constant(0), run.ps)
        waits = pool.submit(run.rounds.await_round, number, FIRST)
        collects = pool.submit(run.collect, FIRST)
        waits.result()
        run.rounds.aborted(run.ps)
        with pytest.raises(tf.errors.UnknownError, match="Aborted"):
            collects.result()
    run.rounds.commit(number, FIRST, tf.zeros([2], tf.float64), [tf.zeros([4])], [])  # nobody takes it
    token, _ = run.rounds.await_round(number, FIRST + 1)
    assert token.numpy().tolist() == [41, END]
    again = Run()  # closes what is left of the run
    assert set(round_operations._process._of_ps) == {bytes(identity) for identity in again.ps.numpy()}
    with pytest.raises(tf.errors.UnknownError, match="Aborted"):
        run.publish(FIRST + 1)


def test_nothing_is_left_of_runs_that_failed(run):
    def fail(run):
        """Fails in the middle of a run, and begins another one."""
        run.rounds.aborted(run.ps)
        again = Run()
        return again, int(again.rounds.join(tf.constant(0), again.ps))

    run.rounds.join(tf.constant(0), run.ps)
    run, number = fail(run)
    before = opened().total()
    for _ in range(3):
        run, number = fail(run)
    assert set(round_operations._process._of_worker) == {number}
    assert opened().total() <= before


def test_a_function_of_a_run_that_is_over_ends(run):
    """It computed while the run was aborted, and the worker joined the next one."""
    run.publish(FIRST)
    number = run.rounds.join(tf.constant(0), run.ps)
    run.rounds.aborted(run.ps)
    again = Run()
    again.rounds.join(tf.constant(0), again.ps)
    run.rounds.write(number, FIRST, [tf.zeros([4])])
    run.rounds.commit(number, FIRST, tf.zeros([2], tf.float64), [], [])
    token, arrays = run.rounds.await_round(number, FIRST + 1)
    assert token.numpy().tolist() == [41, END]
    assert [(array.dtype, array.shape) for array in arrays] == [*((dtype, (3,)) for dtype in TYPES), (TYPES[0], (2,))]
