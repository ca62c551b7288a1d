"""Workers and ps in lockstep: every update takes one gradient of each worker, also if workers are lost in between."""

import itertools
import threading
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.gradient_store import GradientStore, StoredGradient
from tfdist_cli.train.engine.parameter_server.lockstep import data_position, functions, token_queues
from tfdist_cli.train.engine.parameter_server.lockstep.functions import LockstepFunctions
from tfdist_cli.train.engine.parameter_server.lockstep.token_queues import RUN, TokenQueues
from tfdist_cli.train.engine.parameter_server.messages import Commit, ReportLayout, StepKind
from tfdist_cli.train.model.embeddings import Lookup

pytestmark = pytest.mark.slow

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"
FIRST = 7 * RUN + 30
"""A run's first sequence number."""
END, IN_CHUNK, SINGLE, CHUNK = StepKind


@pytest.fixture
def two(monkeypatch):
    """Queues of two workers and one ps, which is this process; a step report is one number."""
    monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)
    return TokenQueues([HERE], workers=2, report=1)


def give(two, sequence, kind):
    token = tf.constant([sequence, kind], tf.int64)
    token_queues.give_token(two.handles["last"][0], two.handles["tokens0"], token)


def test_a_token_is_given_to_every_worker_and_kept(two):
    give(two, FIRST, CHUNK)
    for worker in range(2):
        assert token_queues.next_token(two.of(worker)["tokens"][0]).numpy().tolist() == [FIRST, CHUNK]
    assert token_queues.last_token(two.of(0)["last"][0]).numpy().tolist() == [FIRST, CHUNK]


def test_stale_tokens_are_skipped_and_a_known_one_is_not_awaited(two):
    for number in range(3):
        give(two, FIRST + number, SINGLE)
    queue = two.of(0)["tokens"][0]
    known = tf.constant([FIRST + 1, IN_CHUNK], tf.int64)
    assert token_queues.token_of(queue, known, tf.constant(FIRST + 1, tf.int64)).numpy().tolist() == [
        FIRST + 1,
        IN_CHUNK,
    ]
    assert token_queues.token_of(queue, known, tf.constant(FIRST + 2, tf.int64)).numpy().tolist() == [FIRST + 2, SINGLE]
    assert int(tf.raw_ops.QueueSizeV2(handle=queue)) == 0


def test_of_two_gradients_for_a_sequence_number_the_first_one_counts(two):
    queue = two.of(1)["commits"][0]
    for sequence, key in ((FIRST, 5), (FIRST, 6), (FIRST + 1, 7)):
        head = tf.constant([sequence, key, 0], tf.int64)
        token_queues.commit(queue, head, tf.constant([key / 2], tf.float64))
    found = [token_queues.committed([queue], tf.constant(sequence, tf.int64), 1) for sequence in (FIRST, FIRST + 1)]
    assert [(int(commits.key[0]), float(counted[0])) for commits, [counted] in found] == [(5, 2.5), (7, 3.5)]


def test_queues_keep_the_order(two):
    """Commits of a chunk's steps, and tokens on a ps: a worker would wait forever for one that another overtook."""
    own = two.of(0)

    @tf.function(autograph=False)
    def function(commits, last, tokens):
        for number in range(3):
            numbers = tf.stack([tf.timestamp(), number])  # which is available at any time
            token_queues.commit(commits, tf.cast(numbers, tf.int64), tf.constant([0.0], tf.float64))
            token_queues.give_token(last, [tokens], tf.cast(numbers, tf.int64))

    graph = function.get_concrete_function(own["commits"][0], own["last"][0], own["tokens"][0]).graph
    puts = [each for each in graph.get_operations() if each.type in {"QueueEnqueueV2", "AssignVariableOp"}]
    for resource in {put.inputs[0].ref() for put in puts}:
        chain = [put for put in puts if put.inputs[0] is resource.deref()]
        assert len(chain) == 3
        assert all(before in after.control_inputs for before, after in itertools.pairwise(chain))


def test_a_worker_knows_whether_it_has_started_a_run_before(two):
    started = two.of(0)["started"][0]
    again = [
        bool(token_queues.restarts(started, tf.constant(sequence, tf.int64)))
        for sequence in (FIRST, FIRST, FIRST + RUN)
    ]
    assert again == [False, True, False]
    assert not token_queues.restarts(two.of(1)["started"][0], tf.constant(FIRST, tf.int64))


class Part:
    """A part of a step that has no variables."""

    def __init__(self, number, made):
        self.number, self.made = number, made

    def is_of(self, *_):
        return True

    def send(self, gradients, assigned, keys, before):
        return {HERE: list(gradients)}

    def read(self, ready):
        return [tf.identity(ready[HERE])]

    def apply(self):
        return [self.made.assign(tf.concat([self.made, tf.constant([self.number], tf.int64)], axis=0)).op]

    def clear(self):
        pass


