"""Dividing steps into executions, pausing between two steps, and fetching results if a worker fails meanwhile."""

import threading
import time
from collections import Counter

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.cluster_coordinator import ClosureAbortedError
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tests.support.compare import batches, classifier
from tests.support.local_coordinator import NoPause, local_engine
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.engine.base import Rules
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.update_rules import asynchronous
from tfdist_cli.train.engine.parameter_server.update_rules.asynchronous import _fetched, _Schedule


class Remote:
    """A remote value; each entry of the script is raised or returned by a fetch."""

    def __init__(self, *script, error=None):
        self.script, self._error, self._status = list(script), error, RemoteValueStatus.READY

    def fetch(self):
        event = self.script.pop(0)
        if event is ABORTED:
            self._status, event = RemoteValueStatus.ABORTED, ClosureAbortedError(LOST)
        if isinstance(event, Exception):
            raise event
        return event


LOST = tf.errors.UnavailableError(None, None, "Socket closed")
ABORTED = object()


def test_a_result_that_was_lost_with_its_worker_is_fetched_from_the_next_one():
    assert _fetched(Remote(LOST, LOST, "result")) == "result"


def test_an_execution_that_has_failed_is_raised():
    failed = tf.errors.InvalidArgumentError(None, None, "no")
    with pytest.raises(tf.errors.InvalidArgumentError):
        _fetched(Remote(failed, error=failed))


def test_an_execution_that_fails_while_it_is_fetched_is_raised():
    with pytest.raises(tf.errors.UnavailableError):
        _fetched(Remote(None, LOST, error=LOST))


def test_an_execution_that_is_aborted_with_its_worker_has_no_result():
    assert _fetched(Remote(LOST, ABORTED)) is None


class Scheduled:
    """A remote value that is ready when it is told."""

    def __init__(self, number, count, *, unrolled):
        self.number, self.count, self.unrolled = number, count, unrolled
        self._status_available_event = threading.Event()

    def ready(self):
        self._status_available_event.set()


def executions(steps, size, step_seconds, *, workers=2, every=1, adapts=True, loops=True, first=0):
    """The numbers of steps of a run's executions, with a mark of those that are loops."""
    pace = Pacing(workers)
    if step_seconds:
        pace.took(1, step_seconds)
    schedule, found, following = _Schedule(pace, every, steps, first), [], first
    while schedule.may_add:
        schedule.add(Scheduled, size, adapts=adapts, loops=loops)
        remote = schedule.in_flight.pop().remote
        assert remote.number == following
        following += remote.count
        found.append(remote.count if remote.unrolled else f"{remote.count} in a loop")
    assert following == first + steps
    return Counter(found)


@pytest.mark.parametrize(
    ("steps", "step_seconds", "options", "expected"),
    [
        (6, None, {}, {"1 in a loop": 6}),
        (200, 0.001, {}, {20: 10}),
        (50, 0.001, {}, {20: 1, "15 in a loop": 2}),  # both workers end together
        (200, 0.1, {}, {"20 in a loop": 10}),
        (240, 0.1, {"workers": 8}, {"15 in a loop": 16}),
        (20, 1, {}, {"5 in a loop": 4}),
        (4, 60, {}, {"1 in a loop": 4}),
        (50, None, {"adapts": False}, {20: 2, "10 in a loop": 1}),
        (50, 0.001, {"adapts": False}, {20: 2, "10 in a loop": 1}),
        (50, 9, {"adapts": False}, {"20 in a loop": 2, "10 in a loop": 1}),
        (3, 0.001, {"loops": False}, {1: 3}),
        (50, 0.001, {"every": 4}, {20: 1, "16 in a loop": 1, "12 in a loop": 1, 2: 1}),
        (11, 60, {"every": 4}, {"4 in a loop": 2, 3: 1}),
        (11, 0.001, {"every": 4, "loops": False}, {4: 2, 3: 1}),
    ],
)
def test_a_run_is_divided_into_executions(steps, step_seconds, options, expected):
    assert executions(steps, 20, step_seconds, first=7, **options) == expected


