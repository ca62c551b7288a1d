"""Workers that join and leave, with a cluster that only notes what is done to it."""

import threading
import weakref
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist_cli.spec.address import Address
from tfdist_cli.spec.task_id import TaskId
from tfdist_cli.train.cluster.membership import GRANTED, JOIN, LEAVE, Membership, Refusal, Request
from tfdist_cli.train.engine.parameter_server import workers
from tfdist_cli.train.engine.parameter_server.workers import WorkerData, Workers

LONG = 20.0
TASKS = [TaskId("worker", index) for index in range(6)]
PLACES = [Address("127.0.0.1", 5000 + index) for index in range(6)]


class FakeRemote:
    """A remote value that is there, or not yet."""

    def __init__(self, error=None):
        self.error, self.ready = error, threading.Event()
        self.ready.set()


class FakeCluster:
    """What the module does to TensorFlow's cluster."""

    def __init__(self, patch):
        self.workers = [self.worker(0), self.worker(2)]
        self.added, self.removed, self.admitted = [], [], []
        self.lost, self.failures = set(), []
        self.iterators = {}
        self.retired = threading.Event()
        self.retired.set()
        patch.setattr(workers, "workers_of", lambda _: self.workers)
        patch.setattr(workers, "running_cluster", lambda _: self)
        patch.setattr(workers, "create_worker", lambda _, index: self.worker(index))
        patch.setattr(workers, "admit_worker", lambda _, worker: self.admitted.append(worker.worker_index))
        patch.setattr(workers, "retire_worker", self._retire)
        patch.setattr(workers, "set_iterator", lambda iterators, index, opened: iterators.update({index: opened}))
        patch.setattr(workers, "is_dead", lambda worker: worker.worker_index in self.lost)
        patch.setattr(workers, "wait_for", lambda remote, seconds: remote.ready.wait(seconds))
        patch.setattr(workers, "failure_of", lambda remote: remote.error)
        patch.setattr(workers, "emit", lambda kind, **fields: self.records.append((kind, fields)))
        self.records = []

    def worker(self, index):
        return SimpleNamespace(worker_index=index, stop=lambda: None)

    def _retire(self, _coordinator, worker, _iterators):
        self.workers = [each for each in self.workers if each is not worker]
        return self.retired

    def add(self, index, address, lost):
        if self.failures:
            raise self.failures.pop()
        self.added.append((index, address, sorted(lost)))

    def remove(self, index, lost):
        self.removed.append((index, sorted(lost)))


@pytest.fixture
def cluster(monkeypatch):
    return FakeCluster(monkeypatch)


class State(Membership):
    """The workers 0 and 2 of at most six, and what was answered to those that had to wait."""

    def __init__(self):
        super().__init__({TASKS[0]: PLACES[0], TASKS[2]: PLACES[2]}, 6)
        self.answers = []
        self._told = threading.Condition()
        self.answered = self._note

    def _note(self, request, answer):
        with self._told:
            self.answers.append((str(request.task), request.asks, answer.refusal and answer.refusal.code))
            self._told.notify_all()

    def await_answers(self, number):
        with self._told:
            assert self._told.wait_for(lambda: len(self.answers) == number, LONG), self.answers
            return self.answers


@pytest.fixture
def state():
    return State()


def opening(cluster, remote=FakeRemote):
    """Data that notes who opens it: the worker, its place, and the number of workers."""
    opened = []

    def create(worker, place, count):
        opened.append((worker.worker_index, place, count))
        return remote()

    return WorkerData(create, cluster.iterators), opened


