"""The remaining time of a training."""

import pytest

from tfdist_cli.cli.console.remaining import RemainingTime
from tfdist_cli.launch.run.snapshot import Progress


def at(step, total=1000, rate=10.0):
    return Progress(step, total, None, None, rate, {}, {})


def test_unknown_without_a_total_and_when_all_is_done():
    assert RemainingTime().update(None, 1) is None
    assert RemainingTime().update(at(5, None), 1) is None
    assert RemainingTime().update(at(1000), 1) is None
    assert RemainingTime().update(at(5), 1) is None


def test_the_first_report_has_no_estimate_and_time_goes_on_between_later_ones():
    remaining, second = RemainingTime(), at(100)
    assert remaining.update(at(1, rate=0.01), 1) is None
    assert remaining.update(second, 10.9) == pytest.approx(90)
    assert remaining.update(second, 14.9) == pytest.approx(86)
    assert remaining.update(second, 500) == 0


def test_a_steady_training_is_told_exactly_though_its_own_rate_jumps():
    remaining = RemainingTime()
    for second in range(60):
        left = remaining.update(at(10 * second, rate=10.0 if second % 2 else 90.0), second)
        if second:
            assert left == pytest.approx(100 - second)


def test_a_pause_moves_it_a_little_and_a_restart_begins_again():
    remaining = RemainingTime()
    for second in range(60):
        before = remaining.update(at(10 * second), second) or 0.0
    after = remaining.update(at(10 * 59 + 1), 64) or 0.0
    assert before - 5 < after < 1.3 * before
    assert remaining.update(at(500, rate=5.0), 65) is None
    assert remaining.update(at(505), 66) == pytest.approx(99)
