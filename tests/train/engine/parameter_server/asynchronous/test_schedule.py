"""Dividing steps into executions, for any worker or for each worker, and keeping those in flight."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.asynchronous import schedule as schedules
from tfdist_cli.train.engine.parameter_server.asynchronous.schedule import Lane, Schedule, equal_shares


class Remote:
    """A remote value that is ready when it is told."""

    def __init__(self, number, count, *, unrolled):
        self.number, self.count, self.unrolled = number, count, unrolled
        self._status, self._error = RemoteValueStatus.NOT_READY, None
        self._status_available_event = threading.Event()

    def ready(self):
        self._set(RemoteValueStatus.READY)

    def abort(self):
        """Its worker is lost."""
        self._set(RemoteValueStatus.ABORTED)

    def run_again(self):
        """Its worker is back."""
        self._status = RemoteValueStatus.NOT_READY
        self._status_available_event.clear()

    def _set(self, status):
        self._status = status
        self._status_available_event.set()


def executions(steps, size, step_seconds, *, workers=2, every=1, adapts=True, loops=True, first=0, **unrolls):
    """The numbers of steps of a run's executions, with a mark of those that are loops."""
    pace = Pacing(workers)
    if step_seconds:
        pace.took(1, step_seconds)
    schedule, found, following = Schedule(pace, every, [Lane(Remote, steps, workers)], first, **unrolls), [], first
    while schedule.may_add:
        schedule.add(size, adapts=adapts, loops=loops)
        remote = schedule.in_flight[-1].remote
        remote.ready()
        schedule.next_done()
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
        (50, None, {"adapts": False}, {"20 in a loop": 2, "10 in a loop": 1}),
        (50, 0.001, {"unrolls": lambda _: False}, {"13 in a loop": 3, "11 in a loop": 1}),
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
    monkeypatch.setattr(schedules, "_POLL_SECONDS", 0.01)
    schedule = Schedule(Pacing(2), 1, [Lane(Remote, 2, 2)], 0)
    while schedule.may_add:
        schedule.add(1, adapts=True, loops=True)
    first, second = (each.remote for each in schedule.in_flight)
    assert schedule.next_done() is None
    second.ready()
    assert schedule.next_done().remote is second
    first.ready()
    assert schedule.next_done().remote is first
    assert not schedule.in_flight


def test_a_new_workers_first_execution_runs_elsewhere_if_the_worker_is_lost():
    schedule = Schedule(Pacing(2), 1, [Lane(Remote, 12, 2)], 7)
    schedule.add_first(Remote, 20, unrolled=True)  # more steps than there are
    schedule.add_first(Remote, 5, unrolled=True)
    lost = schedule.in_flight.pop()
    schedule.add_again(lost)
    (again,) = schedule.in_flight
    assert again.remote is not lost.remote
    assert (again.remote.number, again.remote.count, again.remote.unrolled) == (7, 5, True)
    assert schedule.next_number == 12


@pytest.mark.parametrize(
    ("taken", "steps", "expected"),
    [
        ([0, 0, 0], 7, [3, 2, 2]),
        ([3, 2, 2], 5, [1, 2, 2]),  # the ones with one step less get it back
        ([27_500, 27_500, 27_000], 500, [0, 0, 500]),
        ([90, 0, 5], 20, [0, 13, 7]),
        ([4], 9, [9]),
        ([5, 1], 0, [0, 0]),
    ],
)
def test_equal_shares(taken, steps, expected):
    assert equal_shares(taken, steps) == expected


def shares(*lefts):
    """A schedule with a share of each worker, and the workers."""
    workers = [SimpleNamespace(worker_index=index, _is_dead_with_error=None) for index in range(len(lefts))]
    lanes = [Lane(Remote, left, worker=worker) for left, worker in zip(lefts, workers, strict=True)]
    return Schedule(Pacing(len(lefts)), 1, lanes, 0), workers


def fill(schedule):
    while schedule.may_add:
        schedule.add(1, adapts=True, loops=True)


def test_steps_of_a_lost_worker_wait_until_it_is_back(monkeypatch):
    monkeypatch.setattr(schedules, "_POLL_SECONDS", 0.01)
    schedule, (lost, other) = shares(2, 1)
    fill(schedule)
    own, others = (each.remote for each in schedule.in_flight)
    lost._is_dead_with_error = True
    own.abort()
    others.ready()
    assert schedule.next_done().worker is other
    assert not schedule.may_add
    assert schedule.next_done() is None
    assert schedule.awaited == {0}
    lost._is_dead_with_error = None
    own.run_again()
    assert not schedule.awaited
    own.ready()
    assert schedule.next_done().remote is own
    assert schedule.may_add


def test_a_pause_does_not_wait_for_a_lost_worker():
    schedule, (lost, _) = shares(1, 1)
    fill(schedule)
    lost._is_dead_with_error = True
    schedule.in_flight[0].remote.abort()
    schedule.drop_waiting()
    assert [each.worker is lost for each in schedule.in_flight] == [False]


def test_a_worker_that_has_left_gives_its_steps_to_the_others():
    schedule, (left, other) = shares(2, 1)
    fill(schedule)
    schedule.divide([Lane(Remote, schedule.left, worker=other)])
    schedule.in_flight[0].remote.abort()  # it was killed before its last execution was done
    scheduled = schedule.next_done()
    assert scheduled.worker is left
    schedule.add_again(scheduled)
    assert schedule.in_flight[-1].worker is other
    assert schedule.left == 1
