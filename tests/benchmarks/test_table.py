"""Results as medians, ratios and a page."""

import importlib.util
from dataclasses import replace
from datetime import date

import pytest

from benchmarks.contests import CONTESTS, Outcome
from benchmarks.figures import Comparison
from benchmarks.table import BEGIN, END, Circumstances, render, write
from benchmarks.workload import Workload
from tfdist_cli.bench.figures import Spread

ABOUT = Circumstances("python -m benchmarks", date(2026, 1, 2), 3, "2 cores")


def test_paired_ratios_compare_within_rounds():
    comparison = Comparison([100.0, 50.0, 90.0], [50.0, 25.0, 60.0])
    assert comparison.of_medians == pytest.approx(90 / 50)
    assert comparison.paired == Spread(2.0, 1.5, 2.0)


@pytest.mark.parametrize(("ours", "peer"), [([], []), ([1.0], [1.0, 2.0])])
def test_rounds_without_a_pair_are_refused(ours, peer):
    with pytest.raises(ValueError, match="rounds"):
        Comparison(ours, peer)


def test_results_have_their_circumstances():
    outcome = Outcome(CONTESTS["ps"], [100.0, 120.0, 110.0], [50.0, 60.0, 55.0], others=0.04)
    text = render([outcome], {"`tfdist --help`": [0.2, 0.1, 0.3]}, ABOUT)
    assert "`python -m benchmarks`, 2026-01-02. 2 cores." in text
    assert ["110 (100 to 120)", "tf_keras `Model.fit`: 55 (50 to 60)", "**2.00**", "2.00 (2.00 to 2.00)"] in [
        [cell.strip() for cell in line.strip("|").split("|")][1:] for line in text.splitlines()
    ]
    assert "3 rounds" in text
    assert "4%" in text
    assert "| `tfdist --help` | 0.20 (0.10 to 0.30) | 3 |" in text


def test_the_plot_is_named_below_the_table():
    outcome = Outcome(CONTESTS["ps"], [100.0], [50.0], others=0.0)
    assert "](benchmarks.svg)\n\nSteps" in render([outcome], {}, ABOUT, "benchmarks.svg")
    assert "![" not in render([outcome], {}, ABOUT)


def test_only_what_is_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write(page, "new\n")
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


def test_a_page_without_markers_is_left_alone(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"{BEGIN} only", encoding="utf-8")
    with pytest.raises(ValueError, match="no <!-- results"):
        write(page, "new\n")
    assert page.read_text(encoding="utf-8") == f"{BEGIN} only"


@pytest.mark.parametrize("contest", CONTESTS.values(), ids=CONTESTS.keys())
def test_a_contest_has_two_contestants_with_programs_and_workloads(contest):
    assert contest.ours.name != contest.peer.name
    for who in (contest.ours, contest.peer):
        assert importlib.util.find_spec(who.program) is not None
        replace(Workload(""), **contest.changes, **who.changes)
