"""The processor time of a tensor's way."""

import psutil
import pytest

from benchmarks.transfer import Cost, milliseconds, table, through_a_connection


@pytest.mark.slow
def test_the_time_is_that_of_the_given_processes():
    def busy():
        sum(range(3_000_000))

    assert milliseconds(busy, [psutil.Process()]) > 0
    assert milliseconds(busy, []) == 0


def test_bytes_pass_through_a_connection_and_its_other_end_exits():
    before = {child.pid for child in psutil.Process().children()}
    assert through_a_connection(10_000) >= 0
    assert {child.pid for child in psutil.Process().children()} == before


def test_the_table_has_all_ways():
    row = table({1_320_000: [Cost(1.5, 0.75, 0.5), Cost(2.5, 0.75, 0.5)]}).splitlines()[-1]
    assert row == "| 1,320,000 | 2.00 (1.50 to 2.50) | 0.75 (0.75 to 0.75) | 0.50 (0.50 to 0.50) |"
