"""The share of the sum of two speeds that workers reach together."""

import pytest

from benchmarks.mixed import FAST, SLOW, Training, shares, table, trainings


def test_shares_are_those_of_the_same_rounds_speeds():
    rounds = [{FAST: 200.0, SLOW: 100.0, "both": 270.0}, {FAST: 400.0, SLOW: 200.0, "both": 600.0}]
    assert [shares(rates) for rates in rounds] == [{"both": pytest.approx(0.9)}, {"both": pytest.approx(1.0)}]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table(rounds).splitlines()]
    assert rows[2:] == [[FAST, "300", ""], [SLOW, "150", ""], ["both", "435", "0.950 (0.900 to 1.000)"]]


def test_both_workers_have_the_waits_that_each_has_alone():
    measured = trainings(50)
    assert measured[FAST].wait + measured[SLOW].wait == measured["both, async"].wait == [50, 100]


def test_mirrored_workers_have_neither_chief_nor_ps():
    assert "ps:" in Training([1.0]).cluster()
    assert "ps:" not in Training([1.0], strategy="multi_worker_mirrored").cluster()
