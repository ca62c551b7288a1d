"""Results as medians, ratios and a page."""

import re
from datetime import date

import pytest

from benchmarks.contests import Outcome
from benchmarks.figures import Comparison
from benchmarks.grid import CONTESTS
from benchmarks.sizes import SIZES
from benchmarks.table import BEGIN, END, PEERS, Circumstances, render, write
from tfdist_cli.bench.figures import Spread

ABOUT = Circumstances("python -m benchmarks", date(2026, 1, 2), "2 cores")


def test_paired_ratios_compare_within_rounds():
    comparison = Comparison([100.0, 50.0, 90.0], [50.0, 25.0, 60.0])
    assert comparison.of_medians == pytest.approx(90 / 50)
    assert comparison.paired == Spread(2.0, 1.5, 2.0)


@pytest.mark.parametrize(("ours", "peer"), [([], []), ([1.0], [1.0, 2.0])])
def test_rounds_without_a_pair_are_refused(ours, peer):
    with pytest.raises(ValueError, match="rounds"):
        Comparison(ours, peer)


OURS = "`tfdist.fit` [1 chief, 1 ps, 2 workers; batch 64; 20 steps an execution; float32; oneDNN]"
TF_KERAS = "tf_keras `Model.fit` [1 chief, 1 ps, 2 workers; batch 64; 20 steps an execution; float32; oneDNN]"
KERAS = (
    "Keras 3 `Model.fit`, one process [1 process, both cores; batch 64; 20 steps an execution; float32; XLA; oneDNN]"
)


def outcome(name, ours, peer):
    return Outcome(CONTESTS[name], ours, peer, others=0.04)


def test_results_have_their_circumstances_and_both_sides_settings():
    results = [outcome("mlp:ps_async:tf_keras", [100.0, 120.0, 110.0], [50.0, 60.0, 55.0])]
    text = render(results, {"`tfdist --help`": [0.2, 0.1, 0.3]}, ABOUT)
    assert "`python -m benchmarks`, 2026-01-02. 2 cores." in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert [
        "`mlp:ps_async:tf_keras`",
        "MLP 784-500-500-10, batch 64: ps, asynchronous",
        f"{OURS}: 110.0 (100.0 to 120.0)",
        f"{TF_KERAS}: 55.0 (50.0 to 60.0)",
        "**2.00**",
        "2.00 (2.00, 2.00, 2.00)",
    ] in cells
    assert "4%" in text
    assert "Measured" not in text
    assert "| `tfdist --help` | 0.20 (0.10 to 0.30) | 3 |" in text


def test_the_worst_row_is_the_worst_of_those_against_the_best_peers():
    results = [
        outcome("mlp:ps_async:tf_keras", [100.0], [50.0]),
        outcome("mlp:ps_async:keras", [100.0], [80.0]),
        outcome("mlp:single:keras", [100.0], [90.0]),
    ]
    text = render(results, {}, ABOUT)
    assert KERAS in text
    assert "worst `mlp:single:keras`, **1.11**; best `mlp:ps_async:keras`, **1.25**" in text


def test_the_grid_has_a_row_for_each_training_and_a_column_for_each_kind_of_peer():
    results = [
        outcome("mlp:ps_async:tf_keras", [100.0, 90.0, 120.0], [50.0, 50.0, 50.0]),
        outcome("mlp:ps_async:keras", [100.0], [80.0]),
        outcome("mlp_large:single:keras", [100.0], [90.0]),
        outcome("bag_rs:ps_async:bag", [100.0], [90.0]),
    ]
    lines = render(results, {}, ABOUT).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| model |"))
    header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[first : first + 4]]
    assert header[2:] == [PEERS["tf_keras"], PEERS["keras"]]
    assert [row[0] for row in rows] == [SIZES["mlp"].title, SIZES["mlp_large"].title]
    assert [row[2:] for row in rows] == [["2.00", "1.25"], ["", "1.11"]]
    assert not lines[first + 4]


def test_rounds_of_several_days_are_dated():
    days = ("2026-01-01", "2026-01-02")
    result = Outcome(CONTESTS["bag_rs:ps_async:bag"], [1.0, 1.0], [1.0, 1.0], 0.0, days)
    text = render([result], {}, ABOUT)
    assert set(days) <= set(re.findall(r"\d{4}-\d\d-\d\d", text))
    assert "model | placement" not in text


def test_the_plot_is_named_above_the_table():
    results = [outcome("mlp:ps_async:tf_keras", [100.0], [50.0])]
    assert "](benchmarks.svg)\n\n| contest" in render(results, {}, ABOUT, "benchmarks.svg")
    assert "![" not in render(results, {}, ABOUT)


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