class Lockstep:
    """The functions of two workers that compute nothing: the loss of a step is its batch, which is its number.

    The data of a worker that restarts begins where the run has begun: it knows of no step that was done since.

    Args:
        parts: how many updates a step makes.

    Attributes:
        fails: a worker, the step and its part in which the worker's function fails, once.
        made: the parts that were made, in order.
    """

    def __init__(self, monkeypatch, parts=1):
        monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)
        self.fails = tf.Variable([-1, -1, -1], dtype=tf.int64)
        self.made = tf.Variable(tf.zeros([0], tf.int64), shape=[None])
        self.parts = parts
        self.queues = TokenQueues([HERE], 2, report=2)
        store = GradientStore.__new__(GradientStore)
        store.devices, store.layout, store.measures_phases = [HERE], ReportLayout(0, 0, 0), False
        no_tables = SimpleNamespace(are_numbered=False, lookups=lambda rounds: [Lookup([], [[]])] * len(rounds))
        monkeypatch.setattr(store, "context", SimpleNamespace(tables=no_tables, transport=None), raising=False)
        monkeypatch.setattr(store, "store", self._stored)
        monkeypatch.setattr(store, "apply", lambda keys, state, *make: [each for one in make for each in one()])
        monkeypatch.setattr(store, "clear", lambda: None)
        own = [Part(number, self.made) for number in range(parts)] if parts > 1 else []
        monkeypatch.setattr(LockstepFunctions, "_step_parts", lambda *_: own)
        monkeypatch.setattr(functions, "GradientStore", lambda context, **_: store)
        self.functions = LockstepFunctions(SimpleNamespace(worker_count=2, workers=SimpleNamespace(most=2)))
        self.work_of = cache(lambda worker, size: self.functions._worker_function(size))
        self.data = [None, None]
        here = threading.local()  # both workers are this process
        monkeypatch.setattr(data_position, "_position", lambda: self.positions[here.worker].handle)
        self.positions, self.here = [tf.Variable(-1, dtype=tf.int64) for _ in range(2)], here

    def open(self, worker, first):
        """Opens a worker's data, which begins with a step."""
        self.positions[worker].assign(first)
        self.data[worker] = iter(tf.data.Dataset.range(first, first + 1000))

    def _stored(self, read, numbers, ready, keys, timer, within=None):
        worker, number = numbers.worker, numbers.step
        awaited, [batch] = [*ready.values()], read.batches
        with tf.control_dependencies(awaited):
            loss = tf.cast(batch, tf.float64)
        for part in range(self.parts):
            with tf.control_dependencies(awaited):
                failed = tf.reduce_all(self.fails == tf.stack([worker, number, part]))
            with tf.control_dependencies([tf.debugging.assert_equal(failed, False, "lost")]):
                loss = tf.identity(loss)
            awaited = within.update(None, [loss], [], []) if within else []
        return StoredGradient(loss, {HERE: [tf.identity(loss)]}, tf.stack([loss, 0.0]))

    def work(self, worker, size, first=FIRST):
        """Runs a worker's function, and again while it fails."""
        self.here.worker = worker
        begins = first % RUN // self.parts
        if self.data[worker] is None:
            self.open(worker, begins)
        while True:
            try:
                numbers = tf.constant([worker, first, 1], tf.int64)
                return self.work_of(worker, size)(self.data[worker], numbers, self.queues.of(worker))
            except tf.errors.InvalidArgumentError:
                self.fails.assign([-1, -1, -1])
                self.open(worker, begins)

    def _ending(self, function):
        """Calls a function; if it fails, nobody waits for reports any more."""
        try:
            function()
        except Exception:
            self.queues.stop()
            raise

    def run(self, orders, size, first=FIRST):
        """Runs some orders; returns the reports of each."""
        self.queues.start(first)
        functions = [partial(self.functions.updates(size), self.queues.handles, tf.constant(first, tf.int64))]
        functions += [partial(self.work, worker, size, first) for worker in range(2)]
        threads = [threading.Thread(target=self._ending, args=[function]) for function in functions]
        for thread in threads:
            thread.start()
        for kind in orders:
            self.queues.order(kind)
        reports = [self.queues.received() for kind in orders if kind != END]
        for thread in threads:
            thread.join()
        return reports


@pytest.fixture
def lockstep(monkeypatch):
    return Lockstep(monkeypatch)


def steps_of(reports):
    return [update.tolist() for chunk in reports for update in chunk[:, :, 0]]


