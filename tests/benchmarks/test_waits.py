"""Efficiency and processor time of steps that wait."""

import pytest

from benchmarks.cluster import RunFailed
from benchmarks.waits import Case, rate_of, result_of, table


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("ps:16:107", Case("ps", 16, 107.0)),
        ("ps:16:99.5:2", Case("ps", 16, 99.5, 2)),
        ("mirrored:8:107", Case("mirrored", 8, 107.0)),
    ],
)
def test_a_case_is_written_in_one_word(text, case):
    assert Case.parse(text) == case


@pytest.mark.parametrize("text", ["ps:16", "single:1:107", "mirrored:8:107:2", "ps:many:107"])
def test_other_words_are_no_case(text):
    with pytest.raises(ValueError):  # noqa: PT011 argparse takes any
        Case.parse(text)


def test_a_rate_is_that_of_a_line_through_all_reports():
    stairs = [(1.0, 0.0), (2.0, 20.0), (3.0, 20.0), (4.0, 40.0), (5.0, 40.0)]
    assert rate_of(stairs) == pytest.approx(10.0)
    with pytest.raises(RunFailed):
        rate_of(stairs[:2])


def test_processor_time_is_counted_by_step_and_role():
    used = {"chief:0": 1.0, "worker:0": 2.0, "worker:1": 4.0}
    result = result_of(Case("ps", 2, 100.0), 16.0, used, 10.0, others=0.25)
    assert result.efficiency == pytest.approx(0.8)
    assert result.cost == {"chief": pytest.approx(6.25), "worker": pytest.approx(37.5)}
    assert result.busiest == {"chief": pytest.approx(0.1), "worker": pytest.approx(0.4)}
    row = table({Case("ps", 2, 100.0): [result]}).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:4] == [
        "16.0",
        "0.80 (0.80 to 0.80)",
        "chief 6.25, worker 37.50",
    ]
