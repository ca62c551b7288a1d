"""Much work at once while steps are short, little when they take long."""

from tfdist_cli.train.pace import Pace


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def paced(workers, step_seconds, size=20, clock=None):
    """A pace after every worker has done two executions at the same time as the others, and compiled in the first."""
    clock = clock or Clock()
    pace = Pace(workers, clock)
    for seconds in (50, 0):
        clock.now += seconds + step_seconds * size
        for _ in range(workers):
            pace.done(size)
    return pace


def test_one_execution_each_until_something_is_known():
    clock = Clock()
    pace = Pace(3, clock)
    assert (pace.size(20), pace.in_flight) == (20, 3)
    for known in (False, True):
        assert pace.in_flight == 3
        clock.now += 0.1
        pace.done(20)
        pace.done(20)
        assert pace.in_flight == 3
        pace.done(20)
        assert pace.in_flight == (9 if known else 3)


def test_short_steps_go_by_the_dozen():
    assert paced(2, 0.01).size(20) == 20
    assert paced(2, 0.1).size(20) == 20


def test_long_steps_go_one_by_one():
    assert paced(2, 0.11).size(20) == 1
    assert paced(1, 30).size(20) == 1


def test_what_gets_quick_is_found_out():
    clock = Clock()
    pace = paced(2, 5, clock=clock)
    for _ in range(200):
        clock.now += 0.01
        pace.done(1)
    assert pace.size(20) == 20


def test_what_comes_back_all_at_once_does_not_look_quick():
    clock = Clock()
    pace = paced(2, 0.3, clock=clock)
    for _ in range(6):  # the chief was busy
        pace.done(1)
    for _ in range(10):
        assert pace.size(20) == 1
        clock.now += 0.15
        pace.done(1)


def test_a_rest_is_not_counted():
    clock = Clock()
    pace = paced(1, 0.01, clock=clock)
    clock.now += 1000  # a validation
    pace.begin()
    clock.now += 0.2
    pace.done(20)
    assert pace.size(20) == 20