def test_an_execution_that_is_done_does_not_wait_for_an_earlier_one(monkeypatch):
    monkeypatch.setattr(asynchronous, "_POLL_SECONDS", 0.01)
    schedule = _Schedule(Pacing(2), 1, 2, 0)
    while schedule.may_add:
        schedule.add(Scheduled, 1, adapts=True, loops=True)
    first, second = (each.remote for each in schedule.in_flight)
    assert schedule.next_done() is None
    second.ready()
    assert schedule.next_done().remote is second
    first.ready()
    assert schedule.next_done().remote is first
    assert not schedule.in_flight


def test_a_new_workers_first_execution_runs_elsewhere_if_the_worker_is_lost():
    schedule = _Schedule(Pacing(2), 1, 12, 7)
    schedule.add_first(Scheduled, 20, unrolled=True)  # more steps than there are
    schedule.add_first(Scheduled, 5, unrolled=True)
    lost = schedule.in_flight.pop()
    schedule.add_again(lost, Scheduled)
    (again,) = schedule.in_flight
    assert again.remote is not lost.remote
    assert (again.remote.number, again.remote.count, again.remote.unrolled) == (7, 5, True)
    assert schedule.next_number == 12


class PauseAtUpdate:
    """Wants a pause once the model has had a number of updates."""

    def __init__(self, model, update):
        self.model, self.update = model, update

    def wanted(self):
        return int(self.model.optimizer.iterations) >= self.update

    agreed = wanted


class Counting(keras.layers.Layer):
    """Counts its training steps in the model's state."""

    def build(self, _):
        self.count = self.add_weight(shape=(), dtype="int64", trainable=False, initializer="zeros")

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
        return x


def slow_batches():
    """Batches of which each takes a moment."""

    def wait(x):
        time.sleep(0.005)
        return x

    return batches().repeat().map(lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape), y))


@pytest.mark.slow
def test_a_loop_ends_early_for_a_pause_and_all_counts_are_exact(servers, monkeypatch):
    build = lambda: classifier(Counting(), keras.layers.Dropout(0.5))  # noqa: E731 called within the scope
    engine, model = local_engine(monkeypatch, servers(1), build, slow_batches(), Rules(), workers=1)
    monkeypatch.setattr(Pacing, "unrolls", lambda *_: False)
    monkeypatch.setattr(Pacing, "in_flight", 1)  # a worker takes one at a time
    done, seeds = 0, [variable for variable in model.variables if "seed" in variable.path]
    while done < 300:
        pause = PauseAtUpdate(model, done + 5) if done < 100 else NoPause()
        before = done
        for execution in engine.run(300 - done, first=done, size=100, adapts=True, pause=pause):
            assert execution.first == done
            done += len(execution.losses)
            assert execution.steps.get("worker:0", 0) == len(execution.losses)
        if before < 100:
            assert before + 5 <= done < before + 60
        assert int(model.optimizer.iterations) == done
        assert int(engine._step.model.layers[0].count) == done
        engine.settle(done)
        assert [int(variable[-1]) for variable in seeds] == [done] * len(seeds)  # as if there had been no pause
    assert done == 300
    assert seeds


@pytest.mark.slow
@pytest.mark.parametrize("updates", [Updates(), Updates(push_every=2), Updates(local_steps=2)])
def test_executions_grow_from_single_steps_and_all_steps_are_counted(updates, servers, monkeypatch):
    engine, model = local_engine(monkeypatch, servers(2), classifier, batches().repeat(), Rules(updates=updates))
    executions = list(engine.run(43, first=0, size=4, adapts=True, pause=NoPause()))
    assert len(executions[0].losses) == updates.steps_per_round
    assert 4 in {len(each.losses) for each in executions}
    assert sum(len(each.losses) for each in executions) == 43
    assert int(model.optimizer.iterations) == (22 if updates.push_every == 2 else 43)
