"""Many steps are scheduled at once if they are short, few if they take long."""

import pytest

from tfdist_cli.train.engine.pacing import ArrivalPacing, Pacing, auto_steps_per_execution


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def paced(workers, step_seconds):
    """A pace after every worker has taken a step."""
    pace = Pacing(workers)
    for _ in range(workers):
        pace.took(1, step_seconds)
    return pace


def test_one_short_execution_each_until_something_is_measured():
    pace = Pacing(3)
    assert (pace.size(20), pace.loop_size(20), pace.unrolls(20), pace.in_flight) == (1, 1, False, 3)
    pace.took(1, 0.01)
    assert (pace.size(20), pace.loop_size(20), pace.unrolls(20), pace.in_flight) == (20, 20, True, 9)


@pytest.mark.parametrize(
    ("seconds", "size", "loop_size", "unrolls"),
    [
        (0.001, 20, 20, True),
        (0.02, 20, 20, True),
        (0.05, 20, 20, True),
        (0.1, 20, 20, False),
        (0.11, 1, 20, False),
        (1, 1, 5, False),
        (30, 1, 1, False),
    ],
)
def test_steps_are_unrolled_or_looped_or_single_as_they_take_long(seconds, size, loop_size, unrolls):
    pace = paced(2, seconds)
    assert (pace.size(20), pace.loop_size(20), pace.unrolls(20)) == (size, loop_size, unrolls)


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_a_stall_of_all_workers_is_no_step_time(workers):
    pace = paced(workers, 0.01)
    for _ in range(2 * workers):
        pace.took(20, 0.2)
    for _ in range(workers):
        pace.took(20, 10.2)
    assert pace.step_seconds == pytest.approx(0.01)


def test_steps_that_change_are_noticed_after_two_executions_of_each_worker():
    pace = paced(3, 0.01)
    for seconds in (5, 0.001):
        for _ in range(6):
            pace.took(1, seconds)
        assert pace.step_seconds == pytest.approx(seconds)


def test_workers_may_join_and_leave():
    pace = paced(2, 0.01)
    pace.resize(4)
    assert pace.in_flight == 12
    pace.resize(1)
    assert (pace.in_flight, pace.step_seconds) == (3, 0.01)


def arrived(pace, clock, seconds, steps=1):
    """Steps are reported after some time."""
    clock.now += seconds
    pace.done(steps)


def by_arrival(step_seconds, clock):
    """A pace after two steps; the first one included compilation."""
    pace = ArrivalPacing(clock)
    arrived(pace, clock, step_seconds + 50)
    arrived(pace, clock, step_seconds)
    return pace


def test_the_first_report_of_a_size_is_not_counted_since_it_includes_compilation():
    clock = Clock()
    pace = by_arrival(0.01, clock)
    arrived(pace, clock, 50, steps=20)
    assert pace.step_seconds == pytest.approx(0.01)


def test_reports_that_arrive_all_at_once_do_not_look_short():
    clock = Clock()
    pace = by_arrival(0.3, clock)
    for _ in range(6):  # the chief was busy
        pace.done(1)
    for _ in range(10):
        assert pace.size(20) == 1
        arrived(pace, clock, 0.3)


def test_a_break_is_not_counted():
    clock = Clock()
    pace = by_arrival(0.01, clock)
    clock.now += 1000  # a validation
    pace.begin()
    for _ in range(8):
        arrived(pace, clock, 0.2, steps=20)
    assert pace.size(20) == 20


def test_a_stall_between_reports_is_no_step_time():
    clock = Clock()
    pace = by_arrival(0.01, clock)
    for seconds in (0.2, *[0.2] * 10, 10, *[0.2] * 3):
        arrived(pace, clock, seconds, steps=20)
        assert pace.size(20) == 20


def test_stalls_are_no_step_time_where_an_epoch_is_shorter_than_a_measurement():
    clock = Clock()
    pace = by_arrival(0.01, clock)
    arrived(pace, clock, 0.2, steps=20)
    for number in range(40):
        pace.begin()
        for _ in range(4):
            arrived(pace, clock, 0.1, steps=20)
        arrived(pace, clock, 10 if number % 10 == 5 else 0.1, steps=20)
        assert pace.size(20) == 20


def test_long_steps_are_noticed_by_their_reports():
    clock = Clock()
    pace = by_arrival(0.01, clock)
    for _ in range(3):
        arrived(pace, clock, 5)
    assert pace.size(20) == 1


@pytest.mark.parametrize(
    ("steps", "workers", "size"),
    [(1, 1, 1), (2, 1, 2), (100, 1, 10), (36, 1, 9), (7, 1, 7), (11, 1, 10), (97, 1, 10), (6, 4, 1), (40, 4, 10)],
)
def test_steps_per_execution_divide_the_epoch_unless_they_would_be_few(steps, workers, size):
    assert auto_steps_per_execution(steps, workers, 10) == size