def test_each_update_takes_the_same_step_of_both_workers_in_chunks_and_single(lockstep):
    reports = lockstep.run([SINGLE, CHUNK, CHUNK, SINGLE, END], size=3)
    assert [len(chunk) for chunk in reports] == [1, 3, 3, 1]
    assert steps_of(reports) == [[step, step] for step in range(30, 38)]


def test_a_run_follows_another_one(lockstep):
    lockstep.run([CHUNK, END], size=2)
    reports = lockstep.run([SINGLE, CHUNK, END], size=2, first=FIRST + RUN + 2)
    assert steps_of(reports) == [[step, step] for step in (32, 33, 34)]


@pytest.mark.rotates(5)
@pytest.mark.parametrize("step", range(30, 40))
def test_a_worker_that_restarts_continues_where_the_others_are(lockstep, step):
    lockstep.fails.assign([1, step, 0])
    reports = lockstep.run([SINGLE, CHUNK, CHUNK, CHUNK, END], size=3)
    assert lockstep.fails.numpy().tolist() == [-1, -1, -1]
    assert steps_of(reports) == [[number, number] for number in range(30, 40)]


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("step", "part"), [(10, 1), (13, 1), (16, 2)])
def test_a_worker_that_restarts_within_a_step_of_several_updates(step, part, monkeypatch):
    """It begins the step anew, and each update is made once."""
    lockstep = Lockstep(monkeypatch, parts=3)
    lockstep.fails.assign([1, step, part])
    reports = lockstep.run([SINGLE, CHUNK, CHUNK, END], size=3, first=7 * RUN + 10 * 3)
    assert lockstep.fails.numpy().tolist() == [-1, -1, -1]
    assert steps_of(reports) == [[number, number] for number in range(10, 17)]
    assert lockstep.made.numpy().tolist() == [0, 1, 2] * 7


@pytest.mark.parametrize("tokens", [1, 0])
def test_the_update_takes_the_first_commit_of_a_worker_that_restarts_after_it(lockstep, tokens):
    """Whether or not it had received its next token."""
    own, sequence = lockstep.queues.of(0), tf.constant(FIRST, tf.int64)
    lockstep.queues.start(FIRST)
    token_queues.restarts(own["started"][0], sequence)
    give(lockstep.queues, FIRST, CHUNK)
    for _ in range(tokens):
        token_queues.next_token(own["tokens"][0])
    token_queues.commit(own["commits"][0], Commit.pack(sequence, 0, 0), tf.constant([-5.0, 0.0], tf.float64))
    lockstep.queues.start = lambda first: None
    reports = lockstep.run([CHUNK, CHUNK, END], size=3)
    assert steps_of(reports) == [[-5, 30], *[[step, step] for step in range(31, 36)]]


@pytest.mark.parametrize("current", [[FIRST + 5, END], [FIRST + RUN, CHUNK]])
def test_a_worker_that_restarts_when_its_run_is_over_takes_no_step(lockstep, current):
    own = lockstep.queues.of(0)
    token_queues.restarts(own["started"][0], tf.constant(FIRST, tf.int64))
    give(lockstep.queues, *current)
    lockstep.work(0, size=3)
    assert int(tf.raw_ops.QueueSizeV2(handle=own["commits"][0])) == 0
    assert next(lockstep.data[0]).numpy() == lockstep.positions[0].numpy() == 30


def test_workers_of_an_aborted_run_are_told_to_exit(lockstep):
    size = 3
    worker = threading.Thread(target=lockstep.work, args=(0, size))
    worker.start()
    give(lockstep.queues, FIRST, CHUNK)
    lockstep.queues.abort(size + 1)
    worker.join()
    commits, reports = token_queues.committed(lockstep.queues.of(0)["commits"], tf.constant(FIRST, tf.int64), 2)
    assert reports.numpy().tolist() == [[30.0, 0.0]]
    assert int(commits.key[0]) > 0


def test_a_wait_for_a_commit_that_never_comes_fails(two):
    two.close_commits()
    with pytest.raises(tf.errors.OutOfRangeError):
        token_queues.committed(two.handles["commits"], tf.constant(FIRST, tf.int64), 1)


def test_keys_of_two_workers_and_of_two_functions_of_one_differ(lockstep):
    lockstep.fails.assign([1, 33, 0])
    seen = tf.Variable(tf.zeros([0, 2], tf.int64), shape=[None, 2])

    def note(keys, state, *_):
        return [seen.assign(tf.concat([seen, keys[HERE][None]], axis=0)).op]

    lockstep.functions.store.apply = note
    lockstep.run([CHUNK, CHUNK, END], size=3)
    assert len(np.unique(seen.numpy())) == seen.numpy().size == 12