def await_true(condition):
    pause = threading.Event()
    for _ in range(int(LONG / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not become true")


def await_change(training):
    await_true(lambda: training.change)


def begun(state, data, why_not=lambda _: None):
    training = Workers(None, state)
    training.divide(data)
    training.begin(why_not)
    return training


def test_workers_of_a_cluster_that_stays_as_it_is(cluster):
    training = Workers(None)
    training.begin(lambda _: Refusal("never asked", code="not-elastic"))
    assert (len(training), training.most, training.names, training.change) == (2, 2, ["worker:0", "worker:2"], False)
    assert (training.take_changes(), cluster.records) == ([], [])


def test_a_worker_joins_with_its_place_and_is_reported_after_its_first_steps(cluster, state):
    cluster.lost.add(2)
    data, opened = opening(cluster)
    training = begun(state, data)
    assert cluster.records == [("elastic", {"joins": True})]
    assert state.ask(Request(TASKS[1], PLACES[1], JOIN)) is None
    await_change(training)
    assert (opened, len(training)) == ([(1, 1, 3)], 2)
    (worker,) = training.take_changes()
    assert (worker.worker_index, training.indices, list(cluster.iterators)) == (1, (0, 1, 2), [1])
    assert cluster.added == [(1, str(PLACES[1]), [2])]
    assert state.answers == [("worker:1", JOIN, None)]
    training.admit(worker)
    training.add_execution({"worker:0": 20}, 40)
    assert len(cluster.records) == 1
    training.add_execution({"worker:1": 20}, 60)
    kind, fields = cluster.records[1]
    assert (kind, fields["worker"], fields["step"]) == ("joined", "worker:1", 60)
    training.end()


def test_a_worker_whose_data_was_divided_again_meanwhile_opens_it_again(cluster, state):
    data, opened = opening(cluster)
    training = begun(state, data)
    state.ask(Request(TASKS[1], PLACES[1], JOIN))
    await_change(training)
    again, opened_again = opening(cluster)
    training.divide(again)
    training.take_changes()
    assert opened == opened_again == [(1, 1, 3)]
    training.end()


def test_data_that_was_divided_again_is_closed_although_nobody_asks_any_more(cluster, state):
    data, _ = opening(cluster)
    training, closed = begun(state, data), threading.Event()
    weakref.finalize(data, closed.set)
    state.ask(Request(TASKS[1], PLACES[1], JOIN))
    await_change(training)
    training.take_changes()
    training.divide(opening(cluster)[0])
    del data
    assert closed.wait(LONG)
    training.end()


def test_who_gives_up_before_it_is_taken_is_dropped(cluster, state):
    training = begun(state, opening(cluster)[0])
    request = Request(TASKS[1], PLACES[1], JOIN)
    state.ask(request)
    await_change(training)
    state.withdraw(request)
    assert training.take_changes() == []
    assert len(training) == 2
    training.end()


@pytest.mark.parametrize("noticed", [True, False])
def test_a_worker_that_restarts_before_it_is_taken_joins_with_its_new_process(cluster, state, noticed):
    data, opened = opening(cluster)
    training, prepared = Workers(None, state), []
    training.divide(data)
    training.begin(lambda _: None, lambda after, _: prepared.append([each.worker_index for each in after]))
    first, again = Request(TASKS[1], PLACES[1], JOIN), Request(TASKS[1], PLACES[1], JOIN)
    state.ask(first)
    await_change(training)
    if noticed:
        state.withdraw(first)
    state.ask(again)
    await_true(lambda: len(prepared) == 2)
    await_true(lambda: len(training.take_changes()) == 1)
    assert opened == [(1, 1, 3)] * 2
    assert prepared == [[0, 1, 2]] * 2
    await_true(lambda: not [each for each in threading.enumerate() if "_drop" in each.name])
    assert (training.indices, cluster.removed) == ((0, 1, 2), [])
    assert state.answers == [("worker:1", JOIN, None)]
    training.end()


def test_workers_that_ask_together_are_prepared_for_together(cluster, state):
    prepared = []
    training = Workers(None, state)
    training.divide(opening(cluster)[0])
    training.begin(
        lambda _: None, lambda after, _: prepared.append(([each.worker_index for each in after], training.change))
    )
    state.ask(Request(TASKS[1], PLACES[1], JOIN))
    state.ask(Request(TASKS[2], PLACES[2], LEAVE))
    await_change(training)
    assert prepared == [([0, 1], False)]
    training.take_changes()
    assert training.indices == (0, 1)
    assert cluster.removed == []  # not before the training goes on
    training.add_execution({"worker:0": 20}, 40)
    assert state.await_answers(2) == [("worker:1", JOIN, None), ("worker:2", LEAVE, None)]
    assert cluster.removed == [(2, [])]
    training.end()


@pytest.mark.parametrize(
    ("failures", "code"),
    [([ConnectionError("silent")] * 5, "worker-not-reached"), ([tf.errors.UnavailableError(None, None, "x")], None)],
)
def test_a_worker_that_cannot_be_added(cluster, state, failures, code, monkeypatch):
    monkeypatch.setattr(workers, "_CHECK_SECONDS", 0.01)
    cluster.failures = failures
    training = begun(state, opening(cluster)[0])
    state.ask(Request(TASKS[1], PLACES[1], JOIN))
    if code:
        assert state.await_answers(1) == [("worker:1", JOIN, code)]
        assert cluster.records[1][1]["code"] == code
    else:
        await_change(training)  # it is tried again
    training.end()


@pytest.mark.parametrize(("error", "code"), [(ValueError("empty"), "data-not-opened"), (None, "worker-not-reached")])
def test_a_worker_whose_data_cannot_be_opened(cluster, state, error, code):
    def remote():
        made = FakeRemote(error)
        if error is None:  # it exits instead
            made.ready.clear()
            cluster.lost.add(1)
        return made

    training = begun(state, opening(cluster, remote)[0])
    state.ask(Request(TASKS[1], PLACES[1], JOIN))
    assert state.await_answers(1) == [("worker:1", JOIN, code)]
    assert [index for index, _ in cluster.removed] == [1]
    assert len(training) == 2
    training.end()


def test_a_worker_leaves_when_its_last_function_is_done(cluster, state):
    cluster.retired.clear()
    training = begun(state, opening(cluster)[0])
    assert state.ask(Request(TASKS[2], PLACES[2], LEAVE)) is None
    await_change(training)
    training.add_execution({"worker:0": 20}, 80)
    assert training.take_changes() == []
    assert (training.indices, state.answers) == ((0,), [])
    cluster.retired.set()
    assert state.await_answers(1) == [("worker:2", LEAVE, None)]
    assert cluster.records[1] == ("left", {"worker": "worker:2", "step": 80})
    assert cluster.removed == [(2, [])]
    training.end()


def test_workers_share_memory_again_when_one_that_shares_none_has_left(cluster, state, monkeypatch):
    class Answer(FakeRemote):
        def __init__(self, worker):
            super().__init__()
            self.fetch = lambda: worker.worker_index != 1

    monkeypatch.setattr(Workers, "_meet", lambda self, worker: self._met.update({worker.worker_index: Answer(worker)}))
    training = begun(state, opening(cluster)[0])
    assert training.share_memory(["ps"])

    def shares():
        return training.share_memory_now, training.share_memory_among(training)

    seen = [shares()]
    for asks in (JOIN, LEAVE):
        assert state.ask(Request(TASKS[1], PLACES[1], asks)) is None
        await_change(training)
        seen.append(shares())
        training.take_changes()
        seen.append(shares())
    assert seen == [(True, True), (False, True), (False, False), (False, False), (True, True)]
    training.end()


def test_a_worker_that_fails_while_it_leaves_is_let_go(cluster, state):
    cluster.retired.clear()
    training = begun(state, opening(cluster)[0])
    state.ask(Request(TASKS[2], PLACES[2], LEAVE))
    await_change(training)
    training.take_changes()
    cluster.lost.add(2)
    assert state.await_answers(1) == [("worker:2", LEAVE, None)]
    training.end()


def test_a_worker_that_left_while_no_training_ran_is_let_go_when_the_next_one_starts(cluster, state):
    training = begun(state, opening(cluster)[0])
    training.end()
    assert training.are_current
    assert state.ask(Request(TASKS[2], PLACES[2], LEAVE)) == GRANTED
    assert not training.are_current
    training.start()
    assert training.indices == (0,)
    assert training.are_current
    await_true(lambda: cluster.removed == [(2, [])])
    assert Workers(None, state).indices == (0,)
    cluster.workers.append(cluster.worker(1))  # it has joined the training of another model
    assert not training.are_current


def test_a_worker_whose_leave_was_granted_by_the_end_of_a_training_leaves_once(cluster, state):
    training = begun(state, opening(cluster)[0])
    assert state.ask(Request(TASKS[2], PLACES[2], LEAVE)) is None
    await_change(training)
    training.end()
    assert state.await_answers(1) == [("worker:2", LEAVE, None)]
    state.ask(Request(TASKS[2], PLACES[2], JOIN))
    training.start()
    training.divide(opening(cluster)[0])
    training.begin(lambda _: None)
    await_true(lambda: training._ready)
    (worker,) = training.take_changes()
    assert (worker.worker_index, training.indices) == (2, (0, 2))


def test_a_worker_that_was_ready_at_the_end_of_a_training_joins_the_next_one_once(cluster, state):
    training = begun(state, opening(cluster)[0])
    state.ask(Request(TASKS[1], PLACES[1], JOIN))
    await_change(training)
    training.end()
    training.start()
    data, opened = opening(cluster)
    training.divide(data)
    training.begin(lambda _: None)
    (worker,) = training.take_changes()
    assert (worker.worker_index, opened) == (1, [(1, 1, 3)])
    assert (training.take_changes(), training.indices, len(cluster.added)) == ([], (0, 1, 2), 1)


def test_who_must_stay(cluster, state):
    needed = Refusal("two gradients make an update", code="not-elastic")
    training = begun(state, opening(cluster)[0], lambda number: needed if number < 2 else None)
    for lost, code in (([], "not-elastic"), ([0], "last-worker")):
        cluster.lost.update(lost)
        state.ask(Request(TASKS[2], PLACES[2], LEAVE))
        await_change(training)
        training.take_changes()
        assert state.answers.pop() == ("worker:2", LEAVE, code)
    assert len(training) == 2
    training.end()


def test_a_rule_that_keeps_its_workers_says_so(cluster, state):
    begun(state, opening(cluster)[0], lambda _: Refusal("why", code="not-elastic")).end()
    assert cluster.records == [("elastic", {"joins": False, "reason": "why", "code": "not-elastic"})]
