"""The figures of trainings in slots, and how a launch is measured."""

import json
import subprocess
import sys
import time
from datetime import datetime, timezone

import pytest

from benchmarks.cluster import RunFailed
from benchmarks.slots import CLUSTER, Figures, Training, table
from tfdist_cli.spec.loading.load import load_run

ROUNDS = [
    Figures(2.0, 20.0, 0.98, 1.0, 5.0, 6.0, 3.0, 9, 3.5, 0, 0.1),
    Figures(4.0, 30.0, 0.98, 2.0, 7.0, 8.0, 4.0, 10, 4.5, 1, 0.3),
    Figures(3.0, 25.0, 0.98, 1.5, 6.0, 7.0, 3.0, 9, 3.5, 0, 0.2),
]


def test_the_table_has_medians_and_ranges_and_the_most_that_was_left():
    row = table({"spark": ROUNDS}).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].split() == ["3.0", "(2.0", "to", "4.0)"]
    assert cells[-3:] == ["9", "1", "30%"]


def test_a_round_alone_has_no_range():
    row = table({"spark": ROUNDS[:1]}).splitlines()[2]
    assert "to" not in row
    assert len(row.split("|")) == len(table({}).splitlines()[0].split("|"))


def test_reports_are_those_of_a_split_after_a_time(tmp_path):
    (tmp_path / "run").mkdir()
    moments = {"train": 1.0, "test": 2.0, "late": 3.0}
    lines = [
        {"split": split.replace("late", "train"), "time": datetime.fromtimestamp(at, timezone.utc).isoformat()}
        for split, at in moments.items()
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    training = Training(None, tmp_path, 0.0)
    assert training.metrics() == [lines[0], lines[2]]
    assert training.metrics(after=2.5) == lines[2:]
    assert training.metrics("test") == lines[1:2]


def test_a_launch_that_ends_otherwise_was_not_measured(tmp_path):
    (tmp_path / "log").write_text("why\n")
    launch = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RunFailed):
        Training(launch, tmp_path, time.time()).await_end(0)
    with pytest.raises(RunFailed):
        Training(launch, tmp_path, time.time()).until(lambda: None)


def test_the_cluster_file_is_valid(tmp_path):
    (path := tmp_path / "cluster.yaml").write_text(json.dumps({**CLUSTER, "launcher": "local"}))
    cluster, recipe = load_run(path)
    assert len(cluster.tasks) == 2
    assert recipe is not None
