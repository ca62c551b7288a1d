"""Tables, JSON and plots say what was measured, and what is left over."""

import json
import os
import platform

from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.machine import Usage, describe
from tfdist_cli.bench.measure import Rate, Split
from tfdist_cli.bench.results import Results, Row

TRAFFIC = {"pulled": 1_152_040.0, "pushed": 1_152_052.5}


def row(workers, *rates, split=None, alone=False):
    name = "one process" if alone else f"{workers} workers"
    return Row(name, workers, alone, tuple(Rate(rate, 32 * rate) for rate in rates), split)


ONE = row(1, 90.0, 110.0, 100.0, split=Split(10.0, {"pull": 2.0, "compute": 7.5}, TRAFFIC, 80.0))
TWO = row(2, 150.0, 170.0, 140.0, split=Split(13.0, {"wait": 1.0, "compute": 7.5}, TRAFFIC, 150.0))
ALONE = row(1, 300.0, 290.0, 310.0, split=Split(3.25, {"compute": 3.0}, {}, 300.0), alone=True)
RESULTS = Results("digits: mlp", "2 cores", 200, 0.041, (ONE, TWO, ALONE))


def test_a_spread_has_the_median_and_both_ends():
    assert Spread.of([3.0, 1.0, 10.0, 4.0]) == Spread(3.5, 1.0, 10.0)
    assert Spread(1234.5, 1.0, 10.0).shown(1) == "1,234.5 (1.0 to 10.0)"


def test_rates_and_how_they_grow():
    assert RESULTS.rates()[1:] == [
        ["1 workers", "100.0 (90.0 to 110.0)", "3,200 (2,880 to 3,520)", "100%"],
        ["2 workers", "150.0 (140.0 to 170.0)", "4,800 (4,480 to 5,440)", "75%"],
        ["one process", "300.0 (290.0 to 310.0)", "9,600 (9,280 to 9,920)", ""],
    ]


def test_the_parts_of_a_step_and_what_is_left_over():
    assert RESULTS.phases() == [
        ["ms a step", "wait", "pull", "compute", "rest", "step"],
        ["1 workers", "", "2.00", "7.50", "0.50 (5%)", "10.00"],
        ["2 workers", "1.00", "", "7.50", "4.50 (35%)", "13.00"],
        ["one process", "", "", "3.00", "0.25 (8%)", "3.25"],
    ]
    assert RESULTS.traffic() == [
        ["bytes a step", "pulled", "pushed"],
        ["1 workers", "1,152,040", "1,152,052"],
        ["2 workers", "1,152,040", "1,152,052"],
    ]


def test_notes_say_how_it_was_measured():
    notes = " ".join(RESULTS.notes())
    assert "of 3 runs of 200 steps of each worker" in notes
    assert "up to 4% of the machine" in notes
    assert "against 1 workers" in notes
    assert "100% to 125%" in notes


def test_nothing_is_made_up_where_steps_are_not_split():
    results = Results("digits", "2 cores", 20, 0.0, (row(2, 10.0), row(4, 15.0)))
    assert len(results.tables()) == 1
    assert "GPU" in " ".join(results.notes())
    assert [each["split"] for each in results.as_json()["rows"]] == [None, None]


def test_json_has_all_of_it():
    read = json.loads(json.dumps(RESULTS.as_json()))
    assert read["rows"][1]["steps_per_second"] == {
        "median": 150.0, "min": 140.0, "max": 170.0, "rounds": [150.0, 170.0, 140.0]
    }  # fmt: skip
    assert [each["efficiency"] for each in read["rows"]] == [1.0, 0.75, None]
    assert read["rows"][0]["split"] == {
        "ms_per_step": {"pull": 2.0, "compute": 7.5, "rest": 0.5, "step": 10.0},
        "bytes_per_step": TRAFFIC,
        "steps_per_second": 80.0,
    }


def test_a_page_has_its_tables_and_its_plot():
    page = RESULTS.as_markdown("bench.svg")
    assert page.startswith("# digits: mlp\n\n2 cores.\n\n![")
    assert "](bench.svg)" in page
    assert "| 2 workers | 150.0 (140.0 to 170.0) | 4,800 (4,480 to 5,440) | 75% |\n" in page
    assert "|  | steps/s | examples/s | efficiency |\n| --- | ---: | ---: | ---: |\n" in page
    assert "![" not in RESULTS.as_markdown()


def test_the_machine_is_told_without_its_name():
    assert "cores" in describe()
    told = describe(["no such package", "pytest"])
    assert "pytest " in told
    assert "no such package" not in told
    assert platform.node() not in describe()


def test_what_others_use_is_a_share_of_the_machine():
    now = Usage.now()
    share = Usage(now.moment - 10, now.total - 5, now.own - 2).others()
    assert 3 / (11 * (os.cpu_count() or 1)) < share < 1
