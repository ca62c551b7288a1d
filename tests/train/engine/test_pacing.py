"""Many steps are scheduled at once if they are short, few if they take long."""

import pytest

from tfdist_cli.train.engine.pacing import Pacing, auto_steps_per_execution


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def paced(workers, step_seconds, clock=None):
    """A pace after every worker has taken two steps; the first one included compilation."""
    clock = clock or Clock()
    pace = Pacing(workers, clock)
    work(pace, clock, workers, step_seconds + 50)
    work(pace, clock, workers, step_seconds)
    return pace


def work(pace, clock, workers, seconds, steps=1):
    """Every worker finishes an execution, at the same time as the others."""
    clock.now += seconds
    for _ in range(workers):
        pace.done(steps)


def test_one_execution_each_until_something_is_measured():
    clock = Clock()
    pace = Pacing(3, clock)
    for measured in (False, True):
        assert (pace.size(20), pace.in_flight) == (1, 3)
        clock.now += 0.1
        pace.done(1)
        pace.done(1)
        assert (pace.size(20), pace.in_flight) == (1, 3)
        pace.done(1)
        assert (pace.size(20), pace.in_flight) == ((20, 9) if measured else (1, 3))


def test_short_steps_are_scheduled_by_the_dozen():
    assert paced(2, 0.01).size(20) == 20
    assert paced(2, 0.1).size(20) == 20


def test_long_steps_are_scheduled_one_by_one():
    assert paced(2, 0.11).size(20) == 1
    assert paced(1, 30).size(20) == 1


def test_the_first_executions_of_a_size_are_not_counted_since_they_compile():
    clock = Clock()
    pace = paced(2, 0.01, clock)
    work(pace, clock, 2, 50, steps=20)
    assert pace.size(20) == 20
    work(pace, clock, 2, 50, steps=20)
    assert pace.size(20) == 1


def test_steps_that_become_short_are_noticed():
    clock = Clock()
    pace = paced(2, 5, clock)
    for _ in range(200):
        clock.now += 0.01
        pace.done(1)
    assert pace.size(20) == 20


def test_executions_that_arrive_all_at_once_do_not_look_short():
    clock = Clock()
    pace = paced(2, 0.3, clock)
    for _ in range(6):  # the chief was busy
        pace.done(1)
    for _ in range(10):
        assert pace.size(20) == 1
        clock.now += 0.15
        pace.done(1)


def test_a_break_is_not_counted():
    clock = Clock()
    pace = paced(1, 0.01, clock)
    clock.now += 1000  # a validation
    pace.begin()
    work(pace, clock, 1, 0.2, steps=20)
    work(pace, clock, 1, 0.2, steps=20)
    assert pace.size(20) == 20


@pytest.mark.parametrize(
    ("steps", "workers", "size"),
    [(1, 1, 1), (2, 1, 2), (100, 1, 10), (36, 1, 9), (7, 1, 7), (11, 1, 10), (97, 1, 10), (6, 4, 1), (40, 4, 10)],
)
def test_steps_per_execution_divide_the_epoch_unless_they_would_be_few(steps, workers, size):
    assert auto_steps_per_execution(steps, workers, 10) == size
