"""A plot has every row, every part of a step, and nothing that changes from one drawing to the next."""

import pytest

from benchmarks.contests import Outcome
from benchmarks.grid import CONTESTS
from benchmarks.plot import plot as plot_contests
from tests.bench.test_results import ALONE, ONE, RESULTS, TWO, row
from tfdist_cli.bench.plot import plot
from tfdist_cli.bench.results import Results

pytest.importorskip("matplotlib", reason="it comes with the extras 'plot' and 'dev'")


def test_all_rows_and_parts_are_there(tmp_path):
    plot(RESULTS, tmp_path / "bench.svg")
    drawn = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    for text in (RESULTS.title, ONE.name, TWO.name, ALONE.name, "wait", "pull", "compute", "rest"):
        assert f">{text}</text>" in drawn
    assert ">push</text>" not in drawn
    plot(RESULTS, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == drawn


def test_rates_alone(tmp_path):
    plot(Results("digits", "2 cores", 20, 0.0, (row(2, 10.0),)), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_contests_are_plotted_with_their_peers(tmp_path):
    names = ("mlp:ps_async:tf_keras", "mlp:ps_sync:ps_async")
    outcomes = [Outcome(CONTESTS[key], [100.0, 120.0], [50.0, 80.0], 0.0) for key in names]
    plot_contests(outcomes, tmp_path / "ratios.svg")
    drawn = (tmp_path / "ratios.svg").read_text(encoding="utf-8")
    assert "against tf_keras Model.fit</text>" in drawn
    assert drawn.count("against") == 2
