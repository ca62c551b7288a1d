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
    assert RemainingTime().update(at(5, rate=0.0), 1) is None


def test_the_first_report_says_its_own_rate_and_time_goes_on_between_reports():
    remaining, first = RemainingTime(), at(100)
    assert remaining.update(first, 10) == 90
    assert remaining.update(first, 14) == 86
    assert remaining.update(first, 500) == 0


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
    assert remaining.update(at(500, rate=5.0), 65) == 100
